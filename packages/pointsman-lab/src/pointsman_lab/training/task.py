"""A task: what a run learns and how it is judged. The training loop knows nothing else of data or models."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import check_layers
from pointsman.ranks import Ranks
from pointsman.routers.frame.registry import has_one_k
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.streams import IGNORE
from pointsman_lab.data.vocabulary import Symbols
from pointsman_lab.evaluation.diagnose import Batch, Reader
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.models.config import build_model
from pointsman_lab.models.cost import cost_a_token
from pointsman_lab.registry import trains
from pointsman_lab.runs.record import is_current
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.objectives import Objective


class Batches(Protocol):
    """Training batches as a pure function of the step.

    Attributes:
        tokens_per_step: real tokens of a batch (on average), for the rate.
    """

    @property
    def tokens_per_step(self) -> float: ...

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(inputs [B, ...], targets [B, ...]); B is divided among `accumulation` micro-batches."""

    def is_epoch_start(self, step: int) -> bool:
        """Whether memories must be forgotten before this step."""


@dataclass(frozen=True)
class Observed:
    """What a diagnosis reads.

    Attributes:
        batches: in text order. count: how many.
        reader: creates what runs a model on a batch and returns the sum of nats.
        protocol: which tokens are read.
        groups: names of the batches' groups, by number.
    """

    batches: Iterable[Batch]
    count: int
    reader: Callable[[], Reader]
    protocol: Mapping[str, Any]
    groups: tuple[str, ...] = ()


def target_nats(config: RunConfig, device: torch.device) -> Reader:
    """A reader of models that give logits: the sum of nats of the targets that are not -100."""

    def read(model: nn.Module, batch: Batch) -> Tensor:
        assert batch.targets is not None
        with autocast(config, device):
            logits = model(batch.inputs).float()
        targets = batch.targets if batch.targets.dim() == 1 else batch.targets[:, : logits.shape[1]]
        rows = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(rows, targets.reshape(-1), ignore_index=IGNORE, reduction="sum")

    return read


