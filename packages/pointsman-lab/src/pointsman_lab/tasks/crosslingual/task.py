"""XTREME's tasks: an encoder is fine-tuned on English and judged in every language with the same weights."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.data.pieces import Pieces
from pointsman_lab.data.task_streams import Encoded, TaskStream, eval_batches
from pointsman_lab.evaluation.passes import EvaluationContext, Pass, evaluated
from pointsman_lab.finetuning.settings import Defaults, Finetuning
from pointsman_lab.finetuning.task import FineTuning
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.tasks.crosslingual.data import XtremeData, floors, groups_of, load_xtreme, original
from pointsman_lab.tasks.crosslingual.evaluation import TestPart, features, nats_of, predicted, table
from pointsman_lab.tasks.crosslingual.formats import Question, Tagged
from pointsman_lab.tasks.crosslingual.scores import Prediction, Score, metric_of, score
from pointsman_lab.tasks.crosslingual.xtreme import XTREME, Item
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import Objective, class_loss, logits_alone, objective_of
from pointsman_lab.training.task import Batches, shown_k

NEVER = -1e4
"""The logit of a place in the padding: as good as minus infinity, without its nan in differences."""


class TokenClassifier(Classifier):
    """A model whose hidden states are classified one by one, by a linear map.

    Args:
        spans: classify the places instead: logits of the first and of the last piece (C = 2).
    """

    def __init__(self, config: ModelConfig, num_classes: int, *, spans: bool = False, **head: Any) -> None:
        super().__init__(config, num_classes, project=False, **head)
        self.spans = spans

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, C]; of spans [B, 2, T], over the places of a text."""
        mask = tokens >= 0
        hidden, _ = self.backbone.encode(tokens.clamp_min(0), padding_mask=mask)
        logits: Tensor = self.head(hidden)
        return logits.masked_fill(~mask[..., None], NEVER).transpose(1, 2) if self.spans else logits


