"""Accuracy of an image classifier at any k, and what its routers did meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ranks import ALONE, Ranks
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, Pass, draws, evaluated
from pointsman_lab.tasks.images.augment import evaluation_batches
from pointsman_lab.tasks.images.image_set import ImagePart
from pointsman_lab.tasks.images.vit import VisionTransformer

TOP_5_FROM = 50  # classes from which top-5 accuracy is reported


def image_nats(logits: Tensor, labels: Tensor, loss: str) -> Tensor:
    """Nats of each image: logits [B, C], labels [B, C] as probabilities -> [B].

    Args:
        loss: "softmax", the cross-entropy, or "sigmoid", the sum of C binary cross-entropies.
    """
    if loss == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(-1)
    return -(labels * logits.log_softmax(-1)).sum(-1)


HEADER = "label,prediction,confidence\n"


def predictions(logits: Tensor, labels: Tensor) -> str:
    """Logits [B, C], labels [B] -> a line an image: its class, the one found, and that one's probability."""
    most, found = logits.softmax(-1).max(-1)
    rows = zip(labels.tolist(), found.tolist(), most.tolist(), strict=True)
    return "".join(f"{label},{best},{confidence!r}\n" for label, best, confidence in rows)


@torch.no_grad()
def evaluate_images(
    model: VisionTransformer,
    part: ImagePart,
    *,
    split: str,
    top_k: Sequence[int],
    batch_size: int,
    budget: int | None = None,
    how: EvaluationContext = PLAIN,
    keep: dict[int, str] | None = None,
) -> list[dict[str, Any]]:
    """Classifies every image at every k of `top_k`.

    Returns:
        For each k: {"split", "top_k", "nats", "metric": "accuracy", "value", "images", "tokens", "per_class",
        "routers"}: `value` is the share of images whose class was found (0 to 1), `per_class` that of each class (None
        without images), `nats` the mean of `image_nats`. With at least 50 classes also "top5".
    """
    images = len(part) if budget is None else min(budget, len(part))
    ranks = ALONE if draws(model) else how.ranks

    def one_pass(one: Pass) -> dict[str, Any]:
        scores = _Scores(model.config.num_classes, model.config.loss)
        seen = []
        for (inputs, labels), counts in one.share(_batches(model, part, batch_size, budget)):
            with one.forward(counts=counts):
                logits = model(inputs)
            if counts:
                scores.update(logits.cpu(), labels)
                seen.append(predictions(logits.double().cpu(), labels) if keep is not None else "")
        if keep is not None:
            keep[one.top_k] = "".join(seen)
        scores.gather(ranks)
        figures = scores.result()
        return {**figures, "tokens": figures["images"] * model.config.tokens}

    return evaluated(model, top_k, one_pass, split=split, batches=-(-images // batch_size), how=how, ranks=ranks)


def _batches(
    model: VisionTransformer, part: ImagePart, batch_size: int, budget: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    device = next(model.parameters()).device
    return ((images.to(device), labels) for images, labels in evaluation_batches(part, batch_size, budget))


class _Scores:
    """Sums over the images of an evaluation."""

    def __init__(self, classes: int, loss: str) -> None:
        self.loss, self.nats, self.among_five = loss, 0.0, 0
        self.right = torch.zeros(classes, dtype=torch.int64)
        self.count = torch.zeros(classes, dtype=torch.int64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """logits [B, C], labels [B] int64."""
        logits, classes = logits.double(), len(self.count)
        self.nats += float(image_nats(logits, F.one_hot(labels, classes).double(), self.loss).sum())
        found = logits.argmax(-1) == labels
        self.right += torch.bincount(labels[found], minlength=classes)
        self.count += torch.bincount(labels, minlength=classes)
        if classes >= TOP_5_FROM:
            self.among_five += int((logits.topk(5).indices == labels[:, None]).sum())

    def gather(self, ranks: Ranks) -> None:
        """Adds what the other ranks have scored."""
        sums = torch.tensor([self.nats, float(self.among_five)], dtype=torch.float64)
        (self.nats, five), self.right, self.count = ranks.total(sums, self.right, self.count)
        self.nats, self.among_five = float(self.nats), int(five)

    def result(self) -> dict[str, Any]:
        images = int(self.count.sum())
        shares = [int(r) / int(c) if c else None for r, c in zip(self.right, self.count, strict=True)]
        result = {"nats": self.nats / images, "metric": "accuracy", "value": int(self.right.sum()) / images}
        if len(self.count) >= TOP_5_FROM:
            result["top5"] = self.among_five / images
        return {**result, "images": images, "per_class": shares}