class Task(ABC):
    """Data, model, objective and metric of a run (in the sense of fairseq's tasks).

    Attributes:
        vocabulary: what the run's token ids stand for.
        name: of the data, for names of files.
        fingerprint: of the data; a checkpoint of other data is refused.
        whole: whether the training part is there; without it the fingerprint is none that a training had.
        files: name -> JSON of further files of the run directory.
        fills_vocabulary: whether every id of a model's vocabulary stands for something.
        fixed_shapes: whether every row of every batch has equally many targets.
        notes: what the user should know of the model that `build_model` made, and of the training batches.
        may_choose: whether the best validation, larger = better, may choose the evaluated weights (`best.Best`).
    """

    vocabulary: Symbols
    name: str = ""
    fingerprint: str
    whole = True
    files: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    fills_vocabulary = False
    fixed_shapes = False
    may_choose = False
    notes: Sequence[str] = ()

    def prepared(self, config: RunConfig) -> RunConfig:
        """The settings with what follows from the data; a model that starts from a folder keeps its size."""
        size, model = self.vocabulary.size, config.model
        if not (folder := config.own.get("start_from")):
            return config.with_vocabulary(size)
        whole = getattr(model, "vocab_size", 0)
        if size > whole or (size < whole and self.fills_vocabulary):
            raise RunError(f"the tokenizer does not fit: it has {size:,} ids, the model in {folder} {whole:,}")
        return config

    @abstractmethod
    def check(self, config: RunConfig) -> None:
        """Refuses data that these settings cannot use, before anything is written."""

    def build_model(self, config: RunConfig) -> Any:
        """The model at step 0."""
        if not config.own.get("start_from"):
            return build_model(config.model)
        model, note = self.started(config)
        self.notes = (note,)
        return model

    def started(self, config: RunConfig) -> tuple[Any, str]:
        """The model with the weights in the folder `start_from`, and a line about them."""
        raise NotImplementedError

    @abstractmethod
    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        """The training batches."""

    @abstractmethod
    def objective(self, model: Any, config: RunConfig) -> Objective:
        """What a step minimises."""

    def validation_split(self, config: RunConfig) -> str | None:
        """The part that is scored during training: never the reported one if there is another; None: there is none."""
        return "valid"

    def reported_split(self, config: RunConfig) -> str:
        """The part of the final evaluation."""
        return config.eval_split

    @abstractmethod
    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        """For each k a result: {"split", "top_k", "nats", "metric", "value", ...}."""

    @abstractmethod
    def protocol(self, config: RunConfig) -> dict[str, Any]:
        """How the figures of the final evaluation came about. Records with another protocol are out of date."""

    def observed(self, config: RunConfig, split: str, tokens: int | None, device: torch.device) -> Observed:
        """What a diagnosis of this task's models reads: about `tokens` tokens of a part, None: all."""
        raise RunError(f"models of the family {config.model.family!r} are not diagnosed")

    def stretch(self, config: RunConfig, tokens: int) -> list[NDArray[np.int64]]:
        """Ids of texts, about `tokens` together, for the page's look at single tokens; a later text may follow."""
        raise RunError(f"models of the family {config.model.family!r} have no page of single tokens")

    def description(self) -> dict[str, Any]:
        """What the record's protocol says besides: words that no figure depends on."""
        return {}

    def further_results(self, model: Any, config: RunConfig) -> dict[str, Any]:
        """Further entries of evaluation.json."""
        return {}

    scorer: str | None = None
    """The official program that reads `result_files`; None: there is none."""
    keeps = False
    """Whether an evaluation keeps the predictions of single examples, where `result_files` has them only if asked."""

    def result_files(self, config: RunConfig) -> Mapping[str, str]:
        """Name -> content of further files of the run directory, after the final evaluation."""
        return {}

    def record(
        self, model: nn.Module, config: RunConfig, step: int, results: Sequence[Mapping[str, Any]],
        metrics: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        """The content of evaluation.json."""
        routers = {id(p): p for _, router in named_routers(model) for p in router.parameters() if p.requires_grad}
        seconds = [row["step_seconds"] for row in metrics if row["kind"] == "train"]
        return {
            "format": 1,
            "checkpoint": f"step-{step}",
            "protocol": {**self.protocol(config), **self.description()},
            "results": list(results),
            "router_parameters": sum(parameter.numel() for parameter in routers.values()),
            "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            "cost": cost_a_token(config.model, config.segment_length or 1, config.memory_length),
            "step_seconds": statistics.median(seconds) if seconds else None,
            **self.further_results(model, config),
        }

    def is_current(self, record: Mapping[str, Any] | None, config: RunConfig) -> bool:
        """Whether evaluation.json is there and is of the last step, with this protocol, part and k values."""
        protocol, split = self.protocol(config), self.reported_split(config)
        return is_current(record, step=config.steps, protocol=protocol, split=split, top_k=evaluated_k(config))


def evaluated_k(config: RunConfig) -> set[int]:
    """The values of k that an evaluation by these settings has: a baseline's is its number of experts."""
    return {config.model.num_experts} if has_one_k(config.model.router) else set(config.eval_top_k)


def shown_k(config: RunConfig, kept: Collection[int]) -> int:
    """The k whose predictions are written: that of training, of a schedule the last; else the largest."""
    return config.top_k_schedule.high if config.top_k_schedule.high in kept else max(kept)


def pretraining_task(config: RunConfig, progress: DataProgress | None = None, vocabulary: Any = None) -> Task:
    """The task of these settings, by the family of their model, with its data."""
    task: Task = trains(config.model.family).open(config, progress, vocabulary)
    return task


def check_models(configs: Sequence[RunConfig], task: Task, layout: Layout) -> None:
    """Refuses settings whose model cannot be built or divided, before anything is trained."""
    for config in configs:
        prepared = task.prepared(config)
        with torch.device("meta"):
            model = build_model(prepared.model) if config.own.get("start_from") else task.build_model(prepared)
        if layout.world > 1:
            check_layers(model, layout)


def check_on_ranks(
    configs: Sequence[RunConfig], count: int, layout: Layout, progress: DataProgress | None = None
) -> None:
    """Reads the data and checks all that ranks will train, before one of them starts: settings of the same data."""
    for config in configs:
        check_ranks(config, Ranks(count=count))
    task = pretraining_task(configs[0], progress)
    task.check(configs[0])
    check_models(configs, task, layout)


def check_ranks(config: RunConfig, ranks: Ranks) -> None:
    """Raises RunError for ranks that do not divide a micro-batch."""
    parts = config.accumulation
    each = config.batch_size // parts
    if each % ranks.count:
        allowed = ", ".join(str(count) for count in range(1, each + 1) if each % count == 0)
        of = f"batch_size={config.batch_size}" + (f" in accumulation={parts} parts" if parts > 1 else "")
        raise RunError(f"{ranks.count} ranks cannot share {of} evenly; {allowed} can")
