"""diagnose: all diagnostics of one model in one pass, compared with other models, earlier checkpoints and other k."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import named_routers, record_routing, set_top_k
from pointsman.diagnostics.base import ratio
from pointsman.diagnostics.change import Fluctuation
from pointsman.diagnostics.collection import Diagnostics
from pointsman.diagnostics.consistency import inter_run_consistency
from pointsman.diagnostics.jacobian import JacobianTerms
from pointsman.diagnostics.load import Load
from pointsman.diagnostics.observe import evaluating, layer_gradients
from pointsman.diagnostics.similarity import weight_similarity
from pointsman.layer import MoE
from pointsman.routing import Routing

FORMAT = 1
OTHER_MODEL_KINDS = ("entropy", "load", "collapse")


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        inputs: token ids [B, T], or another input of the reader.
        targets: [B, T], for readers that return a loss.
        mask: [B, T] bool, True for tokens that count; None: all.
    """

    inputs: Tensor
    targets: Tensor | None = None
    mask: Tensor | None = None


Reader = Callable[[nn.Module, Batch], Tensor | None]
"""Runs one forward and returns a scalar loss (summed over tokens) or None. Called with batches in text order."""


def plain_reader() -> Reader:
    """model(inputs), no loss, no memory."""

    def read(model: nn.Module, batch: Batch) -> None:
        model(batch.inputs)

    return read


@dataclass
class _OtherModel:
    """A model to compare with, on the same batches."""

    model: nn.Module
    read: Reader
    diagnostics: Diagnostics = field(default_factory=lambda: Diagnostics(*OTHER_MODEL_KINDS))
    records: dict[str, Routing] = field(default_factory=dict)


