"""audit: is this MoE healthy, and with how few experts can it be served? For any Hugging Face class, by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pointsman._values import check_whole
from pointsman.diagnostics.observe import evaluating
from pointsman.hf.audit.listen import GateListener
from pointsman.hf.audit.plan import small_diagnostics, values_of_k
from pointsman.hf.audit.result import AuditResult, Sample
from pointsman.hf.audit.run import AuditRun
from pointsman.hf.text import Conversation, text_batches

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
        ValueError: no gate in the model, a k or another number out of range, no text, something that is no text, or
            models that cannot be compared.
    """
    _check(
        texts, length=(length, 2), batch_size=(batch_size, 1), max_tokens=(1 if max_tokens is None else max_tokens, 1)
    )
    listener = GateListener(model)
    if not listener.gates:
        raise ValueError(f"audit: {type(model).__name__} has no gate beside experts: not a mixture of experts we know")
    own, ks, notes = values_of_k(model, top_k)
    other = None if against is None else _matching(listener, against)
    run = AuditRun(model, listener, small_diagnostics(model, listener, notes), ks, own, other)
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


def _check(texts: Iterable[Any], **numbers: tuple[Any, int]) -> None:
    if isinstance(texts, str):
        raise ValueError("audit: texts is one string; it must be a list (or any iterable) of texts: [text]")
    for name, (value, least) in numbers.items():
        check_whole(f"audit: {name}", value, least)


def _matching(listener: GateListener, against: nn.Module) -> GateListener:
    """The other checkpoint's gates; refused unless class, gates and numbers of experts are those of the model."""
    other = GateListener(against)
    here, there = (
        [type(one.model).__name__, f"{len(one.gates)} gates", f"{sorted(set(one.num_experts.values()))} experts"]
        for one in (listener, other)
    )
    for mine, its in zip(here, there, strict=True):
        if mine != its:
            raise ValueError(
                f"audit: the model: {mine}, the one to compare with: {its}; both must be checkpoints of the same model"
            )
    return other
