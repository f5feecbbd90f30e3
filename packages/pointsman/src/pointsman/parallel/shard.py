"""`parallelize`: a model whose parameters, gradients and optimizer state are divided over ranks.

One engine, torch's `fully_shard`, holds all layouts: shards, replicas, both. Gradients are sums over ranks, never
means: each rank minimises its part of the batch's loss, and what arrives at an expert through the exchange is already
the sum over the ranks that sent it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.experts.modules import BaseExperts, Experts
from pointsman.layer import MoE
from pointsman.ops.exchange import Exchange, local_part
from pointsman.ops.linear import autocast_enabled
from pointsman.parallel.layout import Layout
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame.router import Router
from pointsman.routers.frame.stage_values import Stage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: nn.Module, layout: Layout, ranks: Ranks, *, device: str | None = None, gather: torch.dtype | None = None
) -> nn.Module:
    """Divides a model over the ranks of `start`, in place, before its optimizer is built; returns it.

    Every rank must hold the same weights, or rank 0 the weights and each other a model built under
    `torch.device("meta")`, which takes them from rank 0: then no other rank ever holds more than its parts and one
    group whole. Every rank gives the model its own rows of each batch (`ranks.rows`). The loss that
    a rank differentiates is its part of the batch's: for a mean over tokens, the sum over its tokens divided by the
    tokens of all ranks. Balance losses are those of the whole batch. `step_end` after each optimizer step adds up the
    running statistics. Use `gradient_norm` and `clip_gradient`: torch's own take no parameters of several meshes.

    Args:
        model: any model with `MoE` layers. Groups of parameters are the experts of each layer, each block (the items of
            a ModuleList that hold an MoE layer), and the rest. Their `entered_by` names entries besides `forward`.
        layout: how the ranks divide it.
        ranks: who shares the batch.
        device: "cpu" or "cuda", where the parts are to lie: a model on the CPU moves there group by group. None: where
            it is.
        gather: dtype that the experts' weights are gathered in, and used in. With autocast's, under which every
            forward then has to run, half as many bytes give the same bits. None: their own.

    Raises:
        RunError: a layout of another number of ranks; experts that it does not divide; a router that one process only
            can train; weights that differ between ranks. The first forward in training raises one on every rank if
            they differ in dtype, autocast, k or `loss_scale` of a layer, or in their number of rows where the router
            needs equal ones.
    """
    if layout.world != ranks.count:
        raise RunError(f"layout {layout} is of {layout.world} ranks; there are {ranks.count}")
    layers = check_layers(model, layout)
    if ranks.count == 1:
        return model if device is None else model.to(device)
    state = model.state_dict()
    awaited = ranks.gather(any(tensor.is_meta for tensor in state.values()))
    if awaited[0]:
        raise RunError("parallelize: the model of rank 0 is on meta; it must hold the weights")
    if any(awaited):
        ranks.agree({name: tuple(tensor.shape) for name, tensor in state.items()}, "the shapes of weights")
    else:
        ranks.agree(_digest(state), "the initial weights")
    without_scalars(model)
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    kind = device or ranks.gather(next(model.parameters()).device.type)[0]
    dense, sparse = _meshes(kind, layout, torch.distributed.group.WORLD)
    taken = partial(_of_first, ranks=ranks, device=kind) if any(awaited) else None
    if taken:
        torch.set_rng_state(ranks.gather(torch.get_rng_state())[0])  # to draw a model advances it
    move = taken or (lambda tensor: tensor.to(kind))
    model._apply(lambda tensor: tensor if isinstance(tensor, nn.Parameter) else move(tensor))  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(getattr(module, "ranks", None), Ranks):  # routers, their stages, and what draws for each row
            setattr(module, "ranks", ranks)  # noqa: B010
    for name, layer in layers.items():
        _take([layer.experts], taken)
        _divide(layer.experts, sparse, layout, gather)
        _check_steps(name, layer, ranks, gather)
    blocks = _blocks(model)
    for together in _that_share(blocks):
        _take(together, taken)
        fully_shard(together, mesh=dense)
    _take([model], taken)
    fully_shard(model, mesh=dense)
    for part in (*blocks, model):
        for method in getattr(part, "entered_by", ()):
            register_fsdp_forward_method(part, method)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sums
    return model


def check_layers(model: nn.Module, layout: Layout) -> dict[str, MoE]:
    """The MoE layers of a model, which may be on meta, by name; RunError for one whose experts the layout does not
    divide, or that only one process can train."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for name, layer in layers.items():
        router = layer.router
        try:
            layout.check_experts(layer.experts.num_experts)
        except RunError as error:
            raise RunError(f"layer {name!r}: {error}") from None
        for stage in router.modules():
            if layout.world > 1 and isinstance(stage, Stage) and stage.one_process:
                raise RunError(f"layer {name!r}: router {router.spec!r} trains in one process: {stage.one_process}")
    return layers


