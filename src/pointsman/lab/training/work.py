"""What a run learns and is judged by: the seam between the training loop and language modelling, tasks and the like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pointsman.lab.data import BatchStream, Corpus, Vocabulary
from pointsman.lab.evaluation.language_model import Watch, evaluate
from pointsman.lab.models.transformer_xl import TransformerXL
from pointsman.lab.training.config import RunConfig
from pointsman.lab.training.objectives import Objective, objective_of
from pointsman.lab.training.progress import Stop
from pointsman.lab.training.record import eval_protocol, evaluation_record, still_right


class Stream(Protocol):
    """Training batches as a pure function of the step."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(inputs [B, ...], targets [B, ...]); `accumulation` micro-batches share out B."""

    def is_epoch_start(self, step: int) -> bool:
        """Whether memories must be forgotten before this step."""


@dataclass(frozen=True)
class Parts:
    """What a step of training needs. `tokens`: how many a step sees (on average), for the rate."""

    model: Any
    stream: Stream
    objective: Objective
    tokens: float


@dataclass(frozen=True)
class Around:
    """What surrounds an evaluation: its autocast context, who watches it, and who may stop it (`Stopped` is raised)."""

    precision: AbstractContextManager[Any] | None = None
    watch: Watch | None = None
    stop: Stop | None = None
    phase: str = "evaluate"


class Work(ABC):
    """The work of a run.

    Attributes:
        vocabulary: what the run's token ids stand for.
        fingerprint: of the data; a checkpoint of other data is refused.
        files: name -> JSON of further files of the run directory.
        even: whether all batches, and all full memories, have the same shapes.
    """

    vocabulary: Vocabulary
    fingerprint: str
    files: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    even = False

    def prepared(self, config: RunConfig) -> RunConfig:
        """The settings with what follows from the data."""
        return config.with_vocabulary(self.vocabulary.size)

    @abstractmethod
    def build(self, config: RunConfig, device: torch.device) -> Parts:
        """Model, batches and objective at step 0."""

    @abstractmethod
    def validate(self, model: Any, config: RunConfig, top_k: Sequence[int], around: Around) -> list[dict[str, Any]]:
        """Results on a part that is not the final evaluation's; [] where there is none."""

    @abstractmethod
    def evaluate(self, model: Any, config: RunConfig, around: Around) -> list[dict[str, Any]]:
        """The results of the final evaluation."""

    @abstractmethod
    def record(
        self, model: nn.Module, config: RunConfig, step: int, results: Sequence[Mapping[str, Any]],
        metrics: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        """The content of evaluation.json."""

    @abstractmethod
    def still_right(self, record: Mapping[str, Any], config: RunConfig) -> bool:
        """Whether evaluation.json is what these settings ask for."""


class LanguageModelling(Work):
    """Predicting the next token of a corpus."""

    even = True

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.vocabulary = corpus.vocabulary
        self.fingerprint = corpus.fingerprint

    def build(self, config: RunConfig, device: torch.device) -> Parts:
        model = TransformerXL(config.model).to(device)
        stream = BatchStream(self.corpus.split("train"), config.batch_size, config.segment_length, device)
        return Parts(model, stream, objective_of(model), config.batch_size * config.segment_length)

    def validate(self, model: Any, config: RunConfig, top_k: Sequence[int], around: Around) -> list[dict[str, Any]]:
        if "valid" not in self.corpus.splits:
            return []
        return self._evaluate(model, config, "valid", top_k, config.valid_tokens, around, routing=False)

    def evaluate(self, model: Any, config: RunConfig, around: Around) -> list[dict[str, Any]]:
        return self._evaluate(
            model, config, config.eval_split, config.eval_top_k, config.eval_tokens, around, routing=True
        )

    def _evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], tokens: int | None, around: Around, *,
        routing: bool,
    ) -> list[dict[str, Any]]:  # fmt: skip
        return evaluate(
            model,
            self.corpus.split(split),
            self.vocabulary.level,
            split=split,
            top_k=top_k,
            protocol=eval_protocol(config, tokens),
            routing=routing,
            precision=around.precision,
            watch=around.watch,
            phase=around.phase,
            stop=around.stop,
        )

    def record(
        self, model: nn.Module, config: RunConfig, step: int, results: Sequence[Mapping[str, Any]],
        metrics: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        return evaluation_record(config, step, self.corpus, model, results, metrics)

    def still_right(self, record: Mapping[str, Any], config: RunConfig) -> bool:
        return still_right(record, config)
