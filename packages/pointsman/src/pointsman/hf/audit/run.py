"""The measurement loop of an audit: every batch at every k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import set_top_k
from pointsman.diagnostics import Diagnostics, Fluctuation
from pointsman.diagnostics.base import map_routing, number
from pointsman.hf.audit.result import AuditResult, Sample
from pointsman.hf.audit.text_loss import TextLoss
from pointsman.hf.listen import GateListener
from pointsman.hf.text import KINDS, TextBatch, refuse_unknown_tokens
from pointsman.routing import Routing

LARGEST = 700.0  # nats; exp of a larger loss overflows a float


def finite(found: Any) -> Any:
    """`found` with None in the place of numbers that are not finite."""
    if isinstance(found, dict):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return number(found) if isinstance(found, float) else found


class _Kept:
    """The routings of one forward, of the gates that read the text's tokens."""

    def __init__(self, tokens: int, listener: GateListener) -> None:
        self.tokens, self.listener = tokens, listener
        self.seen: set[str] = set()
        self.routings: dict[str, Routing] = {}

    def add(self, layer: str, routing: Routing, context: object, hidden: Tensor) -> bool:
        """Keeps a gate's first routing; whether it did."""
        if layer in self.seen:
            return False  # the layer runs twice, as a decoder's does in generation
        self.seen.add(layer)
        if hidden.shape[0] != self.tokens:
            self.listener.unsupported[layer] = "its input is not the text's tokens"
            return False
        self.routings[layer] = routing
        return True


