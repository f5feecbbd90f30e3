"""The engines' own parallelism over gloo, with our router: two processes, each with half of the experts or weights."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh

import pointsman
from pointsman.engines.common import step_end
from pointsman.ops.drawing import redraw
from tests.library.engines.build import BUILDERS, DIM, EXPERTS, HIDDEN, Built, megatron, nemo, olmo_core, torchtitan

SPEC = "xmoe:balance=0.5"
Divided = tuple[Built, Callable[[], Tensor]]
"""A layer, and the gradient of the output weights of this process's experts, in our layout."""


def _megatron(layer: pointsman.MoE, rank: int) -> Divided:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # where its buffers are made
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    built = megatron(SPEC, expert_model_parallel_size=2)
    whole: Any = layer.experts
    own: Any = built.layer.experts.local_experts  # type: ignore[union-attr]
    with torch.no_grad():
        for expert, one in enumerate(own, rank * len(own)):
            one.linear_fc1.weight.copy_(torch.cat([whole.w_gate[expert], whole.w_in[expert]]))
            one.linear_fc2.weight.copy_(whole.w_out[expert])
    return built, lambda: torch.stack([one.linear_fc2.weight.grad for one in own])


def _nemo(layer: pointsman.MoE, rank: int) -> Divided:
    from nemo_automodel.components.moe.parallelizer import apply_ep

    built = nemo(SPEC)
    layer.experts.load_state_dict(built.experts())
    model, block = nn.Module(), nn.Module()
    model.layers, block.mlp = nn.ModuleList([block]), built.layer
    apply_ep(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    experts: Any = built.layer.experts
    return built, lambda: experts.down_projs.grad.to_local().mT


def _olmo_core(layer: pointsman.MoE, rank: int) -> Divided:
    built: Any = olmo_core(SPEC)
    layer.experts.load_state_dict(built.experts())
    built.layer.apply_ep(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    return built, lambda: built.layer.experts.mlp.w2.grad.to_local().view(-1, HIDDEN, DIM).mT


def _torchtitan(layer: pointsman.MoE, rank: int, backend: str = "partial_dtensor") -> Divided:
    from torchtitan.distributed import parallel_dims, spmd_types, utils

    torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign]  # its experts would round
    utils._spmd_backend, parallel_dims.device_type = backend, "cpu"
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, world_size=2, spmd_backend=backend
    )
    built: Any = torchtitan(SPEC, divided=True)
    dims.build_mesh()
    layer.experts.load_state_dict(built.experts())
    built.layer.parallelize(dims)
    if backend == "spmd_types":
        dist.all_to_all = all_to_all
        dense, sparse = (dims._global_meshes[f"spmd_{name}_for_fwdbwd"] for name in ("dense", "sparse"))
        spmd_types.set_spmd_meshes(dense_mesh=dense, sparse_mesh=sparse)
        run = built.run
        built.run = lambda hidden: within(spmd_types.set_current_spmd_mesh(dense), run, hidden)
    weight = built.layer.routed_experts.inner_experts.w2_EDF

    def gradient() -> Tensor:
        found: Tensor = getattr(weight.grad, "_local_tensor", weight.grad)
        return found

    return built, gradient


def _torchtitan_spmd_types(layer: pointsman.MoE, rank: int) -> Divided:
    return _torchtitan(layer, rank, "spmd_types")


def within(context: Any, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    with context:
        return run(hidden)


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any = None) -> None:
    """gloo's own takes parts of equal size only."""
    sizes = [len(one) for one in outputs]
    whole = torch.cat([*outputs])
    dist.all_to_all_single(whole, torch.cat([*inputs]), sizes, [len(one) for one in inputs], group=group)
    for one, part in zip(outputs, whole.split(sizes), strict=True):
        one.copy_(part)