def _check_steps(name: str, layer: MoE, ranks: Ranks, gather: torch.dtype | None) -> None:
    """At the first forward in training, every rank refuses what other ranks do otherwise, and what would be wrong.

    A router that draws in training, or compares sequences, takes this rank's rows for a W-th of the batch: their number
    is compared at every forward in training.
    """
    spec = layer.router.spec
    rows, met = f"rows and tokens (with router {spec!r} every rank needs as many)", False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check(router: Router, arguments: tuple[Any, ...]) -> None:
        nonlocal met
        if not router.training:
            return
        hidden = arguments[0]
        shape = tuple(hidden.shape[:-1])
        equal = router.training_stochastic or not router.training_batch_invariant or (
            layer.shared is not None and layer.shared.dropout > 0
        )  # fmt: skip
        if not met:
            met = True
            dtype = torch.get_autocast_dtype(hidden.device.type) if autocast_enabled(hidden.device.type) else "off"
            found: dict[str, Any] = {"dtype": hidden.dtype, "autocast": dtype, "k": router.top_k}
            found |= {"loss_scale": float(layer.delivery.scale), **({rows: shape} if equal else {})}
            ranks.agree(found, f"layer {name!r} at the first step")
            if gather not in (None, dtype):
                raise RunError(f"layer {name!r}: experts gathered in {gather} need autocast to it; autocast is {dtype}")
            if not equal:
                handle.remove()
        elif equal:
            own = torch.tensor([*shape[:1], math.prod(shape)], dtype=torch.float64)
            total, squares = ranks.total(own, own.square())
            if not torch.equal(total.square(), ranks.count * squares):  # of all ranks: each comes here, or none
                ranks.agree({rows: shape}, f"layer {name!r} at a later step")

    handle = layer.router.register_forward_pre_hook(check)


def gradient_norm(parameters: Iterable[nn.Parameter], ranks: Ranks = ALONE) -> Tensor:
    """The 2-norm of the whole gradient, of parameters on any meshes, in one collective.

    The sum over ranks of the squares of their parts, each divided by the number of ranks that hold the same part.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if ranks.count == 1:
        return torch.nn.utils.get_total_norm(gradients)
    from torch.distributed.tensor import Replicate

    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for gradient in gradients:
        part = local_part(gradient)
        assert part is not None
        mesh = getattr(gradient, "device_mesh", None)
        places = zip(mesh.shape, gradient.placements, strict=True) if mesh else [(ranks.count, Replicate())]  # type: ignore[attr-defined]
        squares += part.double().square().sum() / math.prod(size for size, place in places if place.is_replicate())
    (total,) = ranks.total(squares)
    return total.sqrt().to(gradients[0].dtype) if gradients else total


def clip_gradient(parameters: Iterable[nn.Parameter], norm: Tensor, most: float) -> None:
    """Scales the whole gradient, of this norm, down to `most` where it is larger."""
    for group in _by_mesh(parameters).values():
        torch.nn.utils.clip_grads_with_norm_(group, most, norm)


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """The parameters as groups of an optimizer: one a mesh, since fused optimizers take no more than one at a time."""
    return [{"params": group} for group in _by_mesh(parameters).values()]


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors, as one process has it; every rank must call it."""
    every = model.state_dict().items()
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in every}


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return groups


