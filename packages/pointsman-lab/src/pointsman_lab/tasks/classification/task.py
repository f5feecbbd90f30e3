"""Classification of texts: examples as token ids, and the task that a pre-trained language model learns."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.data.task_streams import Encoded, TaskStream, drawn_within, eval_batches
from pointsman_lab.data.vocabulary import IdArray, Vocabulary
from pointsman_lab.evaluation.passes import EvaluationContext, Pass, evaluated
from pointsman_lab.finetuning.settings import Defaults, Finetuning
from pointsman_lab.finetuning.task import FineTuning
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.tasks.classification.data import Examples, LabelledTexts, find_task, load_task, parse_task
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import Objective, class_loss, logits_alone, objective_of
from pointsman_lab.training.task import Batches


class Classification(FineTuning):
    """Learns to classify texts."""

    data: LabelledTexts
    vocabulary: Vocabulary

    @classmethod
    def find(cls, spec: str) -> None:
        find_task(spec, data_dir=data_folder())

    @classmethod
    def read(cls, spec: str) -> LabelledTexts:
        return load_task(spec, data_dir=data_folder())

    @classmethod
    def path(cls, spec: str) -> str:
        return parse_task(spec)[0]

    @classmethod
    def defaults(cls, name: str) -> Defaults:
        """HyperRouter's (Section 4.1, Table A2): all experts chosen, length 512, batch 16 (IMDB: 4), 3 epochs
        (BANKING77: 15)."""
        return Defaults(batch_size=4 if name == "imdb" else 16, epochs=15 if name == "banking77" else 3)

    @classmethod
    def model(cls, config: RunConfig, name: str, classes: int, settings: Finetuning) -> Classifier:
        return Classifier(
            config.model, classes, pooling=settings.pooled, dropout=settings.head_dropout, seed=config.seed
        )

    @cached_property
    def encoded(self) -> Callable[[str, int], Encoded]:
        """(part, length) -> its examples, cut to so many tokens."""
        return cache(lambda split, length: encode_examples(self.data.splits[split], self.vocabulary, length))

    def scored(self, split: str, config: RunConfig) -> Encoded:
        """The examples of a part that an evaluation reads: all, or what `eval_tokens` allows."""
        encoded = self.encoded(split, config.segment_length)
        if config.eval_tokens is None:
            return encoded
        return encoded.take(drawn_within([len(row) for row in encoded.rows], config.eval_tokens))

    def remarks(self, config: RunConfig) -> list[str]:
        data, found = self.data, []
        for split in ("train", self.reported):
            encoded, of = self.encoded(split, config.segment_length), f"{data.name} {split}:"
            if cut := encoded.truncated:
                found.append(f"{of} {cut:,} of {len(encoded):,} texts cut to {config.segment_length} tokens")
            if encoded.unknown:
                found.append(f"{of} {encoded.unknown:,} tokens of the texts are not in the run's vocabulary")
        if scored := self.protocol(config).get("scored"):
            found.append(f"{data.name} {self.reported}: accuracy is that of {scored}")
        return found

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        return TaskStream(self.encoded("train", config.segment_length), config.batch_size, config.seed, device)

    def objective(self, model: Any, config: RunConfig) -> Objective:
        return objective_of(model, class_loss, logits_alone, label_smoothing=config.label_smoothing)

    def validation_split(self, config: RunConfig) -> str | None:
        return self.data.watched

    @torch.no_grad()
    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        """Classifies every example at every k of `top_k`.

        Returns:
            For each k: {"split", "top_k", "nats", "metric": "accuracy", "value", "examples", "tokens", "routers"}:
            `value` is the share of examples whose class was found (0 to 1), `nats` the mean cross-entropy of their
            labels.
        """
        self.rows(config, split)  # refuses a part that the task lacks
        self.reported = split if context.final else self.reported
        encoded, batch_size = self.scored(split, config), config.eval_batch_size
        device, count = next(model.parameters()).device, len(encoded)

        def one_pass(one: Pass) -> dict[str, Any]:
            right, nats, tokens = 0, 0.0, 0
            for batch in one.read(eval_batches(encoded, batch_size, device)):
                with one.forward((batch.tokens >= 0).reshape(-1)):
                    logits: Tensor = model(batch.tokens)
                nats += float(F.cross_entropy(logits.double(), batch.labels, reduction="sum"))
                right += int((logits.argmax(-1) == batch.labels).sum())
                tokens += batch.num_tokens
            figures = {"nats": nats / count, "metric": "accuracy", "value": right / count}
            return {**figures, "examples": count, "tokens": tokens}

        return evaluated(model, top_k, one_pass, split=split, batches=-(-count // batch_size), how=context)

    def rows(self, config: RunConfig, split: str) -> Mapping[str, Encoded]:
        if split not in self.data.splits:
            raise RunError(f"the task {self.data.name} has no {split} part; it has: {', '.join(self.data.splits)}")
        return {"": self.scored(split, config)}

    def truncated(self, config: RunConfig) -> dict[str, int]:
        parts = ("train", self.reported)
        return {split: self.encoded(split, config.segment_length).truncated for split in parts}

    def read_again(self, config: RunConfig) -> Encoded:
        return self.encoded(self.reported, config.segment_length)

    def is_current(self, record: Mapping[str, Any] | None, config: RunConfig) -> bool:
        scored = (record or {}).get("protocol", {}).get("scored")
        return super().is_current(record, config) and scored == self.protocol(config).get("scored")

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        read, every = len(self.scored(self.reported, config)), len(self.data.splits[self.reported])
        scored = {} if read == every else {"scored": f"{read:,} of {every:,} texts, drawn with a fixed seed"}
        return {**super().protocol(config), **scored}


def encode_examples(examples: Examples, vocabulary: Vocabulary, max_length: int) -> Encoded:
    """Encodes texts and appends an end mark; a text longer than `max_length` with its mark is truncated at the end.

    A classifier uses the hidden state at the mark (`end_mark`).
    """
    if max_length < 2:
        raise RunError(f"length {max_length}: at least 2 tokens are needed, a text and its end mark")
    mark = end_mark(vocabulary)
    rows, unknown, truncated = [], 0, 0
    for text in examples.texts:
        ids, missed = vocabulary.encode_compact(text)
        unknown += missed
        rows.append(np.concatenate([ids[: max_length - len(mark)], mark]))
        truncated += len(ids) + len(mark) > max_length
        if not len(ids):
            raise RunError(f"the text {text[:40]!r} is empty in this vocabulary")
    return Encoded(tuple(rows), np.array(examples.labels, dtype=np.int64), truncated, unknown)


def end_mark(vocabulary: Vocabulary) -> IdArray:
    """The ids that end a text: a newline (`<eos>` at word level), else a space, else `<unk>`; never none."""
    for text in ("\n", " "):
        ids, missed = vocabulary.encode_compact(text)
        if len(ids) and not missed:
            return ids
    last = vocabulary.unknown_id  # None of bytes, which have a stand-in
    return vocabulary.encode_compact("\n")[0] if last is None else np.array([last], dtype=vocabulary.dtype)