class AuditRun:
    """Runs a model on batches at every k and collects losses and the statistics of its gates."""

    def __init__(
        self,
        model: nn.Module,
        listener: GateListener,
        diagnostics: Diagnostics,
        ks: Sequence[int | None],
        own: int | None,
        other: GateListener | None,
    ) -> None:
        self.model, self.listener, self.other = model, listener, other
        self.diagnostics, self.ks, self.own = diagnostics, ks, own
        self.other_kinds = {kind: Diagnostics("entropy", "load") for kind in KINDS if kind != "text"}
        self.losses = {k: TextLoss() for k in ks}
        self.routing = {k: Diagnostics("entropy", "load") for k in ks}
        self.agreement: dict[int | None, dict[str, Fluctuation]] = {k: {} for k in ks}
        self.fluctuation: dict[str, Fluctuation] = {}
        self.other_loss = TextLoss()
        self.counts = dict.fromkeys(KINDS, 0)
        self.failed: dict[int | None, str] = {}
        self.experts: dict[str, int] = {}
        self.width: dict[str, int] = {}

    def update(self, batch: TextBatch, sample: Sample) -> None:
        """Runs one batch at every k, the model's own k first."""
        for index, kind in enumerate(KINDS):
            self.counts[kind] += int((batch.kinds == index).sum())
        refuse_unknown_tokens(self.model, int(batch.ids.max()))
        kept = sample.begin(batch)
        of_kind = {kind: (batch.kinds == index).reshape(-1) for index, kind in enumerate(KINDS)}
        own: dict[str, Routing] = {}
        for k in self.ks:
            if k in self.failed:
                continue
            keep = _Kept(batch.ids.numel(), self.listener)

            def observe(
                layer: str, routing: Routing, context: object, hidden: Tensor, k: Any = k, keep: _Kept = keep
            ) -> None:
                if not keep.add(layer, routing, context, hidden):
                    return
                self._update_layer(layer, routing, hidden, batch, of_kind, k)
                if kept is not None:
                    sample.add(k == self.own, layer, routing, hidden, kept)

            at_k = nullcontext() if k is None or k == self.own else set_top_k(self.model, k)
            try:
                with at_k, self.listener.listen(observe, of_kind["text"], bfloat16=k == self.own):
                    self.losses[k].read(self.model, batch)
            except (RuntimeError, ValueError, IndexError) as error:  # some classes fail at other values of k
                if k == self.own:
                    raise
                self.failed[k] = f"k = {k}: {type(self.model).__name__} itself fails ({error})"
                self.agreement[k].clear()
                sample.routings.pop(k or 0, None)
                continue
            if k == self.own:
                own = keep.routings
            for layer in own.keys() & keep.routings.keys() if k != self.own else ():
                mask = of_kind["text"].to(own[layer].experts.device)
                self.agreement[k].setdefault(layer, Fluctuation()).update(own[layer], keep.routings[layer], mask)
        if self.other is not None:
            self._compare(own, batch, of_kind["text"])

    def _update_layer(
        self, layer: str, routing: Routing, hidden: Tensor, batch: TextBatch, of_kind: dict[str, Tensor], k: int | None
    ) -> None:
        device = hidden.device
        text = of_kind["text"].to(device)
        self.routing[k].update(layer, routing, text)
        if k != self.own:
            return
        self.experts[layer], self.width[layer] = routing.num_experts, routing.experts.shape[-1]
        self.diagnostics.update(layer, routing, text, hidden=hidden, token_ids=batch.ids.reshape(-1).to(device))
        for kind, diagnostics in self.other_kinds.items():
            if bool(of_kind[kind].any()):
                diagnostics.update(layer, routing, of_kind[kind].to(device))

    def _compare(self, own: dict[str, Routing], batch: TextBatch, text: Tensor) -> None:
        assert self.other is not None
        keep = _Kept(batch.ids.numel(), self.other)
        with self.other.listen(keep.add):
            self.other_loss.read(self.other.model, batch)
        others = keep.routings
        if others.keys() != own.keys():
            raise ValueError(
                f"audit: {len(own)} gates read the text's tokens in the model, {len(others)} in the one to compare with"
            )
        for layer, routing in own.items():
            device = routing.experts.device
            other = map_routing(others[layer], partial(torch.Tensor.to, device=device))
            self.fluctuation.setdefault(layer, Fluctuation()).update(other, routing, text.to(device))

    def result(
        self, protocol: dict[str, Any], notes: list[str], sample: Sample, routers: Mapping[str, Mapping[str, Any]]
    ) -> AuditResult:
        if not self.experts:
            reason = next(iter(self.listener.unsupported.values()), "no gate ran")
            raise ValueError(f"audit: no gate of {type(self.model).__name__} can be observed: {reason}")
        found = self.diagnostics.result()
        other_kinds = {kind: diagnostics.result() for kind, diagnostics in self.other_kinds.items()}
        layers = {}
        for layer, experts in self.experts.items():
            router = routers.get(layer, {"router": None, "without": None, "shared_experts": 0.0})
            one: dict[str, Any] = {"num_experts": experts, **router, **found[layer]}
            one["apart"] = {kind: result[layer] for kind, result in other_kinds.items() if layer in result}
            one["top_k"] = self.width[layer]
            one["agreement"] = [
                {"top_k": k, **self.agreement[k][layer].result()} for k in self.ks if layer in self.agreement[k]
            ]
            if layer in self.listener.bfloat16:
                one["bfloat16"] = self.listener.bfloat16[layer].result()
            if layer in self.fluctuation:
                one["fluctuation"] = self.fluctuation[layer].result()
            layers[layer] = one
        quality = []
        for k in sorted(set(self.ks) - self.failed.keys(), key=lambda value: value or 0):
            loss, count = self.losses[k].mean, self.losses[k].tokens
            routers = {
                layer: {
                    "entropy": of["entropy"]["mean"],
                    "entropy_std": of["entropy"]["std"],
                    "load": of["load"]["share"],
                }
                for layer, of in self.routing[k].result().items()
            }
            if loss is not None and not math.isfinite(loss):
                notes.append(f"k = {k}: the loss is {loss}: the model overflows, or its weights are not finite")
                loss = None
            perplexity = None if loss is None or loss > LARGEST else math.exp(loss)
            quality.append({"top_k": k, "loss": loss, "perplexity": perplexity, "tokens": count, "routers": routers})
        if not any(self.losses[k].tokens for k in self.ks):
            text = bool(self.counts["text"])
            why = "the model does not return logits over its vocabulary for each token" if text else "no token is text"
            notes.append(f"no loss: {why}")
        unsupported = [f"{layer}: {reason}" for layer, reason in self.listener.unsupported.items()]
        return AuditResult(
            model=type(self.model).__name__,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            top_k=self.own,
            tokens=self.counts,
            quality=finite(quality),
            layers=finite(layers),
            against=finite({"loss": self.other_loss.mean}) if self.other is not None else None,
            protocol=protocol,
            notes=[*notes, *self.failed.values(), *unsupported],
            sample=sample,
        )
