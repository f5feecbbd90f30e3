"""All diagnostics of a model's layers at once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from pointsman._errors import did_you_mean
from pointsman.diagnostics.base import Diagnostic, RoutingDiagnostic
from pointsman.diagnostics.observe import named_layers, observe_mixing
from pointsman.diagnostics.specialisation import OutputSimilarity, RepresentationCollapse, Specialisation
from pointsman.diagnostics.statistics import CoActivation, Entropy, Load, Margin, Mixing
from pointsman.ranks import every_rank
from pointsman.recording import observe_routing
from pointsman.routing import Routing, RoutingContext

KINDS: dict[str, Callable[[], RoutingDiagnostic]] = {
    "entropy": Entropy,
    "margin": Margin,
    "load": Load,
    "co_activation": CoActivation,
    "collapse": RepresentationCollapse,
    "specialisation": Specialisation,
}
NEEDS = {"collapse": "hidden", "specialisation": "token_ids", "outputs": "hidden"}
WITHOUT = {
    "specialisation": "needs token_ids, one for each token that a layer reads",
    "outputs": "needs a layer of this library",
    "mixing": "needs a router with a mixer, as smoe+similarity",
}


class Diagnostics:
    """layer name -> diagnostic name -> its streaming object.

        diagnostics = Diagnostics()
        for tokens in batches:
            with diagnostics.observe(model, token_ids=tokens):
                model(tokens)
        diagnostics.result()["blocks.0.moe"]["entropy"]["mean"]

    Attributes:
        masks: layer name -> [tokens] bool, which tokens of its last observed forward counted; None: all.

    Args:
        kinds: which of "entropy", "margin", "load", "co_activation", "collapse", "specialisation", "outputs",
            "mixing" (all by default). A kind that needs hidden states or token ids is skipped if they are not given;
            one that is named here then warns, as does one whose token ids no layer read.
    """

    def __init__(self, *kinds: str) -> None:
        allowed = [*KINDS, "outputs", "mixing"]
        for kind in kinds:
            if kind not in allowed:
                raise ValueError(f"Diagnostics: unknown kind {kind!r}: {did_you_mean(kind, allowed)}")
        self.kinds, self._named = kinds or tuple(allowed), kinds
        self.layers: dict[str, dict[str, Diagnostic]] = {}
        self.masks: dict[str, Tensor | None] = {}

    def update(
        self, name: str, routing: Routing, mask: Tensor | None = None, *, hidden: Tensor | None = None,
        token_ids: Tensor | None = None, experts: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """Adds one forward of the layer `name`; shapes as in `RoutingDiagnostic.update`; `experts`: the layer's."""
        given = {"hidden": hidden, "token_ids": token_ids}
        layer = self.layers.setdefault(name, {})
        for kind in self.kinds:
            if kind == "mixing" or (kind in NEEDS and given[NEEDS[kind]] is None):
                continue
            if kind not in layer:
                if kind == "outputs" and experts is None:
                    continue
                layer[kind] = OutputSimilarity(experts) if kind == "outputs" and experts else KINDS[kind]()
            diagnostic = layer[kind]
            assert isinstance(diagnostic, RoutingDiagnostic)
            if isinstance(diagnostic, OutputSimilarity) and experts is not None:
                diagnostic.experts = experts  # a merged one has none
            diagnostic.update(routing, mask, hidden=hidden, token_ids=token_ids)

    @contextmanager
    def observe(
        self, model: nn.Module, token_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Iterator[dict[str, Routing]]:
        """Adds every forward inside the `with`; yields layer name -> Routing of its last forward, detached.

        Args:
            token_ids: of the forward, any shape with one element per token.
            mask: bool, any such shape, True for tokens that count; of layers that read as many. Padding never counts.
        """
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"Diagnostics.observe: mask must be bool, True for a token that counts, got {mask.dtype}")
        records: dict[str, Routing] = {}
        layers, fits, ids_fit = named_layers(model), False, token_ids is None

        def real(context: RoutingContext | None, tokens: int) -> Tensor | None:
            nonlocal fits
            padding = None if context is None or context.padding_mask is None else context.padding_mask.reshape(-1)
            if mask is None or mask.numel() != tokens:
                return padding
            fits = True
            return mask.reshape(-1) if padding is None else mask.reshape(-1) & padding

        def on_routing(name: str, routing: Routing, context: RoutingContext | None, hidden: Tensor) -> None:
            nonlocal ids_fit
            records[name], self.masks[name] = routing, real(context, len(hidden))
            ids = token_ids if context is None or context.token_ids is None else context.token_ids
            ids = ids.reshape(-1) if ids is not None and ids.numel() == len(hidden) else None
            ids_fit = ids_fit or ids is not None
            experts = layers[name].experts if name in layers else None
            self.update(name, routing, self.masks[name], hidden=hidden, token_ids=ids, experts=experts)
            mixing = self.layers.get(name, {}).get("mixing")  # of a router with a mixer, which has just mixed
            if isinstance(mixing, Mixing):
                mixing.update_choice(routing, self.masks[name])

        def on_mixing(name: str, own: Tensor, effective: Tensor, context: RoutingContext) -> None:
            mixing = self.layers.setdefault(name, {}).setdefault("mixing", Mixing())
            assert isinstance(mixing, Mixing)
            mixing.update(own, effective, real(context, own.numel()))

        with ExitStack() as stack:
            stack.enter_context(observe_routing(model, on_routing))
            if "mixing" in self.kinds:
                stack.enter_context(observe_mixing(model, on_mixing))
            yield records
        if mask is not None and records and not fits:
            raise ValueError(f"Diagnostics.observe: mask {list(mask.shape)}: no layer read so many tokens")
        expected = self._named or (() if ids_fit else ("specialisation",))
        for kind in expected if records else ():
            if not any(kind in layer for layer in self.layers.values()):
                warnings.warn(f"Diagnostics: {kind!r} found nothing: it {WITHOUT[kind]}", stacklevel=3)

    def merge(self, other: Diagnostics) -> Self:
        """Adds the states of `other`; returns self."""
        for name, layer in other.layers.items():
            own = self.layers.setdefault(name, {})
            for kind, diagnostic in layer.items():
                own[kind] = own[kind].merge(diagnostic) if kind in own else copy.deepcopy(diagnostic)
        return self

    def gather(self, group: Any = None) -> Diagnostics:
        """The merged diagnostics of all processes of a torch.distributed group, on every process."""
        whole = Diagnostics(*self.kinds)
        for part in every_rank(group).gather(self):
            whole.merge(part)
        return whole

    def result(self) -> dict[str, dict[str, Any]]:
        """layer name -> diagnostic name -> its result (JSON values)."""
        return {
            name: {kind: diagnostic.result() for kind, diagnostic in layer.items()}
            for name, layer in self.layers.items()
        }