ENGINES = {
    "megatron": _megatron, "nemo": _nemo, "olmo_core": _olmo_core, "torchtitan": _torchtitan,
    "torchtitan, spmd_types": _torchtitan_spmd_types,
}  # fmt: skip


def start(rank: int, folder: str) -> pointsman.MoE:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    torch.manual_seed(0)  # the same router and experts on both
    return pointsman.MoE(
        DIM, HIDDEN, EXPERTS, top_k=2, router=SPEC, activation="silu", gated=True, bias=False, attach_losses=True
    )


def both(built: Built, layer: pointsman.MoE, rank: int) -> None:
    """Forward and backward of both layers, with tokens of this process's own: outputs and gradients are equal."""
    torch.manual_seed(rank + 1)
    hidden, factor = torch.randn(2, 5, DIM), torch.randn(2, 5, DIM)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    outputs = [run(given) for run, given in zip((built.run, layer), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    for output in outputs:
        (output * factor).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)


def divide_experts(rank: int, folder: str, engine: str) -> None:
    layer = start(rank, folder)
    built, gradient = ENGINES[engine](layer, rank)
    built.router.load_state_dict(layer.router.state_dict())
    both(built, layer, rank)
    for name, parameter in layer.router.named_parameters():
        found = dict(built.router.named_parameters())[name].grad
        torch.testing.assert_close(found.view_as(parameter), parameter.grad, rtol=1e-4, atol=1e-5)
    whole: Any = layer.experts
    dist.all_reduce(whole.w_out.grad)  # an expert has the tokens of both
    torch.testing.assert_close(gradient(), whole.w_out.grad.chunk(2)[rank], rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def shard_all(rank: int, folder: str, engine: str) -> None:
    """FSDP, with which all engines but Megatron-core divide what is not an expert."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    layer = start(rank, folder)
    torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign]
    built = BUILDERS[engine][1](SPEC)
    layer.experts.load_state_dict(built.experts())
    sharded: Any = fully_shard(built.layer, mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(sharded, FSDPModule)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    redraw(built.router, layer.router)  # as the engines draw the weights of a model that they built without memory
    both(built, layer, rank)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (built.router, layer.router)]
    for parameter in layer.router.parameters():
        dist.all_reduce(parameter.grad)
    for optimizer in optimizers:
        optimizer.step()
    step_end(built.layer)
    pointsman.step_end(layer)
    for name, parameter in layer.router.named_parameters():
        found: Any = dict(built.router.named_parameters())[name]
        torch.testing.assert_close(found.full_tensor().view_as(parameter), parameter, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def spawn(run: Callable[..., None], engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(BUILDERS[engine.partition(",")[0]][0], exc_type=ImportError)
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")  # OLMo-core's kernels
    multiprocessing.spawn(run, (str(folder), engine), nprocs=2)  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_experts_divided_over_two_processes_equal_our_layer(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn(divide_experts, engine, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["nemo", "olmo_core", "torchtitan"])
def test_a_layer_in_shards_takes_the_step_of_our_layer(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn(shard_all, engine, tmp_path, monkeypatch)


def test_torchtitan_refuses_what_divides_a_sequence() -> None:
    parallel = pytest.importorskip("torchtitan.distributed.parallel_dims")
    for sizes, why in (({"tp": 2}, "tensor parallelism"), ({"tp": 1, "spmd_backend": "full_dtensor"}, "full_dtensor")):
        dims = parallel.ParallelDims(dp_replicate=1, dp_shard=1, cp=1, pp=1, ep=1, world_size=sizes["tp"], **sizes)
        with pytest.raises(ValueError, match=why):
            torchtitan(SPEC).layer.router.parallelize(dims)


def test_nemos_gates_are_drawn_alike_where_ranks_are_seeded_differently() -> None:
    """Its recipes build models under `ScopedRNG(ranked=True)`; the frozen part of HyperRouter is never gathered."""
    pytest.importorskip("nemo_automodel.components.moe.layers")
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(nemo("hyperrouter").router.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
