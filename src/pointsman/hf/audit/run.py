"""One audit under way: every batch at every k, heard by hooks, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import set_top_k
from pointsman.diagnostics import Diagnostics, Entropy, Fluctuation, Load
from pointsman.diagnostics.base import number
from pointsman.hf.audit.listen import GateListener, changed
from pointsman.hf.audit.result import AuditResult, Sample
from pointsman.hf.audit.text_loss import TextLoss
from pointsman.hf.text import KINDS, TextBatch, refuse_unknown_tokens
from pointsman.routing import Routing

LARGEST = 700.0  # nats, whose perplexity a float holds


def finite(found: Any) -> Any:
    """The same with None for numbers that are not finite."""
    if isinstance(found, dict):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return number(found) if isinstance(found, float) else found


class AuditRun:
    """Reads a model's texts batch by batch at every k, and gathers what its gates did."""

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
        self.apart = {kind: Diagnostics("entropy", "load") for kind in KINDS if kind != "text"}
        self.losses = {k: TextLoss() for k in ks}
        self.entropies: dict[int | None, dict[str, Entropy]] = {k: {} for k in ks}
        self.loads: dict[int | None, dict[str, Load]] = {k: {} for k in ks}
        self.agreement: dict[int | None, dict[str, Fluctuation]] = {k: {} for k in ks}
        self.fluctuation: dict[str, Fluctuation] = {}
        self.other_loss = TextLoss()
        self.counts = dict.fromkeys(KINDS, 0)
        self.failed: dict[int | None, str] = {}
        self.experts: dict[str, int] = {}
        self.width: dict[str, int] = {}

    def take(self, batch: TextBatch, sample: Sample) -> None:
        """One batch at every k, its own first."""
        for index, kind in enumerate(KINDS):
            self.counts[kind] += int((batch.kinds == index).sum())
        refuse_unknown_tokens(self.model, int(batch.ids.max()))
        kept = sample.begin(batch)
        of_kind = {kind: (batch.kinds == index).reshape(-1) for index, kind in enumerate(KINDS)}
        first: dict[str, Routing] = {}
        for k in self.ks:
            if k in self.failed:
                continue
            seen: dict[str, Routing] = {}

            def observe(layer: str, routing: Routing, hidden: Tensor, k: int | None = k, seen: Any = seen) -> None:
                if layer in seen:
                    return  # a layer that runs twice, such as the decoder's in generation
                seen[layer] = routing
                if hidden.shape[0] != batch.ids.numel():
                    self.listener.unsupported[layer] = "it sees other tokens than the text's"
                    return
                self._layer(layer, routing, hidden, batch, of_kind, k)
                if kept is not None:
                    sample.take(k == self.own, layer, routing, hidden, kept)

            try:
                with self._at(k), self.listener.listen(observe, of_kind["text"], rounding=k == self.own):
                    self.losses[k].read(self.model, batch)
            except (RuntimeError, ValueError, IndexError) as error:  # some classes fail at a k that is not their own
                if k == self.own:
                    raise
                self.failed[k] = f"k = {k}: {type(self.model).__name__} itself fails ({error})"
                self.agreement[k].clear()
                if k is not None:
                    sample.routings.pop(k, None)
                continue
            if k == self.own:
                first = seen
            else:
                text = of_kind["text"]
                for layer in first.keys() & seen.keys():
                    mask = text.to(seen[layer].experts.device)
                    self.agreement[k].setdefault(layer, Fluctuation()).update(first[layer], seen[layer], mask)
        if self.other is not None:
            self._compare(first, batch, of_kind["text"])

    def _at(self, k: int | None) -> Any:
        return nullcontext() if k is None or k == self.own else set_top_k(self.model, k)

    def _layer(
        self,
        layer: str,
        routing: Routing,
        hidden: Tensor,
        batch: TextBatch,
        of_kind: dict[str, Tensor],
        k: int | None,
    ) -> None:
        device = hidden.device
        text = of_kind["text"].to(device)
        self.entropies[k].setdefault(layer, Entropy()).update(routing, text)
        self.loads[k].setdefault(layer, Load()).update(routing, text)
        if k != self.own:
            return
        self.experts[layer], self.width[layer] = routing.num_experts, routing.experts.shape[-1]
        self.diagnostics.update(layer, routing, text, hidden=hidden, token_ids=batch.ids.reshape(-1).to(device))
        for kind, apart in self.apart.items():
            if bool(of_kind[kind].any()):
                apart.update(layer, routing, of_kind[kind].to(device))

    def _compare(self, first: dict[str, Routing], batch: TextBatch, text: Tensor) -> None:
        assert self.other is not None
        theirs: list[Routing] = []
        with self.other.listen(lambda layer, routing, hidden: theirs.append(routing)):
            self.other_loss.read(self.other.model, batch)
        if len(theirs) != len(first):
            raise ValueError(f"audit: {len(first)} gates spoke here, {len(theirs)} in the model to compare with")
        for (layer, routing), their in zip(first.items(), theirs, strict=True):
            device = routing.experts.device
            here = changed(their, partial(torch.Tensor.to, device=device))
            self.fluctuation.setdefault(layer, Fluctuation()).update(here, routing, text.to(device))

    def result(self, protocol: dict[str, Any], notes: list[str], sample: Sample) -> AuditResult:
        if not self.experts:
            reason = next(iter(self.listener.unsupported.values()), "no gate ran")
            raise ValueError(f"audit: nothing to see in {type(self.model).__name__}: {reason}")
        found = self.diagnostics.result()
        apart = {kind: one.result() for kind, one in self.apart.items()}
        layers = {}
        for layer, experts in self.experts.items():
            one: dict[str, Any] = {"num_experts": experts, **found[layer]}
            one["apart"] = {kind: result[layer] for kind, result in apart.items() if layer in result}
            one["top_k"] = self.width[layer]
            one["agreement"] = [
                {"top_k": k, **self.agreement[k][layer].result()} for k in self.ks if layer in self.agreement[k]
            ]
            if layer in self.listener.precision:
                one["bfloat16"] = self.listener.precision[layer].result()
            if layer in self.fluctuation:
                one["fluctuation"] = self.fluctuation[layer].result()
            layers[layer] = one
        quality = []
        for k in sorted(set(self.ks) - self.failed.keys(), key=lambda value: value or 0):
            loss, count = self.losses[k].mean, self.losses[k].tokens
            routers = {
                layer: {
                    "entropy": entropy.result()["mean"],
                    "entropy_std": entropy.result()["std"],
                    "load": self.loads[k][layer].result()["share"],
                }
                for layer, entropy in self.entropies[k].items()
            }
            if loss is not None and not math.isfinite(loss):
                notes.append(
                    f"k = {k}: the loss is {loss}: the model's numbers run over, or its weights hold some that do"
                )
                loss = None
            perplexity = None if loss is None or loss > LARGEST else math.exp(loss)
            quality.append({"top_k": k, "loss": loss, "perplexity": perplexity, "tokens": count, "routers": routers})
        if not any(self.losses[k].tokens for k in self.ks):
            notes.append("no loss: the model gives no logits over its vocabulary for each token")
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
