"""Accuracy of a classifier at any k, and what its routers did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman_lab.data.task_streams import Encoded, eval_batches
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, Pass, evaluated
from pointsman_lab.models.classifier import Classifier


@torch.no_grad()
def evaluate_task(
    model: Classifier,
    encoded: Encoded,
    *,
    split: str,
    top_k: Sequence[int],
    batch_size: int = 32,
    how: EvaluationContext = PLAIN,
) -> list[dict[str, Any]]:
    """Classifies every example at every k of `top_k`.

    Args:
        encoded: the examples, in the model's vocabulary.
        batch_size: texts side by side; padding is left out of everything, so it changes no figure but by rounding.
        split, top_k, how: as of `passes.evaluated`, also for errors.

    Returns:
        For each k: {"split", "top_k", "nats", "metric": "accuracy", "value", "examples", "tokens", "routers"}: `value`
        is the share of examples whose class was found (0 to 1), `nats` the mean cross-entropy of their labels.
    """
    device = next(model.parameters()).device

    def one_pass(one: Pass) -> dict[str, Any]:
        right, nats, tokens = 0, 0.0, 0
        for batch in one.read(eval_batches(encoded, batch_size, device)):
            with one.forward((batch.tokens >= 0).reshape(-1)):
                logits: Tensor = model(batch.tokens)
            nats += float(F.cross_entropy(logits.double(), batch.labels, reduction="sum"))
            right += int((logits.argmax(-1) == batch.labels).sum())
            tokens += batch.num_tokens
        count = len(encoded)
        figures = {"nats": nats / count, "metric": "accuracy", "value": right / count}
        return {**figures, "examples": count, "tokens": tokens}

    return evaluated(model, top_k, one_pass, split=split, batches=-(-len(encoded) // batch_size), how=how)
