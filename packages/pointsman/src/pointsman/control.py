"""Functions for any model with MoE layers: k, freezing, step ends, materializing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pointsman._errors import did_you_mean
from pointsman.layer import MoE
from pointsman.ranks import Ranks, every_rank
from pointsman.routers.frame.registry import COMMON, build_router, format_spec, parse_spec
from pointsman.routers.frame.router import Router, check_top_k
from pointsman.routers.frame.stage_values import Loss
from pointsman.routers.frame.stages import Sigmoid
from pointsman.routers.papers.noisy_topk import Noisy
from pointsman.routers.papers.topk import LinearScorer


def named_routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Every router with the qualified name of its layer: the MoE layer's, or the router's own if it stands alone.

    A router in a Hugging Face model (`hf.replace_routers`) has the name of its block, as in `record_routing`.
    """
    inside = {id(part) for module in model.modules() if isinstance(module, MoE) for part in module.router.modules()}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            yield name, cast(Any, module.router.gather).__self__  # the one that runs, in a wrapper (PEFT) or not
        elif isinstance(module, Router) and id(module) not in inside:
            gate, _, own = name.rpartition(".")
            yield gate.rpartition(".")[0] if own == "pointsman" else name, module  # in a gate of transformers


def routers_by_layer(model: nn.Module) -> dict[str, Router]:
    """`named_routers` as a dictionary; ValueError where two layers share a router."""
    names: dict[Router, str] = {}
    for name, router in named_routers(model):
        if (first := names.setdefault(router, name)) != name:
            told = "their forwards cannot be told apart; give each its own"
            raise ValueError(f"layers {first!r} and {name!r} share a router: {told}")
    return {name: router for router, name in names.items()}


def _routers(model: nn.Module) -> list[Router]:
    found = [module for module in model.modules() if isinstance(module, Router)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no MoE layer and no router in it")
    return found


class set_top_k:  # noqa: N801 - used like a function
    """Sets k, at once, in every router of a model, an MoE layer, a bare router or a Hugging Face MoE.

    As a context manager it restores every router's own k on exit:

        set_top_k(model, 4)
        with set_top_k(model, 1): …

    A forward under activation checkpointing is done again in backward, which must lie inside, too.

    Raises:
        ValueError: k is no whole number from 1 to the number of experts, or a router or a class of Hugging Face models
            works with no other k; then no router has changed.
    """

    def __init__(self, module: nn.Module, k: int) -> None:
        if is_huggingface(module):
            from pointsman.hf.top_k import top_k_fields  # transformers is imported only for its own models

            places: list[tuple[Any, str]] = [(field.owner, field.attribute) for field in top_k_fields(module, k)]
        else:
            places = [(router, "top_k") for router in _routers(module)]
            for router, _ in places:
                check_top_k(k, router.num_experts)
                if router.fixed_k and k != router.num_experts:
                    raise ValueError(f"{router.spec}: top_k={k}: every token uses all {router.num_experts} experts")
        self._k, self._before = k, [(owner, name, getattr(owner, name)) for owner, name in places]
        self.__enter__()

    def __enter__(self) -> None:
        for owner, name, _ in self._before:
            setattr(owner, name, self._k)

    def __exit__(self, *error: object) -> None:
        for owner, name, k in self._before:
            setattr(owner, name, k)


def is_huggingface(module: nn.Module) -> bool:
    """Whether the routers in it are those of a transformers model, plain or wrapped (PEFT, DataParallel), whose classes
    may have come with a checkpoint (trust_remote_code)."""
    homes = ("transformers.models.", "transformers_modules.")
    known = any(type(part).__module__.startswith(homes) for part in module.modules())
    return known and not any(isinstance(part, MoE) for part in module.modules())


def freeze(model: nn.Module, *roles: str) -> None:
    """Stops training of every part with one of these roles ("router", "experts", "attention", …).

    Running statistics of a frozen router stop, too: its `balance_scope=step` counts each batch alone. Its losses still
    train earlier layers. `requires_grad_(True)` on such a part undoes it; for a router, call it on the router itself.
    Of a Hugging Face MoE the roles are "router" (each gate with its correction bias) and "experts".

    Raises:
        ValueError: no role, or one that no part of the model has.
    """
    if not roles:
        raise ValueError('freeze: no role is given, as in freeze(model, "router")')
    if is_huggingface(model):
        from pointsman.hf.listen import freeze as freeze_gates

        freeze_gates(model, roles)
        return
    known = {role for module in model.modules() if isinstance(role := getattr(module, "role", None), str)}
    for role in roles:
        if role not in known:
            raise ValueError(f"freeze: no part of {type(model).__name__} has the role {role!r}: "
                             f"{did_you_mean(role, known)}")  # fmt: skip
    for module in model.modules():
        if getattr(module, "role", None) in roles:
            module.requires_grad_(False)
            for _, router in named_routers(module):
                router.frozen = True


def param_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """What trains, for an optimizer: matrices with weight decay; biases, norms and embeddings without.

        optimizer = torch.optim.AdamW(pointsman.param_groups(model, weight_decay=0.1), lr=1e-3)

    The usual rule, `p.dim() >= 2`, decays the biases of experts, which are [num_experts, hidden_dim].

    Raises:
        ValueError: `weight_decay` is no number from 0.
    """
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"param_groups: weight_decay={weight_decay!r}: allowed are numbers from 0")
    left_out = undecayed(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if id(one) not in left_out], "weight_decay": weight_decay},
        {"params": [one for one in trained if id(one) in left_out], "weight_decay": 0.0},
    ]


