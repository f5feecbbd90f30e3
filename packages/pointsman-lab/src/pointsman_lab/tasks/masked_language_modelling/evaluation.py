"""Quality of a masked language model at any k, by language, and what its routers did meanwhile.

Perplexity is exp(mean nats over masked positions). Figures of different vocabularies do not compare; nats per character
of masked text do: the nats of the masked pieces over the characters that these pieces stand for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman.ranks import ALONE
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, Pass, draws, evaluated
from pointsman_lab.tasks.masked_language_modelling.blocks import Masking, PackedText, validation_batch

SCORED = Masking()
"""What is masked in evaluation, whatever training masks: 15 %, of these 80 % `<mask>`, 10 % random, 10 % unchanged."""


@dataclass(frozen=True)
class MaskedBatch:
    """inputs [b, T] (-1 = padding) and targets [b, T] (-100 = none) of one language."""

    language: str
    inputs: Tensor
    targets: Tensor


def scored_blocks(text: PackedText, tokens: int | None) -> dict[str, list[int]]:
    """language -> numbers of the validation blocks that are scored: all, or about `tokens` places, evenly spaced."""
    places = sum(blocks.size for blocks in text.valid.values())
    share = 1.0 if tokens is None else min(1.0, tokens / places)
    chosen = {}
    for language, blocks in text.valid.items():
        count = max(1, round(share * len(blocks)))
        chosen[language] = np.linspace(0, len(blocks) - 1, count).round().astype(int).tolist()
    return chosen


def masked_batches(
    text: PackedText, batch_size: int, device: torch.device | str, tokens: int | None = None
) -> list[MaskedBatch]:
    """The validation blocks with their fixed masks."""
    return [
        MaskedBatch(language, inputs.to(device), targets.to(device))
        for language, numbers in scored_blocks(text, tokens).items()
        for first in range(0, len(numbers), batch_size)
        for inputs, targets in [validation_batch(text, language, numbers[first : first + batch_size], SCORED)]
    ]


@torch.no_grad()
def evaluate_masked(
    model: Any,
    text: PackedText,
    shares: Mapping[str, float],
    *,
    top_k: Sequence[int],
    batch_size: int,
    tokens: int | None = None,
    split: str = "valid",
    how: EvaluationContext = PLAIN,
) -> list[dict[str, Any]]:
    """Scores the validation blocks at every k.

    Returns:
        For each k: {"split", "top_k", "nats", "metric": "perplexity", "value", "nats_per_character", "tokens" (real
        places read), "masked", "languages": {language: {"nats", "value", "nats_per_character", "masked"}}, "routers"}.
        `nats` is the mean over languages, weighted by `shares`, of each language's mean over masked positions; `value`
        its exponential.
    """
    device = next(model.parameters()).device
    characters = torch.from_numpy(text.pieces.characters).to(device)
    batches = masked_batches(text, batch_size, device, tokens)
    ranks = ALONE if draws(model) else how.ranks

    def one_pass(one: Pass) -> dict[str, Any]:
        sums = {language: torch.zeros(3, dtype=torch.float64, device=device) for language in text.valid}
        read = 0
        for batch, counts in one.share(batches):
            real = batch.inputs >= 0
            with one.forward(real.reshape(-1), counts=counts):
                nats: Tensor = model(batch.inputs, batch.targets)
            if counts:
                read += int(real.sum())
                masked = batch.targets[batch.targets >= 0]
                sums[batch.language] += torch.stack(
                    [nats.double().sum(), characters[masked].sum().double(), nats.new_tensor(len(masked)).double()]
                )
        *summed, places = ranks.total(*sums.values(), torch.tensor(read, device=device))
        sums = dict(zip(sums, summed, strict=True))
        languages = {language: _figures(*total.tolist()) for language, total in sums.items()}
        return {"metric": "perplexity", **_pooled(sums, shares), "tokens": int(places), "languages": languages}

    return evaluated(model, top_k, one_pass, split=split, batches=len(batches), how=how, ranks=ranks)


def _figures(nats: float, characters: float, masked: float) -> dict[str, Any]:
    mean = nats / masked if masked else math.nan
    return {
        "nats": mean if masked else None,
        "value": perplexity(mean),
        "nats_per_character": nats / characters if characters else None,
        "masked": int(masked),
    }


def _pooled(sums: Mapping[str, Tensor], shares: Mapping[str, float]) -> dict[str, Any]:
    """The figures over languages, each with its share of the masked positions."""
    weighted = [(shares[language] / count, nats, letters) for language, total in sums.items()
                for nats, letters, count in [total.tolist()] if count]  # fmt: skip
    if not weighted:
        raise RunError("the validation text is too short: none of its tokens is masked")
    of = sum(shares[language] for language, total in sums.items() if float(total[2]))
    nats = sum(weight * each for weight, each, _ in weighted) / of
    letters = sum(weight * each for weight, _, each in weighted) / of
    return {
        "nats": nats,
        "value": perplexity(nats),
        "nats_per_character": nats / letters if letters else None,
        "masked": sum(int(total[2]) for total in sums.values()),
    }


def perplexity(nats: float) -> float | None:
    """e^nats; None if it is no finite number."""
    try:
        value = math.exp(nats)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None
