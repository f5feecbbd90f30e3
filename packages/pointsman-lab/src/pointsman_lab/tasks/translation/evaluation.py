"""Translations by greedy and beam search, and their BLEU and chrF by sacrebleu, at any k.

Shapes: B sources, R rows of hypotheses, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointsman._errors import needing
from pointsman_lab.data.pieces import END, START, Pieces
from pointsman_lab.data.task_streams import PADDING
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, Pass, evaluated
from pointsman_lab.models.memory import Memory
from pointsman_lab.tasks.translation.data import Pairs, ids_of
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


def padded(rows: Sequence[Any]) -> Tensor:
    """Rows of ids as [B, longest], padded with -1."""
    made = np.full((len(rows), max(map(len, rows))), PADDING, dtype=np.int64)
    for place, row in enumerate(rows):
        made[place, : len(row)] = row
    return torch.from_numpy(made)


@torch.no_grad()
def evaluate_translation(
    model: Translator,
    pieces: Pieces,
    parts: Mapping[str, Pairs],
    *,
    split: str,
    top_k: Sequence[int],
    beam: int,
    length: int,
    batch_size: int,
    how: EvaluationContext = PLAIN,
    keep: dict[int, dict[str, list[str]]] | None = None,
) -> list[dict[str, Any]]:
    """Translates every part and scores it at every k.

    Returns:
        For each k: {"split", "top_k", "nats": None, "metric": "bleu", "tokens": pieces of the sources, "value": mean
        over source languages, "chrf", "signature", "languages": {language: {"value", "chrf", "sentences"}},
        "routers": of the encoder's side}.
    """
    metrics = _metrics()
    device = next(model.parameters()).device

    def one_pass(one: Pass) -> dict[str, Any]:
        languages: dict[str, dict[str, Any]] = {}
        kept: dict[str, list[str]] = {}
        read = 0
        for language, pairs in parts.items():
            sources = [ids_of(each, pieces, length) for each, _ in pairs]
            read += sum(map(len, sources))
            order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
            kept[language] = found = [""] * len(pairs)
            for start in one.read(range(0, len(order), batch_size)):
                places = order[start : start + batch_size]
                source = padded([sources[place] for place in places]).to(device)
                if one.summary:
                    with one.forward():
                        model.encode(source)
                with one.forward(counts=False):
                    for place, ids in zip(places, search(model, source, beam), strict=True):
                        found[place] = pieces.decode(ids)
            references = [[other for _, other in pairs]]
            bleu, chrf = (metric.corpus_score(found, references).score for metric in metrics)
            languages[language] = {"value": bleu, "chrf": chrf, "sentences": len(pairs)}
        if keep is not None:
            keep[one.top_k] = kept
        means = {key: float(np.mean([each[key] for each in languages.values()])) for key in ("value", "chrf")}
        signature = [str(metric.get_signature()) for metric in metrics]
        return {"nats": None, "metric": "bleu", "tokens": read, **means, "signature": signature, "languages": languages}

    total = sum(-(-len(pairs) // batch_size) for pairs in parts.values())
    return evaluated(model, top_k, one_pass, split=split, batches=total, how=how)


def _metrics() -> tuple[Any, Any]:
    with needing("BLEU needs sacrebleu", "translate"):
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    return BLEU(), CHRF()
