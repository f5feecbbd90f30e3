"""audit: is this MoE healthy, and with how few experts can it be served? For any Hugging Face class, by hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.control import set_top_k
from pointsman.diagnostics import Diagnostics, Entropy, Fluctuation, Load
from pointsman.diagnostics.observe import evaluating
from pointsman.hf.audit_result import AuditResult, Sample
from pointsman.hf.gates import survey
from pointsman.hf.listen import Ears, changed
from pointsman.hf.text import KINDS, PADDING, TEXT, Conversation, TextBatch, text_batches
from pointsman.hf.top_k import gate_slot, most_experts
from pointsman.routing import Routing

MOST_BYTES = 1 << 30
"""Of all layers' state of one diagnostic; a larger one is left out, and the result says so."""
Progress = Callable[[int, int | None], None]
"""Told the number of tokens read so far, and how many there will be at most (None: not known)."""


@torch.no_grad()
def audit(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[str | Conversation],
    *,
    top_k: Sequence[int] | None = None,
    against: nn.Module | None = None,
    max_tokens: int | None = 50_000,
    length: int = 512,
    batch_size: int = 8,
    sample_tokens: int = 512,
    progress: Progress | None = None,
) -> AuditResult:
    """Quality against k, and what every gate does, on your texts.

    The model is not changed. Statistics are those of text tokens; special tokens, what a chat template adds, and
    padding are counted apart. Memory does not grow with the texts.

    Args:
        model: a transformers MoE, on any device, in any precision.
        tokenizer: its tokenizer.
        texts: strings, or conversations (lists of {"role", "content"}).
        top_k: values of k to measure (default: 1, 2, 4, … up to four times the model's own, and its own).
        against: another checkpoint of the same model; routing fluctuation and loss between the two.
        max_tokens: how many tokens are read at most (None: all).
        length: tokens a row.
        batch_size: rows a forward.
        sample_tokens: of the first row(s), kept for the page's explorer.
        progress: called after each batch.

    Raises:
        ValueError: no gate in the model, a k out of range, no text, or models that cannot be compared.
    """
    ears = Ears(model)
    if not ears.gates:
        raise ValueError(f"audit: {type(model).__name__} has no gate beside experts: not a mixture of experts we know")
    own, ks, notes = _values_of_k(model, top_k)
    other = None if against is None else _matching(ears, against)
    run = _Audit(model, ears, _kinds(model, ears, notes), ks, own, other)
    batches = text_batches(tokenizer, texts, length=length, batch_size=batch_size, max_tokens=max_tokens)
    sample = Sample(tokenizer, sample_tokens)
    read = 0
    with evaluating(model), evaluating(against or model):
        for batch in batches:
            run.take(batch, sample)
            read += int(batch.mask.sum())
            if progress:
                progress(read, max_tokens)
    if not read:
        raise ValueError("audit: there is no text to read")
    protocol = {
        "length": length,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "tokenizer": type(tokenizer).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": str(next(model.parameters()).device.type),
    }
    return run.result(protocol, notes, sample)


