"""diagnose: all diagnostics of one model in one pass, compared with other models, earlier checkpoints and other k."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import named_routers, set_top_k
from pointsman.diagnostics.base import ratio
from pointsman.diagnostics.collection import Diagnostics
from pointsman.diagnostics.jacobian import JacobianTerms
from pointsman.diagnostics.observe import evaluating, layer_gradients, named_layers
from pointsman.diagnostics.specialisation import Specialisation
from pointsman.diagnostics.statistics import Fluctuation, Load, inter_run_consistency
from pointsman.recording import record_routing
from pointsman.routing import Routing

FORMAT = 1
Routings = Mapping[str, Routing]
"""Layer -> its routing."""


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        inputs: token ids [B, T], or another input of the reader.
        targets: [B, T], or [B] of one class a text, for readers that return a loss.
        mask: [B, T] bool, True for tokens that count; None: all.
        group: number of the text's group (its language), from 0; None: there are no groups.
        token_ids: [B, T], what specialisation is measured against; None: `inputs`. Of images, the class of each.
    """

    inputs: Tensor
    targets: Tensor | None = None
    mask: Tensor | None = None
    group: int | None = None
    token_ids: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        return self.inputs if self.token_ids is None else self.token_ids


Reader = Callable[[nn.Module, Batch], Tensor | None]
"""Runs one forward and returns a scalar loss (summed over tokens) or None. Called with batches in text order."""


def plain_reader() -> Reader:
    """model(inputs), no loss, no memory."""

    def read(model: nn.Module, batch: Batch) -> None:
        model(batch.inputs)

    return read


class _OtherModel:
    """A model to compare with, on the same batches; `change` is its routing against the other's it is compared with."""

    def __init__(self, label: str, model: nn.Module, read: Reader, num_experts: Mapping[str, int]) -> None:
        found = {name: router.num_experts for name, router in named_routers(model)}
        if found != num_experts:
            raise ValueError(f"diagnose: {label} has the layers and experts {found}, not {num_experts}: no comparison")
        self.model, self.read = model, read
        self.diagnostics = Diagnostics("entropy", "load", "collapse")
        self.change = {name: Fluctuation() for name in num_experts}
        self.records: Routings = {}

    def update(self, batch: Batch) -> None:
        with self.diagnostics.observe(self.model, batch.ids, batch.mask) as self.records:
            self.read(self.model, batch)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = self.diagnostics.result()
        for name, layer in found.items():
            layer["fluctuation"] = self.change[name].result()
        return found


def diagnose(
    model: nn.Module,
    batches: Iterable[Tensor | Batch],
    *,
    against: Mapping[str, nn.Module] | None = None,
    history: Mapping[str, nn.Module] | None = None,
    top_k: Sequence[int] = (),
    reader: Callable[[], Reader] = plain_reader,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """All diagnostics of a model's layers in one pass over the batches, as JSON values.

    Args:
        batches: token ids [B, T], or `Batch`es, in text order.
        against: label -> another model (checkpoint, seed or router) to compare with.
        history: label -> an earlier checkpoint of the same run, oldest first.
        top_k: values of k whose routing is compared with that at the model's own k.
        reader: creates a reader for each model and k (a reader may hold a memory).
        advance: called with the number of batches read.

    Returns:
        {"format": 1, "batches",
         "layers": {name: {"router", "num_experts", "top_k", and per diagnostic its result: "entropy", "margin",
           "load", "co_activation", "collapse", "specialisation", "outputs", "mixing", "jacobian", and
           "agreement": [{"top_k", …Fluctuation}], and where batches have groups "group": `Specialisation` of them}},
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
    num_experts = {name: router.num_experts for name, router in routers.items()}
    others = {label: _OtherModel(label, other, reader(), num_experts) for label, other in (against or {}).items()}
    earlier = {label: _OtherModel(label, other, reader(), num_experts) for label, other in (history or {}).items()}
    for k in top_k:
        with set_top_k(model, k):  # checks k before anything is read
            pass
    at_k = {k: reader() for k in top_k}
    layers = named_layers(model)
    diagnostics, read, for_jacobian = Diagnostics(), reader(), reader()
    agreement = {k: {name: Fluctuation() for name in routers} for k in top_k}
    jacobian = {name: JacobianTerms(layer) for name, layer in layers.items()}
    groups: dict[str, Specialisation] = {}
    count = 0
    with ExitStack() as stack:
        for other in (*others.values(), *earlier.values()):
            stack.enter_context(evaluating(other.model))
        stack.enter_context(evaluating(model, 0))
        stack.enter_context(torch.no_grad())
        for given in batches:
            batch = given if isinstance(given, Batch) else Batch(given)
            if not count:  # they take a backward, if the reader returns a loss
                for name, of in layer_gradients(model, partial(for_jacobian, model, batch)).items():
                    jacobian[name].update(of.hidden, of.gradient, of.context, batch.mask)
            with diagnostics.observe(model, batch.ids, batch.mask) as records:
                read(model, batch)
            masks = diagnostics.masks
            if batch.group is not None:
                for name, routing in records.items():
                    same = torch.full((len(routing.experts),), batch.group, device=routing.experts.device)
                    groups.setdefault(name, Specialisation()).update(routing, masks[name], token_ids=same)
            for k, at in at_k.items():
                with set_top_k(model, k), record_routing(model) as found:
                    at(model, batch)
                _compare(agreement[k], records, found, masks)
            for other in others.values():
                other.update(batch)
                _compare(other.change, other.records, records, masks)
            for other in earlier.values():
                other.update(batch)
            line = [*(other.records for other in earlier.values()), records]
            for other, (before, after) in zip(earlier.values(), pairwise(line), strict=True):
                _compare(other.change, before, after, masks)
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
            **({"jacobian": jacobian[name].result()} if name in jacobian and jacobian[name].second is not None else {}),
            "agreement": [{"top_k": k, **agreement[k][name].result()} for k in top_k],
            **({"group": groups[name].result()} if name in groups else {}),
        }
    result["against"] = {label: other.result() for label, other in others.items()}
    for compared in result["against"].values():
        for name, layer in compared.items():
            own = result["layers"][name]["entropy"]["mixed_mean"]
            layer["entropy_ratio"] = ratio(own, layer["entropy"]["mixed_mean"])
    result["history"] = [{"checkpoint": label, "layers": other.result()} for label, other in earlier.items()]
    result["consistency"] = _consistency([diagnostics, *(of.diagnostics for of in others.values())]) if others else {}
    return result


def _compare(into: Mapping[str, Fluctuation], one: Routings, two: Routings, masks: Mapping[str, Tensor | None]) -> None:
    for name in one.keys() & two.keys():
        into[name].update(one[name], two[name], masks.get(name))


def _consistency(models: Sequence[Diagnostics]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in models[0].layers:
        loads = [model.layers[name]["load"] for model in models]
        assigned = [load.assigned for load in loads if isinstance(load, Load) and load.assigned is not None]
        found[name] = inter_run_consistency(assigned)
    return found