@cache
def _meshes(kind: str, layout: Layout, world: Any) -> tuple[DeviceMesh, DeviceMesh]:
    """The meshes of dense parameters and of experts. Models after one another share them, and their process groups."""
    from torch.distributed.device_mesh import init_device_mesh

    sparse = (layout.replicas, layout.expert_shards, layout.experts)
    return (
        init_device_mesh(kind, (layout.replicas, layout.shards), mesh_dim_names=("replicas", "shards")),
        init_device_mesh(kind, sparse, mesh_dim_names=("replicas", "expert_shards", "experts")),
    )


def _of_first(tensor: Tensor, ranks: Ranks, device: str) -> Tensor:
    """Rank 0's values of a tensor, which may be on meta elsewhere, on this device of every rank."""
    import torch.distributed as dist

    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    values = tensor.detach().to(device).contiguous() if ranks.first else empty
    if values.numel():
        dist.broadcast(values.view(-1).view(torch.uint8), group=ranks.group, group_src=0)
    return values


def _take(modules: list[nn.Module], taken: Callable[[Tensor], Tensor] | None) -> None:
    """Gives every parameter of the modules that is not divided yet its values, if it has none; tied ones stay tied."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for part in chain.from_iterable(module.modules() for module in modules if taken):
        for name, parameter in list(part.named_parameters(recurse=False)):
            if taken and local_part(parameter) is parameter:
                if parameter not in found:
                    found[parameter] = nn.Parameter(taken(parameter), requires_grad=parameter.requires_grad)
                setattr(part, name, found[parameter])


def _digest(state: Mapping[str, Tensor]) -> str:
    """Equal for equal weights: sums of all floating-point tensors, and with weights that tell places apart."""
    import hashlib

    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        if tensor.numel():
            flat = tensor.detach().double().reshape(-1)
            places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
            digest.update(repr((float(flat.sum()), float((flat / places).sum()))).encode())
    return digest.hexdigest()


def without_scalars(model: nn.Module) -> None:
    """Parameters without dimensions become [1]: `fully_shard` takes no others. Loading fits either to the other."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 0:
                setattr(module, name, nn.Parameter(parameter.detach().view(1), requires_grad=parameter.requires_grad))


def _divide(experts: Experts | BaseExperts, mesh: DeviceMesh, layout: Layout, gather: torch.dtype | None) -> None:
    """Puts a layer's experts on their ranks, and shards each rank's further."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    if layout.experts > 1:
        over = mesh["experts"]
        for module in experts.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(parameter.detach(), over, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        experts.exchange = Exchange(over.get_group(), experts.num_experts)
    each = experts.num_experts // layout.experts
    by_expert = each % layout.expert_shards == 0

    def placement(parameter: nn.Parameter) -> Any:
        return Shard(0) if by_expert or parameter.dim() < 2 else Shard(1)

    # gradients are added up in the weights' own dtype, whatever they were gathered in
    policy = MixedPrecisionPolicy(
        gather, next(experts.parameters()).dtype if gather else None, cast_forward_inputs=False
    )
    fully_shard(experts, mesh=mesh["replicas", "expert_shards"], shard_placement_fn=placement, mp_policy=policy)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What becomes a group of its own: the items of every ModuleList that hold an MoE layer, and the model's other
    children that hold one. What has no forward of its own (a ModuleList, too) would never gather its parameters."""

    def sparse(module: nn.Module) -> bool:
        runs = type(module).forward is not nn.Module.forward and not isinstance(module, MoE)
        return runs and any(isinstance(part, MoE) for part in module.modules())

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = [item for each in lists for item in each.children() if sparse(item)]
    covered = {id(block) for block in found}
    others = (child for child in model.children() if sparse(child))
    return found + [one for one in others if not any(id(part) in covered for part in one.modules())]


def _that_share(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """The blocks, those together that have a parameter in common: it can lie in one group only."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for block in blocks:
        own = {id(parameter) for parameter in block.parameters()}
        joined = [group for group in groups if group[0] & own]
        members = [member for _, each in joined for member in each]
        groups = [group for group in groups if group not in joined]
        groups.append((own.union(*(ids for ids, _ in joined)), [*members, block]))
    return [members for _, members in groups]