def _values_of_k(model: nn.Module, wanted: Sequence[int] | None) -> tuple[int | None, list[int | None], list[str]]:
    """The model's own k, the values to measure (own k first), and notes. None: the classes's k, whatever it is."""
    gates, reasons = survey(model)
    notes = [f"k cannot be set here: {reason}" for reason in reasons[:1]]
    try:
        own = gate_slot(gates[0]).value if gates else None
    except ValueError as error:
        own, notes = None, [*notes, str(error)]
    if notes or own is None:
        if wanted is not None and list(wanted) != [own]:
            raise ValueError(f"audit: top_k={list(wanted)}: {(notes or ['the gates keep no k'])[0]}")
        return own, [own], notes or ["k cannot be set here: the gates keep no k"]
    if wanted is None:
        most = min(4 * own, *(most_experts(gate) for gate in gates))
        values = sorted({own, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
    else:
        values = list(dict.fromkeys(wanted))
    checked: list[int | None] = [own]
    for k in values:
        try:
            with set_top_k(model, k):
                checked += [k] if k != own else []
        except ValueError as error:
            if wanted is not None:
                raise
            notes.append(str(error))
    return own, checked, list(dict.fromkeys(notes))[:2]


def _kinds(model: nn.Module, ears: Ears, notes: list[str]) -> Diagnostics:
    """The diagnostics whose state stays small."""
    gates, _ = survey(model)
    kinds = ["entropy", "margin", "load", "co_activation"]
    dim = max((gate.dim for gate in gates), default=0)
    experts = max((gate.num_experts for gate in gates), default=0)
    vocabulary = min(int(getattr(getattr(model, "config", None), "vocab_size", 0) or 0), 1 << 16)
    states = {"collapse": 8 * dim * (dim + experts), "specialisation": 4 * vocabulary * experts}
    for kind, size in states.items():
        if size * len(ears.gates) <= MOST_BYTES:
            kinds.append(kind)
        else:
            notes.append(f"{kind} left out: it would take {size * len(ears.gates) / 2**30:.1f} GiB for this model")
    return Diagnostics(*kinds)


def _matching(ears: Ears, against: nn.Module) -> Ears:
    other = Ears(against)
    if len(other.gates) != len(ears.gates):
        raise ValueError(
            f"audit: the model has {len(ears.gates)} gates, the one to compare with {len(other.gates)}; "
            "both must be checkpoints of the same model"
        )
    return other


class _Audit:
    def __init__(
        self,
        model: nn.Module,
        ears: Ears,
        diagnostics: Diagnostics,
        ks: Sequence[int | None],
        own: int | None,
        other: Ears | None,
    ) -> None:
        self.model, self.ears, self.diagnostics, self.ks, self.own, self.other = (
            model,
            ears,
            diagnostics,
            ks,
            own,
            other,
        )
        self.apart = {kind: Diagnostics("entropy", "load") for kind in KINDS if kind != "text"}
        self.losses = {k: [0.0, 0] for k in ks}
        self.entropies: dict[int | None, dict[str, Entropy]] = {k: {} for k in ks}
        self.loads: dict[int | None, dict[str, Load]] = {k: {} for k in ks}
        self.agreement: dict[int | None, dict[str, Fluctuation]] = {k: {} for k in ks}
        self.fluctuation: dict[str, Fluctuation] = {}
        self.other_loss = [0.0, 0]
        self.counts = dict.fromkeys(KINDS, 0)
        self.failed: dict[int | None, str] = {}
        self.experts: dict[str, int] = {}
        self.width: dict[str, int] = {}

    def take(self, batch: TextBatch, sample: Sample) -> None:
        """One batch at every k, its own first."""
        for index, kind in enumerate(KINDS):
            self.counts[kind] += int((batch.kinds == index).sum())
        kept = sample.begin(batch)
        of_kind = {kind: (batch.kinds == index).reshape(-1) for index, kind in enumerate(KINDS)}
        first: dict[str, Routing] = {}
        for k in self.ks:
            if k in self.failed:
                continue
            seen: dict[str, Routing] = {}

            def hear(layer: str, routing: Routing, hidden: Tensor, k: int | None = k, seen: Any = seen) -> None:
                if layer in seen:
                    return  # a layer that runs twice, such as the decoder's in generation
                seen[layer] = routing
                if hidden.shape[0] != batch.ids.numel():
                    self.ears.silent[layer] = "it sees other tokens than the text's"
                    return
                self._layer(layer, routing, hidden, batch, of_kind, k)
                if kept is not None:
                    sample.take(k == self.own, layer, routing, hidden, kept)

            try:
                with self._at(k), self.ears.listen(hear, of_kind["text"], rounding=k == self.own):
                    self._read(self.model, batch, self.losses[k])
            except (RuntimeError, ValueError, IndexError) as error:  # some classes fail at a k that is not their own
                if k == self.own:
                    raise
                self.failed[k] = f"k = {k}: {type(self.model).__name__} itself fails ({error})"
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

    def _read(self, model: nn.Module, batch: TextBatch, into: list[Any]) -> None:
        device = next(model.parameters()).device
        ids = batch.ids.to(device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": batch.mask.long().to(device)}
        config = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            inputs["use_cache"] = False
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        output = model(**inputs)
        logits = getattr(output, "logits", None)
        if logits is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
            return
        counted = batch.kinds[:, 1:] == TEXT
        counted &= batch.kinds[:, :-1] != PADDING
        for row in range(ids.shape[0]):
            chosen = counted[row].to(device)
            scores = logits[row, :-1][chosen].float()
            if not len(scores) or scores.shape[-1] <= int(ids[row].max()):
                continue
            into[0] += float(F.cross_entropy(scores, ids[row, 1:][chosen], reduction="sum"))
            into[1] += len(scores)

    def _compare(self, first: dict[str, Routing], batch: TextBatch, text: Tensor) -> None:
        assert self.other is not None
        theirs: list[Routing] = []
        with self.other.listen(lambda layer, routing, hidden: theirs.append(routing)):
            self._read(self.other.model, batch, self.other_loss)
        if len(theirs) != len(first):
            raise ValueError(f"audit: {len(first)} gates spoke here, {len(theirs)} in the model to compare with")
        for (layer, routing), their in zip(first.items(), theirs, strict=True):
            device = routing.experts.device
            here = changed(their, partial(torch.Tensor.to, device=device))
            self.fluctuation.setdefault(layer, Fluctuation()).update(here, routing, text.to(device))

    def result(self, protocol: dict[str, Any], notes: list[str], sample: Sample) -> AuditResult:
        if not self.experts:
            reason = next(iter(self.ears.silent.values()), "no gate ran")
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
            if layer in self.ears.precision:
                one["bfloat16"] = self.ears.precision[layer].result()
            if layer in self.fluctuation:
                one["fluctuation"] = self.fluctuation[layer].result()
            layers[layer] = one
        quality = []
        for k in sorted(set(self.ks) - self.failed.keys(), key=lambda value: value or 0):
            total, count = self.losses[k]
            loss = total / count if count else None
            routers = {
                layer: {
                    "entropy": entropy.result()["mean"],
                    "entropy_std": entropy.result()["std"],
                    "load": self.loads[k][layer].result()["share"],
                }
                for layer, entropy in self.entropies[k].items()
            }
            perplexity = None if loss is None else math.exp(min(loss, 700.0))
            quality.append({"top_k": k, "loss": loss, "perplexity": perplexity, "tokens": count, "routers": routers})
        if quality[0]["loss"] is None:
            notes.append("no loss: the model gives no logits over its vocabulary for each token")
        silent = [f"{layer}: {reason}" for layer, reason in self.ears.silent.items()]
        total, count = self.other_loss
        return AuditResult(
            model=type(self.model).__name__,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            top_k=self.own,
            tokens=self.counts,
            quality=quality,
            layers=layers,
            against={"loss": total / count if count else None} if self.other is not None else None,
            protocol=protocol,
            notes=[*notes, *self.failed.values(), *silent],
            sample=sample,
        )
