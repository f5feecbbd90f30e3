"""A fine-tuned encoder on the test parts of every language, with the same weights, at any k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman_lab.data.streams import IGNORE
from pointsman_lab.data.task_streams import eval_batches
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, Pass, evaluated
from pointsman_lab.tasks.crosslingual.features import Features, answer
from pointsman_lab.tasks.crosslingual.formats import Question
from pointsman_lab.tasks.crosslingual.scores import Prediction, Score, mean_error, metric_of, score
from pointsman_lab.tasks.crosslingual.xtreme import Item


@dataclass(frozen=True)
class TestPart:
    """The test part of one language."""

    items: Sequence[Item]
    rows: Features
    groups: Sequence[str]
    floor: tuple[str, float] | None = None


@torch.no_grad()
def evaluate_languages(
    model: nn.Module,
    name: str,
    kind: str,
    classes: Sequence[str],
    parts: Mapping[str, TestPart],
    *,
    split: str,
    top_k: Sequence[int],
    batch_size: int,
    how: EvaluationContext = PLAIN,
    keep: dict[int, dict[str, list[Prediction]]] | None = None,
) -> list[dict[str, Any]]:
    """Scores every language at every k.

    Returns:
        For each k: {"split", "top_k", "nats", "metric", "value": the mean over languages, "error": its standard error,
        "transfer": the mean without English, "gap": English minus it, "exact_match" of questions and "f1_xtreme" of
        udpos (means over languages), "languages": {language: {"value", "error", "items", "unknown", "floor",
        "floor_name", further figures}}, "routers"}; figures
        are shares from 0 to 1.
    """
    device = next(model.parameters()).device

    def one_pass(one: Pass) -> dict[str, Any]:
        losses, count = 0.0, 0
        scores: dict[str, Score] = {}
        kept: dict[str, list[Prediction]] = {}
        for language, part in parts.items():
            outputs: list[Any] = [None] * len(part.rows.encoded)
            for batch in one.read(eval_batches(part.rows.encoded, batch_size, device)):
                with one.forward((batch.tokens >= 0).reshape(-1)):
                    logits: Tensor = model(batch.tokens)
                nats, targets = _nats(logits, batch.labels, kind)
                losses, count = losses + nats, count + targets
                for place, row in zip(batch.places, logits.float().cpu().numpy(), strict=True):
                    outputs[place] = row if kind == "questions" else row.argmax(-1)
            if kind == "questions":
                kept[language] = _answers(part, outputs)
            else:
                kept[language] = _predictions(kind, classes, part, outputs)
            scores[language] = score(name, language, part.items, kept[language], part.groups)
        if keep is not None:
            keep[one.top_k] = kept
        return {"nats": losses / max(1, count), "metric": metric_of(kind, name), **_table(scores, parts)}

    total = sum(-(-len(part.rows.encoded) // batch_size) for part in parts.values())
    return evaluated(model, top_k, one_pass, split=split, batches=total, how=how)


def _nats(logits: Tensor, labels: Tensor, kind: str) -> tuple[float, int]:
    labels = labels[:, : logits.shape[1]] if kind == "tags" else labels
    logits, labels = logits.double().reshape(-1, logits.shape[-1]), labels.reshape(-1)
    nats = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    return float(nats), int((labels != IGNORE).sum())


def _predictions(kind: str, classes: Sequence[str], part: TestPart, outputs: Sequence[Any]) -> list[Prediction]:
    """Of each item its class, or its words' tags."""
    if kind == "pairs":
        return [classes[int(output)] for output in outputs]
    rows = _rows(part)
    return [
        [classes[int(tag)] for row in rows[item] for tag in outputs[row][part.rows.words[row]]]
        for item in range(len(part.items))
    ]


def _answers(part: TestPart, outputs: Sequence[Any]) -> list[Prediction]:
    """The best answer to each question."""
    rows = _rows(part)
    found: list[Prediction] = []
    for place, item in enumerate(part.items):
        assert isinstance(item, Question)
        found.append(answer(item, [(outputs[row], part.rows.offsets[row]) for row in rows[place]]))
    return found


def _rows(part: TestPart) -> dict[int, list[int]]:
    """Item -> its rows."""
    rows: dict[int, list[int]] = {}
    for row, item in enumerate(part.rows.items.tolist()):
        rows.setdefault(item, []).append(row)
    return rows


def _table(scores: Mapping[str, Score], parts: Mapping[str, TestPart]) -> dict[str, Any]:
    languages: dict[str, dict[str, Any]] = {}
    for language, each in scores.items():
        part = parts[language]
        encoded = part.rows.encoded
        pieces = sum(map(len, encoded.rows))
        languages[language] = {"value": each.value, "error": each.error, "items": len(part.items),
                               "unknown": encoded.unknown / max(1, pieces), **each.others}  # fmt: skip
        if part.floor:
            languages[language] |= {"floor_name": part.floor[0], "floor": part.floor[1]}
    others = [each.value for language, each in scores.items() if language != "en"]
    transfer = float(np.mean(others)) if others else None
    english = scores["en"].value if "en" in scores else None
    first = next(iter(scores.values())).others
    shown = {"exact": "exact_match", "f1_xtreme": "f1_xtreme"}
    return {
        **{shown[key]: float(np.mean([each.others[key] for each in scores.values()])) for key in first if key in shown},
        "value": float(np.mean([each.value for each in scores.values()])),
        "error": mean_error(list(scores.values())),
        "transfer": transfer,
        "gap": english - transfer if english is not None and transfer is not None else None,
        "languages": languages,
    }
