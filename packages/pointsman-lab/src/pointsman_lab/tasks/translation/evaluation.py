"""Translations by greedy and beam search, and their BLEU and chrF by sacrebleu, at any k.

Shapes: B sources, R rows of hypotheses, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pointsman._errors import needing
from pointsman_lab.data.pieces import END, START
from pointsman_lab.models.memory import Memory
from pointsman_lab.tasks.translation.model import Translator

LONGER, MORE = 1.2, 10  # a translation has at most 1.2 S + 10 tokens
LENGTH_PENALTY = 1.0


@torch.no_grad()
def search(model: Translator, source: Tensor, beam: int = 1) -> list[list[int]]:
    """The best translation of each source [B, S] as ids, without `</s>`; with beam 1 greedy.

    Score = log p / length (`</s>` counts). Each step keeps the `beam` best unfinished hypotheses of a source. A source
    of S tokens is done once it has `beam` finished ones, or at 1.2 S + 10 tokens. Keys, values and what routers carry
    are cached.
    """
    batch, device = len(source), source.device
    sizes = (source >= 0).sum(1).tolist()
    limits = [min(int(LONGER * size) + MORE, model.config.max_length) for size in sizes]
    keys, mask = model.encode(source)
    keys = tuple(each.repeat_interleave(beam, 0) for each in keys)
    mask = mask.repeat_interleave(beam, 0)
    tokens = torch.full((batch * beam, 1), START, device=device)
    scores = torch.full((batch, beam), -torch.inf, device=device)
    scores[:, 0] = 0.0  # all rows of a source begin alike
    written = torch.zeros(batch * beam, 0, dtype=torch.long, device=device)
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    memory: Memory | None = None
    for length in range(1, max(limits) + 1):
        logits, memory = model.decode(tokens, keys, mask, memory)
        logs = torch.log_softmax(logits[:, -1].float(), -1).view(batch, beam, -1)
        every = (scores[..., None] + logs).flatten(1)
        best = every.topk(2 * beam, 1)
        rows, words = best.indices // logs.shape[2], best.indices % logs.shape[2]
        kept_rows, kept_words, kept_scores = [], [], []
        for place in range(batch):
            kept: list[tuple[float, int, int]] = []
            for rank, (score, row, word) in enumerate(
                zip(best.values[place].tolist(), rows[place].tolist(), words[place].tolist(), strict=True)
            ):
                if word == END:
                    if rank < beam and len(finished[place]) < beam:
                        text = written[place * beam + row].tolist()
                        finished[place].append((score / length**LENGTH_PENALTY, text))
                elif len(kept) < beam:
                    kept.append((score, row, word))
            kept_scores.append([score for score, _, _ in kept])
            kept_rows.append([place * beam + row for _, row, _ in kept])
            kept_words.append([word for _, _, word in kept])
        order = torch.tensor(kept_rows, device=device).flatten()
        tokens = torch.tensor(kept_words, device=device).view(-1, 1)
        scores = torch.tensor(kept_scores, device=device)
        written = torch.cat([written[order], tokens], 1)
        memory = memory.map(lambda tensor, order=order: tensor[order])  # type: ignore[misc]
        for place, found in enumerate(finished):
            if length == limits[place] and len(found) < beam:
                last = written[place * beam : (place + 1) * beam].tolist()
                divisor = length**LENGTH_PENALTY
                found += [(score / divisor, text) for score, text in zip(kept_scores[place], last, strict=True)]
        if all(len(found) >= beam for found in finished):
            break
    return [max(found, key=lambda one: one[0])[1] for found in finished]


def scorers() -> tuple[Any, Any]:
    """BLEU and chrF."""
    with needing("BLEU needs sacrebleu", "translate"):
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    return BLEU(), CHRF()