class CrossLingual(FineTuning):
    """Learns a task from its English rows."""

    data: XtremeData
    vocabulary: Pieces

    def __init__(
        self, data: XtremeData, settings: Finetuning, vocabulary: Any, weights: Mapping[str, Tensor] | None
    ) -> None:
        super().__init__(data, settings, vocabulary, weights)
        self._classes = {label: place for place, label in enumerate(data.classes)}
        self._parts: dict[tuple[str, int, int | None], dict[str, TestPart]] = {}
        self._kept: dict[int, dict[str, list[Prediction]]] = {}
        self._scored: tuple[str, dict[str, TestPart]] = ("", {})

    @classmethod
    def read(cls, spec: str) -> XtremeData:
        return load_xtreme(spec, data_folder())

    @classmethod
    def defaults(cls, name: str) -> Defaults:
        """Those of XTREME's scripts (Hu et al. 2020): AdamW, linear decay to 0, k as in pre-training.

        The learning rate is one for small encoders, found by trial: XTREME's 2e-5 moves them too little. The preset
        "finetune-xmoe" has the scripts' (2e-5, of questions 3e-5 with 500 steps of warm-up and decay 1e-4), freezes
        routers and experts, and keeps the balance loss at 0.01 (X-MoE, 4.2 and Table 6).
        """
        kind = XTREME[name].kind
        questions = kind == "questions"

        def settings(steps: int, preset: str) -> dict[str, Any]:
            papers = preset == "finetune-xmoe"
            return {
                "lr_schedule": "linear",
                "decay": "decoupled",
                "clip_norm": 1.0,
                "learning_rate": (3e-5 if questions else 2e-5) if papers else 1e-3 if kind == "tags" else 5e-4,
                "warmup_steps": (500 if papers else steps // 10) if questions else 0,
                "weight_decay": 1e-4 if questions else 0.0,
            }

        return Defaults(
            batch_size=32, epochs={"pairs": 5, "tags": 10, "questions": 3}[kind], length=384 if questions else 128,
            train_top_k=None, pooling="first", pools=kind == "pairs", settings=settings,
            presets={"finetune-xmoe": (("router", "experts"), 0.01)},
        )  # fmt: skip

    @classmethod
    def model(cls, config: RunConfig, name: str, classes: int, settings: Finetuning) -> nn.Module:
        kind = XTREME[name.partition(":")[0]].kind
        head: dict[str, Any] = {"dropout": settings.head_dropout, "seed": config.seed}
        if kind == "pairs":
            return Classifier(config.model, classes, pooling=settings.pooled, **head)
        spans = kind == "questions"
        return TokenClassifier(config.model, 2 if spans else classes, spans=spans, **head)

    @cached_property
    def trained(self) -> Callable[[int], Encoded]:
        """Length -> the English rows of the training part."""
        rows = self.data.splits["train"]
        return cache(lambda length: features(rows, self.vocabulary, length, self._classes).encoded)

    def parts(self, config: RunConfig, split: str) -> dict[str, TestPart]:
        """What an evaluation scores: the test part of each language, or English validation rows."""
        if split not in ("valid", "test"):
            raise RunError(f"the task {self.name} has no {split} part: allowed are valid and test")
        key = (split, config.segment_length, config.eval_tokens)
        if key not in self._parts:
            sets = self.data.tests if split == "test" else {"en": self.data.splits[split]}
            groups = self.data.groups if split == "test" else {"en": groups_of(self.data.splits[split])}
            if config.eval_tokens is not None:
                kept = self._within(sets, config.segment_length, max(1, config.eval_tokens // len(sets)))
                sets = {language: [sets[language][place] for place in kept[language]] for language in sets}
                groups = {language: [groups[language][place] for place in kept[language]] for language in sets}
            self._parts[key] = {
                language: self._part(language, items, groups[language], config.segment_length, floor=split == "test")
                for language, items in sets.items()
            }
        return self._parts[key]

    def _within(self, sets: Mapping[str, Sequence[Item]], length: int, budget: int) -> dict[str, list[int]]:
        """Items of at most about `budget` pieces in the first language, their translations in the others."""
        kept: dict[str, list[int]] = {}
        wanted: set[int | str | None] = set()
        for language, items in sets.items():
            same = [place for place, item in enumerate(items) if original(item) in wanted]
            kept[language] = same or features(items, self.vocabulary, length, self._classes).within(budget).tolist()
            wanted = wanted or {original(items[place]) for place in kept[language]} - {None}
        return kept

    def _part(
        self, language: str, items: Sequence[Item], groups: Sequence[str], length: int, *, floor: bool
    ) -> TestPart:
        rows = features(items, self.vocabulary, length, self._classes)
        if not floor:
            return TestPart(items, rows, groups)
        name = self.data.name
        found = floors(name, self.data.splits["train"], items)
        figures = {label: score(name, language, items, given, groups).value for label, given in found.items()}
        return TestPart(items, rows, groups, max(figures.items(), key=lambda figure: figure[1]))

    def remarks(self, config: RunConfig) -> list[str]:
        cut = self.trained(config.segment_length).truncated
        what = {"pairs": "pairs cut", "tags": "words cut", "questions": "passages in several windows"}[self.data.kind]
        return [self.data.description] + ([f"{self.name} train: {cut:,} {what}"] if cut else [])

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        kind = _TagStream if self.data.kind == "tags" else TaskStream
        return kind(self.trained(config.segment_length), config.batch_size, config.seed, device)

    def objective(self, model: Any, config: RunConfig) -> Objective:
        if self.data.kind == "questions" and config.label_smoothing:
            raise RunError(f"label_smoothing={config.label_smoothing}: padding would count on questions; set 0")
        return objective_of(
            model, class_loss, logits_alone, label_smoothing=config.label_smoothing,
            weighted_by_targets=self.data.kind == "tags",
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        """Scores every language at every k.

        Returns:
            For each k: {"split", "top_k", "nats", "metric", what `table` has, "routers"}; figures are shares from 0
            to 1.
        """
        self._kept = {}
        parts, kind, batch_size = self.parts(config, split), self.data.kind, config.eval_batch_size
        self._scored = split, parts
        device = next(model.parameters()).device

        def one_pass(one: Pass) -> dict[str, Any]:
            losses, count = 0.0, 0
            scores: dict[str, Score] = {}
            self._kept[one.top_k] = kept = {}
            for language, part in parts.items():
                outputs: list[Any] = [None] * len(part.rows.encoded)
                for batch in one.read(eval_batches(part.rows.encoded, batch_size, device)):
                    with one.forward((batch.tokens >= 0).reshape(-1)):
                        logits: Tensor = model(batch.tokens)
                    nats, targets = nats_of(logits, batch.labels, kind)
                    losses, count = losses + nats, count + targets
                    for place, row in zip(batch.places, logits.float().cpu().numpy(), strict=True):
                        outputs[place] = row if kind == "questions" else row.argmax(-1)
                kept[language] = predicted(kind, self.data.classes, part, outputs)
                scores[language] = score(self.data.name, language, part.items, kept[language], part.groups)
            figures = {"nats": losses / max(1, count), "metric": metric_of(kind, self.data.name)}
            return {**figures, **table(scores, parts)}

        total = sum(-(-len(part.rows.encoded) // batch_size) for part in parts.values())
        return evaluated(model, top_k, one_pass, split=split, batches=total, how=context)

    def rows(self, config: RunConfig, split: str) -> Mapping[str, Encoded]:
        return {language: part.rows.encoded for language, part in self.parts(config, split).items()}

    scorer = "XTREME's evaluate.py"

    def result_files(self, config: RunConfig) -> dict[str, str]:
        """Predictions at the k of training, else the largest, in the form that XTREME's scorer reads."""
        if not self._kept:
            return {}
        (split, parts), ending = self._scored, "json" if self.data.kind == "questions" else "tsv"
        return {
            f"predictions/{self.name}/{split}-{language}.{ending}": submission(parts[language].items, given)
            for language, given in self._kept[shown_k(config, self._kept)].items()
        }

    def truncated(self, config: RunConfig) -> dict[str, int]:
        return {"train": self.trained(config.segment_length).truncated}

    def read_again(self, config: RunConfig) -> Encoded:
        """Of the first language."""
        return next(iter(self.parts(config, "test").values())).rows.encoded

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        pooling = {} if self.data.kind == "pairs" else {"pooling": "none"}
        return {**super().protocol(config), **pooling, "eval_tokens": config.eval_tokens}


class _TagStream(TaskStream):
    """Batches whose tags are as long as the batch's longest row."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        tokens, tags = super().batch(step)
        return tokens, tags[:, : tokens.shape[1]]


def submission(items: Sequence[Any], predictions: Sequence[Prediction]) -> str:
    """Predictions as XTREME's scorer reads them: a class a line, a tag a line with an empty line after a sentence, or
    JSON of id -> answer."""
    if isinstance(items[0], Question):
        pairs = zip(items, predictions, strict=True)
        return json.dumps({item.id: given for item, given in pairs}, ensure_ascii=False) + "\n"
    if isinstance(items[0], Tagged):
        return "".join("\n".join(given) + "\n\n" for given in predictions)
    return "".join(f"{given}\n" for given in predictions)
