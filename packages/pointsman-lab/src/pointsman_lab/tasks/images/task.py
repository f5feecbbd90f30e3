"""Image classification: a vision transformer learns the classes of images, judged by accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.data.download import DataProgress
from pointsman_lab.evaluation.diagnose import Batch
from pointsman_lab.evaluation.passes import EvaluationContext, Pass, draws, evaluated
from pointsman_lab.runs.paths import slug
from pointsman_lab.tasks.images.augment import Augmentation, ImageStream, evaluation_batches
from pointsman_lab.tasks.images.image_set import ClassNames, ImageSet, load_images
from pointsman_lab.tasks.images.vit import VisionTransformerConfig
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.objectives import Loss, Objective, Outcome, logits_alone, objective_of
from pointsman_lab.training.task import Batches, Observed, Task, shown_k

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


class _Scores:
    """Sums over the images of an evaluation."""

    def __init__(self, classes: int, loss: str) -> None:
        self.loss = loss
        self.sums = torch.zeros(2, dtype=torch.float64)  # nats, and images whose class is among the first five
        self.right, self.count = torch.zeros(2, classes, dtype=torch.int64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """logits [B, C], labels [B] int64."""
        logits, classes = logits.double(), len(self.count)
        self.sums[0] += image_nats(logits, F.one_hot(labels, classes).double(), self.loss).sum()
        found = logits.argmax(-1) == labels
        self.right += torch.bincount(labels[found], minlength=classes)
        self.count += torch.bincount(labels, minlength=classes)
        if classes >= TOP_5_FROM:
            self.sums[1] += (logits.topk(5).indices == labels[:, None]).sum()

    def gather(self, ranks: Ranks) -> None:
        self.sums, self.right, self.count = ranks.total(self.sums, self.right, self.count)

    def result(self) -> dict[str, Any]:
        images, (nats, among_five) = int(self.count.sum()), self.sums.tolist()
        shares = [int(r) / int(c) if c else None for r, c in zip(self.right, self.count, strict=True)]
        result = {"nats": nats / images, "metric": "accuracy", "value": int(self.right.sum()) / images}
        if len(self.count) >= TOP_5_FROM:
            result["top5"] = among_five / images
        return {**result, "images": images, "per_class": shares}


def open_images(spec: str) -> ImageSet:
    """`load_images` with the folder that POINTSMAN_DATA names."""
    return load_images(spec, data_dir=data_folder())


class ImageClassification(Task):
    """Learns the classes of a set of images."""

    vocabulary: ClassNames
    scorer = "calibration_tools.py of natural-adv-examples"

    def __init__(self, images: ImageSet, vocabulary: ClassNames | None = None) -> None:
        self.images = images if vocabulary is None else images.relabelled(vocabulary.names)
        self.vocabulary = ClassNames(self.images.classes)
        self.name = images.name
        self.fingerprint = images.fingerprint
        self.whole = "train" in images.splits
        self._split, self._kept = "test", dict[int, str]()

    @classmethod
    def open(
        cls, config: RunConfig, progress: DataProgress | None = None, vocabulary: ClassNames | None = None
    ) -> ImageClassification:
        return cls(open_images(config.data), vocabulary)

    def prepared(self, config: RunConfig) -> RunConfig:
        model = replace(_shape(config), image_size=self.images.side, num_classes=self.vocabulary.size)
        return replace(config, model=model)

    def check(self, config: RunConfig) -> None:
        prepared = self.prepared(config)
        if self.vocabulary.size < 2:
            raise RunError(f"{self.name} has one class, {self.vocabulary.names[0]!r}; at least two are needed")
        try:
            self.tokens(prepared)
        except ValueError as error:
            raise RunError(str(error)) from None
        self.batches(prepared, torch.device("cpu")).batch(0)
        self.images.split(config.eval_split)

    def tokens(self, config: RunConfig) -> int:
        return _shape(config).tokens

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        part, augmentation = self.images.split("train"), Augmentation.parse(config.own["augment"])
        return ImageStream(
            part, config.batch_size, self.vocabulary.size, augmentation, config.seed, self.tokens(config), device
        )

    def objective(self, model: Any, config: RunConfig) -> Objective:
        kind = _shape(config).loss
        if kind == "sigmoid" and config.label_smoothing:
            raise RunError(f"label_smoothing={config.label_smoothing}: model.loss=sigmoid has none; set 0")
        objective = objective_of(model, image_loss(kind), logits_alone, label_smoothing=config.label_smoothing)
        if kind == "sigmoid" and objective.name != "plain":
            raise RunError("model.loss=sigmoid: the consistency of two passes (thor) is of model.loss=softmax")
        return objective

    def validation_split(self, config: RunConfig) -> str | None:
        return "valid" if "valid" in self.images.splits else None

    @torch.no_grad()
    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        """Classifies every image at every k of `top_k`.

        Returns:
            For each k: {"split", "top_k", "nats", "metric": "accuracy", "value", "images", "tokens", "per_class",
            "routers"}: `value` is the share of images whose class was found (0 to 1), `per_class` that of each class
            (None without images), `nats` the mean of `image_nats`. With at least 50 classes also "top5".
        """
        self._split, part, batch_size = split, self.images.split(split), config.eval_batch_size
        budget = self.budget(config, config.eval_tokens if context.final else config.valid_tokens)
        images = len(part) if budget is None else min(budget, len(part))
        ranks = ALONE if draws(model) else context.ranks
        device = next(model.parameters()).device

        def one_pass(one: Pass) -> dict[str, Any]:
            scores = _Scores(model.config.num_classes, model.config.loss)
            seen = []
            for (inputs, labels), counts in one.share(evaluation_batches(part, batch_size, budget)):
                with one.forward(counts=counts):
                    logits = model(inputs.to(device))
                if counts:
                    scores.update(logits.cpu(), labels)
                    seen.append(predictions(logits.double().cpu(), labels) if self.keeps else "")
            if self.keeps:
                self._kept[one.top_k] = "".join(seen)
            scores.gather(ranks)
            figures = scores.result()
            return {**figures, "tokens": figures["images"] * model.config.tokens}

        batches = -(-images // batch_size)
        return evaluated(model, top_k, one_pass, split=split, batches=batches, how=context, ranks=ranks)

    def result_files(self, config: RunConfig) -> Mapping[str, str]:
        """Class, prediction and confidence of every image at the k of training, if they were kept."""
        name = f"predictions/{slug(self.name)}/{self._split}.csv"
        return {name: HEADER + self._kept[shown_k(config, self._kept)]} if self._kept else {}

    def budget(self, config: RunConfig, tokens: int | None) -> int | None:
        """How many images have so many tokens; at least one."""
        return None if tokens is None else max(1, tokens // self.tokens(config))

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        return {
            "split": config.eval_split,
            "images": self.budget(config, config.eval_tokens),
            "batch_size": config.eval_batch_size,
            "augment": config.own["augment"],
            "checkpoint_rule": "the last step",
        }

    def observed(self, config: RunConfig, split: str, tokens: int | None, device: torch.device) -> Observed:
        """Whole images, evenly spaced; the ids of an image's tokens are its class."""
        part, each = self.images.split(split), self.tokens(config)
        count = len(part) if tokens is None else min(self.budget(config, tokens) or 1, len(part))
        kind, classes = _shape(config).loss, self.vocabulary.size

        def batches() -> Iterator[Batch]:
            for images, labels in evaluation_batches(part, config.eval_batch_size, count):
                ids = labels[:, None].expand(-1, each)
                yield Batch(images.to(device), labels.to(device), token_ids=ids.to(device))

        def read(model: nn.Module, batch: Batch) -> Tensor:
            assert batch.targets is not None
            with autocast(config, device):
                logits = model(batch.inputs)
            return image_nats(logits.float(), F.one_hot(batch.targets, classes).float(), kind).sum()

        protocol = {"data": self.images.description, "split": split, "images": count, "tokens": count * each}
        return Observed(batches(), -(-count // config.eval_batch_size), lambda: read, protocol)

    def description(self) -> dict[str, Any]:
        return {"data": self.images.description}


def image_loss(kind: str) -> Loss:
    """Mean of `image_nats`."""

    def loss(model: Any, inputs: Tensor, labels: Tensor, memory: object, length: int) -> Outcome:
        nats = image_nats(model(inputs).float(), labels, kind).mean()
        return Outcome(nats, nats.detach(), None)

    return loss


def _shape(config: RunConfig) -> VisionTransformerConfig:
    assert isinstance(config.model, VisionTransformerConfig)
    return config.model
