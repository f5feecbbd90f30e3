"""The measurement loop of an audit: every batch at every k."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import set_top_k
from pointsman.diagnostics import Diagnostics, Fluctuation
from pointsman.diagnostics.base import number
from pointsman.hf.listen import GateListener
from pointsman.routing import Routing
from pointsman.traces import RoutingTrace
from pointsman_lab.checkpoints.audit.blocks import Blocks, row_losses
from pointsman_lab.checkpoints.audit.precision import Precisions
from pointsman_lab.checkpoints.audit.result import LARGEST, AuditResult
from pointsman_lab.checkpoints.audit.sample import Sample
from pointsman_lab.checkpoints.text import KINDS, TEXT, TextBatch, refuse_unknown_tokens
from pointsman_lab.evaluation.passes import map_routing

KEPT = 8192
"""Text tokens whose experts are kept, as many of each domain, for figures across layers and simulations of serving."""


def finite(found: Any) -> Any:
    """`found` with None in the place of numbers that are not finite."""
    if isinstance(found, dict):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return number(found) if isinstance(found, float) else found


class _Recorded:
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
        domains: int = 1,
    ) -> None:
        self.model, self.listener, self.other = model, listener, other
        self.share = KEPT // domains
        self.diagnostics, self.ks, self.own = diagnostics, ks, own
        self.other_kinds = {kind: Diagnostics("entropy", "load") for kind in KINDS if kind != "text"}
        self.precisions = Precisions(listener)
        self.blocks = Blocks()
        self.by_domain: dict[str, Diagnostics] = {}
        self.chosen: dict[str, list[Tensor]] = {}
        self.rows: dict[str, list[int]] = {}  # domain -> the text tokens of its rows that are kept
        self.routing = {k: Diagnostics("entropy", "load") for k in ks}
        self.agreement: dict[int | None, dict[str, Fluctuation]] = {k: {} for k in ks}
        self.fluctuation: dict[str, Fluctuation] = {}
        self.counts = dict.fromkeys(KINDS, 0)
        self.failed: dict[int | None, str] = {}
        self.experts: dict[str, int] = {}
        self.width: dict[str, int] = {}
        self.width_of_scores: dict[str, int] = {}

    def update(self, batch: TextBatch, sample: Sample, domain: str) -> None:
        """Runs one batch of one domain at every k, the model's own k first."""
        self.blocks.begin(batch, domain)
        self.domain = self.by_domain.setdefault(domain, Diagnostics("entropy", "margin"))
        for index, kind in enumerate(KINDS):
            self.counts[kind] += int((batch.kinds == index).sum())
        refuse_unknown_tokens(self.model, int(batch.ids.max()))
        kept = sample.begin(batch)
        of_kind = {kind: (batch.kinds == index).reshape(-1) for index, kind in enumerate(KINDS)}
        own: dict[str, Routing] = {}
        for k in self.ks:
            if k in self.failed:
                continue
            keep = _Recorded(batch.ids.numel(), self.listener)

            def observe(
                layer: str, routing: Routing, context: object, hidden: Tensor, k: Any = k, keep: _Recorded = keep
            ) -> None:
                if not keep.add(layer, routing, context, hidden):
                    return
                self._update_layer(layer, routing, hidden, batch, of_kind, k)
                if kept is not None:
                    sample.add(k == self.own, layer, routing, hidden, kept)

            at_k = nullcontext() if k is None or k == self.own else set_top_k(self.model, k)
            try:
                compared = self.precisions.compare(of_kind["text"]) if k == self.own else nullcontext()
                with at_k, self.listener.listen(observe), compared:
                    self.blocks.add_losses(k, row_losses(self.model, batch))
            except (RuntimeError, ValueError, IndexError) as error:  # some classes fail at other values of k
                if k == self.own and isinstance(error, ValueError | torch.OutOfMemoryError):
                    raise
                kind = type(self.model).__name__
                if k == self.own:
                    raise ValueError(f"audit: {kind} itself fails on the text ({error})") from error
                self.failed[k] = f"k = {k}: {kind} itself fails ({error})"
                self.agreement[k].clear()
                sample.routings.pop(k or 0, None)
                continue
            if k == self.own:
                own = keep.routings
                continue
            for layer in own.keys() & keep.routings.keys():
                mask = of_kind["text"].to(own[layer].experts.device)
                self.agreement[k].setdefault(layer, Fluctuation()).update(own[layer], keep.routings[layer], mask)
        self._keep(own, batch, domain)
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
        self.blocks.add_choices(layer, routing.experts, text, routing.num_experts)
        self.domain.update(layer, routing, text)
        self.diagnostics.update(layer, routing, text, hidden=hidden, token_ids=batch.ids.reshape(-1).to(device))
        for kind, diagnostics in self.other_kinds.items():
            if bool(of_kind[kind].any()):
                diagnostics.update(layer, routing, of_kind[kind].to(device))

    def _keep(self, own: dict[str, Routing], batch: TextBatch, domain: str) -> None:
        """The experts of the first text tokens of a domain."""
        rows = self.rows.setdefault(domain, [])
        if sum(rows) < self.share:
            text = batch.kinds == TEXT
            rows += text.sum(1).tolist()
            for layer, routing in own.items():
                kept = routing.chosen[text.reshape(-1).to(routing.experts.device)]
                self.chosen.setdefault(layer, []).append(kept.to("cpu", torch.int16))
                self.width_of_scores[layer] = routing.probs.shape[-1]

    def trace(self) -> RoutingTrace:
        """The kept routing at the model's own k, without layers that saw other tokens.

        The rows of the domains take turns, so that both halves of it have the same shares of each.
        """
        lengths = torch.tensor([length for rows in self.rows.values() for length in rows])
        chosen = {layer: torch.cat(parts) for layer, parts in self.chosen.items()}
        whole = {layer: rows for layer, rows in chosen.items() if len(rows) == int(lengths.sum())}
        numbers = {layer: self.width_of_scores[layer] for layer in whole}
        virtual = {layer: one.virtual for layer, one in self.listener.layers.items() if layer in whole}
        trace = RoutingTrace(whole, numbers, lengths, virtual=virtual, model=type(self.model).__name__)
        places = torch.cat([(torch.arange(len(rows)) + 0.5) / len(rows) for rows in self.rows.values()])
        order = places.argsort(stable=True)
        parts = torch.split(torch.arange(trace.tokens), lengths.tolist())
        return trace.rows(torch.cat([parts[row] for row in order.tolist()]), lengths[order])

    def _compare(self, own: dict[str, Routing], batch: TextBatch, text: Tensor) -> None:
        assert self.other is not None
        refuse_unknown_tokens(self.other.model, int(batch.ids.max()))
        keep = _Recorded(batch.ids.numel(), self.other)
        with self.other.listen(keep.add):
            self.blocks.add_losses("against", row_losses(self.other.model, batch))
        others = keep.routings
        if others.keys() != own.keys():
            told = f"{len(own)} gates read the text's tokens in the model, {len(others)} in the one to compare with"
            raise ValueError(f"audit: {told}")
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
            one["agreement"] = [{"top_k": k, **of[layer].result()} for k, of in self.agreement.items() if layer in of]
            if layer in self.precisions.found:
                one["bfloat16"] = self.precisions.found[layer].result()
            if layer in self.fluctuation:
                one["fluctuation"] = self.fluctuation[layer].result()
            layers[layer] = one
        for domain, diagnostics in self.by_domain.items():
            for layer, of in diagnostics.result().items():
                share = self.blocks.counts(layer, domain).sum(0)
                layers[layer].setdefault("domains", {})[domain] = {
                    "entropy": of["entropy"]["mean"], "margin": of["margin"]["mean"], "choices": int(share.sum()),
                    "share": (share / share.sum().clamp_min(1)).tolist(),
                }  # fmt: skip
        quality = []
        measured = sorted(set(self.ks) - self.failed.keys(), key=lambda value: value or 0)
        for k in measured:
            found_loss = self.blocks.loss(k)
            loss, count = found_loss["mean"], self.blocks.tokens(k)
            routers = {}
            for layer, of in self.routing[k].result().items():
                entropy, load = of["entropy"], of["load"]["share"]
                routers[layer] = {"entropy": entropy["mean"], "entropy_std": entropy["std"], "load": load}
            if loss is not None and not math.isfinite(loss):
                notes.append(f"k = {k}: the loss is {loss}: the model overflows, or its weights are not finite")
                loss = None
            perplexity = None if loss is None or loss > LARGEST else math.exp(loss)
            others = max(1, len(measured) - 1)
            domains = {
                name: {**self.blocks.loss(k, name), "difference": self.blocks.difference(k, self.own, others, name)}
                for name in self.blocks.domains
            }
            quality.append(
                {"top_k": k, "loss": loss, "half": found_loss["half"], "blocks": found_loss["blocks"],
                 "difference": self.blocks.difference(k, self.own, others), "perplexity": perplexity, "tokens": count,
                 "domains": domains, "routers": routers}
            )  # fmt: skip
        if not any(row["tokens"] for row in quality):
            text = bool(self.counts["text"])
            why = "the model does not return logits over its vocabulary for each token" if text else "no token is text"
            notes.append(f"no loss: {why}")
        against = None
        if self.other is not None:
            other, gap = self.blocks.loss("against"), self.blocks.difference("against", self.own, 1)
            against = finite({"loss": other["mean"], "half": other["half"], "difference": gap})
        unsupported = [f"{layer}: {reason}" for layer, reason in self.listener.unsupported.items()]
        return AuditResult(
            model=type(self.model).__name__,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            top_k=self.own,
            tokens=self.counts,
            quality=finite(quality),
            layers=finite(layers),
            against=against,
            protocol=protocol,
            notes=[*notes, *self.failed.values(), *unsupported],
            sample=sample,
        )