def undecayed(model: nn.Module) -> set[int]:
    """ids of the parameters that weight decay leaves alone: biases, norms, embeddings, positions.

    A module names those of its own parameters that do not show by shape, name or role in `no_decay`.
    """
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or getattr(module, "role", "") == "embedding":
            found |= {id(parameter) for parameter in module.parameters()}
        left_out = getattr(module, "no_decay", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or name.startswith("b_") or "bias" in name or name in left_out:
                found.add(id(parameter))
    return found


def added_up(model: nn.Module, ranks: Ranks) -> Callable[[Sequence[Tensor]], None]:
    """A function that adds up over ranks, for `step_end`; where they ran other layers in this step nothing counts, with
    a warning, so that their states stay alike. Every rank must call it: it waits for the device."""
    routers = list(dict.fromkeys(router for _, router in named_routers(model)))
    if ranks.count > 1 and any(router.needs_step_end for router in routers):
        if sorting := [one for one in routers if not (one.select.adds_up or one.frozen)]:
            raise ValueError(f"step_end: {sorting[0].spec}: {sorting[0].select.one_process}")
        device = next((one.device for router in routers for one in router.buffers()), next(model.parameters()).device)
        sums = [[tuple(value.shape) for value in router.gathered()] for router in routers]
        if not ranks.alike(zlib.crc32(repr(sums).encode()), device):
            routers[0].warn("step_end: the processes ran other layers in this step: none counts (pipeline: give group)")
            for router in routers:
                router.forget()
    return ranks.add_up


def step_end(model: nn.Module, reduce: Callable[[Sequence[Tensor]], None] | None = None) -> None:
    """Once after each optimizer step: norms kept, schedules, running statistics.

    Args:
        reduce: with many processes, adds up each tensor over them, in place (no margins of `bins=0`). It is called
            once, with the sums of all routers, in the same order and of the same shapes everywhere. None: the routers'
            own `ranks`, which `parallel.parallelize` sets, or the processes of a DistributedDataParallel in the model;
            where they ran other layers, nothing counts. With other processes each counts its own, and a warning says
            so. Under `Join`, where some processes take no step, give `lambda tensors: None`.
    """
    routers = list(dict.fromkeys(router for _, router in named_routers(model)))  # layers may share one
    if reduce is None and routers and routers[0].ranks.count > 1:
        reduce = routers[0].ranks.add_up
    elif reduce is None and any(router.needs_step_end for router in routers) and every_rank().count > 1:
        if groups := [part.process_group for part in model.modules() if isinstance(part, DistributedDataParallel)]:
            reduce = added_up(model, every_rank(groups[0]))
        elif any(router.gathered() for router in routers):
            routers[0].warn(
                "step_end: each of the processes counts its own tokens only: give the DistributedDataParallel module, "
                "not the model in it, or reduce (pointsman.engines.common.step_end adds up over a group)"
            )
    with torch.no_grad():
        if reduce is not None:
            reduce([tensor for router in routers for tensor in router.gathered()])
        for router in routers:
            router.step_end()


def track_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, reduce: Callable[[Sequence[Tensor]], None] | None = None
) -> RemovableHandle:
    """Calls `step_end(model, reduce)` after every step of this optimizer, until the returned handle is removed.

    Of several optimizers give the one that steps last. Those of single parameters, which step in the backward pass, may
    all be given: `step_end` comes once, after that pass.
    """

    def after_step(*_: Any) -> None:
        if (backward := torch._C._current_graph_task_id()) == -1:
            step_end(model, reduce)
        elif model.__dict__.get("pointsman_awaits") != backward:  # whose graph still needs the parameters as they are
            model.__dict__["pointsman_awaits"] = backward
            torch.autograd.Variable._execution_engine.queue_callback(partial(step_end, model, reduce))

    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # accelerate's wrapper
    return optimizer.register_step_post_hook(after_step)


