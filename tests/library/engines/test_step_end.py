"""A balancing bias moves by what all ranks of a group chose: of our routers, and of a Hugging Face model's class."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

import pointsman
from pointsman.engines.common import carried, deliver, step_end

RATE, EXPERTS = 0.1, 4


def counted(choices: Tensor, group: Any = None) -> Tensor:
    count = torch.bincount(choices.flatten(), minlength=EXPERTS).float()
    dist.all_reduce(count, group=group)
    return RATE * torch.sign(count.mean() - count)


def of_our_router(alone: Any) -> None:
    torch.manual_seed(0)
    layer = pointsman.MoE(16, 24, EXPERTS, top_k=2, router=f"loss-free:rate={RATE}").train()
    other = copy.deepcopy(layer)
    hidden = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    with pointsman.record_routing(layer) as records:
        layer(hidden).sum().backward()
    other(hidden).sum().backward()
    (choices,) = (routing.experts for routing in records.values())
    step_end(layer)
    step_end(other, alone)
    torch.testing.assert_close(layer.router.select.bias, counted(choices))
    torch.testing.assert_close(other.router.select.bias, counted(choices, alone))
    assert not torch.equal(layer.router.select.bias, other.router.select.bias)


def of_a_class(alone: Any) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, use_cache=False,
    )  # fmt: skip
    model: Any = pointsman.hf.balance(DeepseekV3ForCausalLM(config).train(), RATE, "bias")
    gate = model.model.layers[0].mlp.gate
    seen: list[Tensor] = []
    gate.register_forward_hook(lambda module, args, output: seen.append(output[-1]))
    ids = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(dist.get_rank()))
    ready = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ready(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(gate.e_score_correction_bias, counted(seen[0]))
    assert not torch.equal(counted(seen[0]), counted(seen[0], alone))


def without_a_group() -> None:
    """`pointsman.step_end` adds up over DDP's processes, and says once where it adds up nothing."""
    torch.manual_seed(0)
    layer = pointsman.MoE(16, 24, EXPERTS, top_k=2, router=f"loss-free:rate={RATE}").train()
    ready = nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    hidden = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    with pointsman.record_routing(layer) as records:
        ready(hidden).sum().backward()
    with pointsman.track_steps(ready, optimizer):
        optimizer.step()
    (choices,) = (routing.experts for routing in records.values())
    torch.testing.assert_close(layer.router.select.bias, counted(choices))
    if dist.get_rank():  # a step in which one process left the layer out
        layer(hidden).sum().backward()
    before = layer.router.select.bias.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pointsman.step_end(ready)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("step_end: the processes ran other layers in this step")
    assert torch.equal(layer.router.select.bias, before), "in both processes, which stay alike"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(hidden).sum().backward()
            pointsman.step_end(layer)
    (told,) = [str(one.message) for one in caught]
    assert told.startswith("step_end: each of the processes counts its own tokens only")


def each_its_own_layer() -> None:
    """What two processes count that ran different layers, with sums of one size, moves nothing; the next step does."""
    torch.manual_seed(0)
    spec = f"loss-free:rate={RATE}"
    model = nn.ModuleList([pointsman.MoE(16, 24, EXPERTS, top_k=2, router=spec) for _ in range(2)]).train()
    ready = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    hidden = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    for end in (pointsman.step_end, lambda one: step_end(one.module)):
        for layer in model:
            layer.router._warned.clear()
        model[dist.get_rank()](hidden).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = [layer.router.select.bias.clone() for layer in model]
            end(ready)
        assert ["ran other layers" in str(one.message) for one in caught] == [True]
        assert all(torch.equal(layer.router.select.bias, old) for layer, old in zip(model, before, strict=True))
    with pointsman.record_routing(model[0]) as records:
        model[0](hidden).sum().backward()
    before = model[0].router.select.bias.clone()
    step_end(model)
    torch.testing.assert_close(model[0].router.select.bias - before, counted(records[""].experts))


def sorted_alone(alone: dist.ProcessGroup) -> None:
    layer = pointsman.MoE(16, 24, EXPERTS, top_k=2, router="loss-free:update=quantile:bins=0").train()
    layer(torch.randn(1, 7 - dist.get_rank(), 16)).sum().backward()  # whatever each has
    with pytest.raises(ValueError, match="bins=0 sorts in one process only; use bins=1000"):
        step_end(layer)
    step_end(layer, alone)
    assert layer.router.select.bias.any(), "where a group has one process, it sorts that one's"


def test_a_bias_beside_frozen_scores_moves_where_the_layers_input_has_no_gradient() -> None:
    router = carried("this engine", "smoe-dropout@loss-free", dim=16, num_experts=EXPERTS, top_k=2)
    routing = router(torch.randn(1, 7, 16))
    outputs = torch.randn(7, 2, requires_grad=True)  # of experts
    (deliver(routing.weights, router, routing, torch.ones(())) * outputs).sum().backward()
    torch.testing.assert_close(outputs.grad, routing.weights)
    step_end(router)
    assert router.select.bias.any()


def both(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    groups = [dist.new_group([one]) for one in range(2)]
    of_our_router(groups[rank])
    without_a_group()
    each_its_own_layer()
    sorted_alone(groups[rank])
    of_a_class(groups[rank])
    dist.destroy_process_group()


def test_a_bias_moves_by_the_counts_of_all_ranks_of_the_group(tmp_path: Path) -> None:
    multiprocessing.spawn(both, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