def diagnose(
    model: nn.Module,
    batches: Iterable[Tensor | Batch],
    *,
    against: Mapping[str, nn.Module] | None = None,
    history: Mapping[str, nn.Module] | None = None,
    top_k: Sequence[int] = (),
    reader: Callable[[], Reader] = plain_reader,
    jacobian_batches: int = 1,
    seed: int = 0,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """All diagnostics of a model's layers in one pass over the batches, as JSON values.

    Args:
        batches: token ids [B, T], or `Batch`es, in text order.
        against: label -> another model (checkpoint, seed or router) to compare with.
        history: label -> an earlier checkpoint of the same run, oldest first.
        top_k: values of k whose routing is compared with that at the model's own k.
        reader: creates a reader for each model and k (a reader may hold a memory).
        jacobian_batches: the number of batches for the Jacobian's terms, if the reader returns a loss.
        seed: of stochastic routers.
        advance: called with the number of batches read.

    Returns:
        {"format": 1, "batches",
         "layers": {name: {"router", "num_experts", "top_k", and per diagnostic its result: "entropy", "margin",
           "load", "co_activation", "collapse", "specialisation", "outputs", "weights", "mixing", "jacobian", and
           "agreement": [{"top_k", …Fluctuation}] }},
         "against": {label: {name: {"entropy", "load", "collapse", "fluctuation", "entropy_ratio"}}},
         "history": [{"checkpoint", "layers": {name: {"entropy", "load", "collapse", "fluctuation"}}}],
         "consistency": {name: inter_run_consistency of the model and all of `against`}}
        `entropy_ratio` is the model's mean entropy after mixing over the other's (Mutual-Inform; below 1: more certain
        than the other). In `history` the fluctuation is between a checkpoint and the next one, at the end the model.

    Raises:
        ValueError: the model has no router; another model has no layer of the same name and number of experts.
    """
    routers = dict(named_routers(model))
    if not routers:
        raise ValueError(f"diagnose: {type(model).__name__} has no MoE layer and no router in it")
    others = {label: _OtherModel(other, reader()) for label, other in (against or {}).items()}
    earlier = {label: _OtherModel(other, reader()) for label, other in (history or {}).items()}
    for label, other in {**others, **earlier}.items():
        _check_same_layers(routers, other.model, label)
    for k in top_k:
        with set_top_k(model, k):  # checks k before anything is read
            pass
    at_k = {k: reader() for k in top_k}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    diagnostics, read, for_jacobian = Diagnostics(), reader(), reader()
    agreement = {k: {name: Fluctuation() for name in routers} for k in top_k}
    change = {label: {name: Fluctuation() for name in routers} for label in {**others, **earlier}}
    jacobian = {name: JacobianTerms(layer) for name, layer in layers.items()}
    count = 0
    with ExitStack() as stack:
        for one in (model, *(other.model for other in (*others.values(), *earlier.values()))):
            stack.enter_context(evaluating(one))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(seed)
        for given in batches:
            batch = given if isinstance(given, Batch) else Batch(given)
            mask = None if batch.mask is None else batch.mask.reshape(-1)
            if count < jacobian_batches:
                _update_jacobian(model, for_jacobian, batch, jacobian)
            with diagnostics.observe(model, batch.inputs, batch.mask) as records:
                read(model, batch)
            for k, at in at_k.items():
                with set_top_k(model, k), record_routing(model) as found:
                    at(model, batch)
                _compare(agreement[k], records, found, mask)
            for other in (*others.values(), *earlier.values()):
                with other.diagnostics.observe(other.model, batch.inputs, batch.mask) as found:
                    other.read(other.model, batch)
                other.records = found
            for label, other in others.items():
                _compare(change[label], other.records, records, mask)
            line = [*((label, other.records) for label, other in earlier.items()), ("", records)]
            for (label, before), (_, after) in pairwise(line):
                _compare(change[label], before, after, mask)
            count += 1
            if advance:
                advance(count)
    found_layers = diagnostics.result()
    result: dict[str, Any] = {"format": FORMAT, "batches": count, "layers": {}}
    for name, router in routers.items():
        result["layers"][name] = {
            "router": router.spec,
            "num_experts": router.num_experts,
            "top_k": router.top_k,
            **found_layers.get(name, {}),
            **({"weights": weight_similarity(layers[name].experts)} if name in layers else {}),
            **({"jacobian": jacobian[name].result()} if name in jacobian and jacobian[name].second is not None else {}),
            "agreement": [{"top_k": k, **agreement[k][name].result()} for k in top_k],
        }
    result["against"] = {
        label: _other_result(other, change[label], result["layers"]) for label, other in others.items()
    }
    result["history"] = [
        {"checkpoint": label, "layers": _other_result(other, change[label])} for label, other in earlier.items()
    ]
    result["consistency"] = _consistency(diagnostics, list(others.values())) if others else {}
    return result


def _check_same_layers(routers: Mapping[str, nn.Module], other: nn.Module, label: str) -> None:
    found = {name: router.num_experts for name, router in named_routers(other)}
    expected = {name: router.num_experts for name, router in routers.items()}
    if found != expected:
        raise ValueError(f"diagnose: {label} has the layers and experts {found}, not {expected}: nothing to compare")


def _update_jacobian(model: nn.Module, read: Reader, batch: Batch, jacobian: Mapping[str, JacobianTerms]) -> None:
    """One forward of the reader and, if it returns a loss, an update of the Jacobian's terms."""
    for name, found in layer_gradients(model, lambda: read(model, batch)).items():
        jacobian[name].update(found.hidden, found.gradient, found.context, batch.mask)


def _compare(
    into: Mapping[str, Fluctuation], one: Mapping[str, Routing], two: Mapping[str, Routing], mask: Tensor | None
) -> None:
    for name in one.keys() & two.keys():
        tokens = one[name].experts.shape[0]
        into[name].update(one[name], two[name], mask if mask is not None and mask.numel() == tokens else None)


def _other_result(
    other: _OtherModel, change: Mapping[str, Fluctuation], layers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = other.diagnostics.result()
    for name, layer in found.items():
        layer["fluctuation"] = change[name].result()
        if layers is not None:
            layer["entropy_ratio"] = ratio(layers[name]["entropy"]["mixed_mean"], layer["entropy"]["mixed_mean"])
    return found


def _consistency(diagnostics: Diagnostics, others: Sequence[_OtherModel]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in diagnostics.layers:
        loads: list[Tensor] = []
        for one in (diagnostics, *(other.diagnostics for other in others)):
            load = one.layers[name]["load"]
            assert isinstance(load, Load)
            if load.assigned is not None:
                loads.append(load.assigned)
        found[name] = inter_run_consistency(loads)
    return found
