"""Megatron-core's own expert parallelism over gloo: two processes, half of the experts each, a router of ours."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

import pointsman
from tests.library.engines.build import DIM, EXPERTS, HIDDEN, megatron

SPEC = "xmoe:balance=0.5"


def rank_of_two(rank: int, folder: str) -> None:
    """Forward and gradient equal those of our layer with all experts."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # where its buffers are made
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    torch.manual_seed(0)  # the same router, and the same experts in `layer`
    layer = pointsman.MoE(
        DIM, HIDDEN, EXPERTS, top_k=2, router=SPEC, activation="silu", gated=True, bias=False, attach_losses=True
    )
    built = megatron(SPEC, expert_model_parallel_size=2)
    built.router.load_state_dict(layer.router.state_dict())
    whole, own = layer.experts, built.layer.experts.local_experts  # type: ignore[union-attr]
    first = rank * len(own)
    with torch.no_grad():
        for expert, one in enumerate(own, first):
            one.linear_fc1.weight.copy_(torch.cat([whole.w_gate[expert], whole.w_in[expert]]))
            one.linear_fc2.weight.copy_(whole.w_out[expert])
    torch.manual_seed(rank + 1)  # each has tokens of its own
    hidden, factor = torch.randn(2, 5, DIM), torch.randn(2, 5, DIM)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    outputs = [run(given) for run, given in zip((built.run, layer), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        (output * factor).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for name, parameter in layer.router.named_parameters():
        torch.testing.assert_close(dict(built.router.named_parameters())[name].grad, parameter.grad)
    dist.all_reduce(whole.w_out.grad)  # an expert has the tokens of both
    for expert, one in enumerate(own, first):
        torch.testing.assert_close(one.linear_fc2.weight.grad, whole.w_out.grad[expert])
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_experts_divided_over_two_processes_equal_our_layer(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.transformer.moe.moe_layer")
    multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
