"""Accuracy of a classifier at any k, and what its routers did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.control import set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.lab.data.task_streams import Encoded, eval_batches
from pointsman.lab.evaluation.language_model import eval_top_k
from pointsman.lab.evaluation.routing import RoutingSummary
from pointsman.lab.models.classifier import Classifier
from pointsman.lab.progress import Progress, Stop, check_stop


@torch.no_grad()
def evaluate_task(
    model: Classifier,
    encoded: Encoded,
    *,
    split: str,
    top_k: Sequence[int],
    batch_size: int = 32,
    seed: int = 0,
    routing: bool = True,
    precision: AbstractContextManager[Any] | None = None,
    progress: Progress | None = None,
    phase: str = "evaluate",
    stop: Stop | None = None,
) -> list[dict[str, Any]]:
    """Classifies every example at every k of `top_k`.

    Args:
        encoded: the examples, in the model's vocabulary.
        split: name of the part, for the record.
        top_k: k values; of a model without routers one result comes back, with the number of experts as its k.
        batch_size: texts side by side; padding is left out of everything, so it changes no figure but by rounding.
        seed: of routers that draw at random in evaluation.
        routing: whether entropies and loads are gathered.
        precision: an autocast context.
        progress: a display, in batches over all k values.
        stop: asks the evaluation to stop.

    Returns:
        For each k: {"split", "top_k", "nats", "metric": "accuracy", "value", "examples", "tokens", "routers"}: `value`
        is the share of examples whose class was found (0 to 1), `nats` the mean cross-entropy of their labels, and
        `routers` as of `evaluate`.

    Raises:
        RunError: a k outside 1 … N.
        Stopped: `stop` was set; nothing is saved.
    """
    device = next(model.parameters()).device
    values = eval_top_k(model, top_k)
    batches = -(-len(encoded) // batch_size)
    if progress:
        progress.phase(phase, batches * len(values))
    results = []
    with evaluating(model, seed):
        for index, k in enumerate(values):
            summary = RoutingSummary(model) if routing else None
            right, nats, tokens = 0, 0.0, 0
            with set_top_k(model, k) if k else nullcontext():
                for number, batch in enumerate(eval_batches(encoded, batch_size, device), 1):
                    check_stop(stop)
                    if summary:
                        summary.mask = (batch.tokens >= 0).reshape(-1)
                    with precision or nullcontext(), summary.watch(model) if summary else nullcontext():
                        logits: Tensor = model(batch.tokens)
                    nats += float(F.cross_entropy(logits.double(), batch.labels, reduction="sum"))
                    right += int((logits.argmax(-1) == batch.labels).sum())
                    tokens += batch.num_tokens
                    if progress:
                        progress.advance(index * batches + number, {})
            result: dict[str, Any] = {
                "split": split,
                "top_k": k or model.config.num_experts,
                "nats": nats / len(encoded),
                "metric": "accuracy",
                "value": right / len(encoded),
                "examples": len(encoded),
                "tokens": tokens,
            }
            results.append(result | ({"routers": summary.result()} if summary else {}))
    return results