def materialize(model: nn.Module) -> nn.Module:
    """Replaces, in place, every generated or frozen linear router by a plain linear one with the same logits.

    HyperRouter, SMoE-Dropout, the temperature controls and `noisy-topk`, without its noise and losses, become `smoe`;
    mixers, k, losses of a choice after '@' and of common options stay. The saved model then loads as one built with
    the spec `smoe`. A Hugging Face model gets its class's own gates back, without mixers (`pointsman.hf.materialize`).

    Raises:
        ValueError: no router, or one that no linear router equals (cosine), named with its layer; nothing has changed.
    """
    if is_huggingface(model):
        from pointsman.hf.surgery.materialize import materialize as to_own_gates

        return to_own_gates(model)
    plain: list[tuple[Router, LinearScorer]] = []
    _routers(model)  # which refuses a model without any
    for name, router in named_routers(model):
        if isinstance(router.score, LinearScorer) and not isinstance(router.score, Noisy):
            continue  # it is one already, with its noise in training
        with torch.no_grad():
            weights = router.score.plain_linear()
        if weights is None:
            raise ValueError(f"materialize: layer {name!r}: no linear router equals {router.spec!r}")
        weight, bias = weights
        scorer = LinearScorer(router.dim, len(weight), bias=bias is not None).to(weight.device, weight.dtype)
        with torch.no_grad():
            scorer.weight.copy_(weight)
            if scorer.bias is not None and bias is not None:
                scorer.bias.copy_(bias)
        scorer.train(router.training)
        scorer.requires_grad_(not router.frozen)
        plain.append((router, scorer))
    for router, scorer in plain:
        kept: dict[str, Loss] = {}
        if parse_spec(router.spec).choice is not None and not isinstance(router.score, Noisy):  # losses of the choice
            own = router.score
            kept = {name: one for name, one in router.losses.items() if getattr(one.function, "__self__", 0) is not own}
        router.spec = _plain_spec(router, scorer)
        sizes: dict[str, Any] = {"dim": router.dim, "num_experts": router.num_experts, "top_k": router.top_k}
        router.fresh = partial(build_router, router.spec, **sizes)
        router.score, router.losses = scorer, kept
        router.declare()
    return model


def _plain_spec(router: Router, scorer: LinearScorer) -> str:
    parsed = parse_spec(router.spec)
    given = {**parsed.options, **parsed.choice_options}
    options = {name: value for name, value in given.items() if name in COMMON.options}
    own = {"bias": "false"} if scorer.bias is None else {}
    own |= {"gate": "sigmoid"} if isinstance(router.normalize, Sigmoid) else {}
    if parsed.choice is None or isinstance(router.score, Noisy):
        parsed = parsed._replace(router="smoe", options={**own, **options}, choice=None)
    return format_spec(parsed._replace(router="smoe", options=own) if parsed.choice else parsed)
