"""Fine-tuning as work for the training loop: a classifier, its batches, its loss and its evaluation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import freeze, named_routers
from pointsman.lab.data import Vocabulary
from pointsman.lab.data.task_streams import Encoded, TaskStream, encode_examples
from pointsman.lab.data.tasks import Task
from pointsman.lab.evaluation.tasks import evaluate_task
from pointsman.lab.finetuning.routing import change_from
from pointsman.lab.finetuning.settings import Finetuning
from pointsman.lab.models.classifier import Classifier
from pointsman.lab.models.transformer_xl import Memory
from pointsman.lab.runs.checkpoints import CheckpointError
from pointsman.lab.training.config import RunConfig
from pointsman.lab.training.objectives import Objective, Outcome, objective_of
from pointsman.lab.training.record import evaluated_k
from pointsman.lab.training.work import Around, Parts, Work


class FineTuningWork(Work):
    """Learning a classification task from pre-trained weights.

    Args:
        task: the task.
        settings: of the fine-tuning.
        vocabulary: of the pre-trained run.
        weights: of the pre-trained model; None = fresh ones.
    """

    def __init__(
        self, task: Task, settings: Finetuning, vocabulary: Vocabulary, weights: Mapping[str, Tensor] | None
    ) -> None:
        self.task = task
        self.settings = settings
        self.vocabulary = vocabulary
        self.weights = weights
        self.fingerprint = f"{task.fingerprint}-{vocabulary.digest}"
        self._encoded: dict[tuple[str, int], Encoded] = {}

    def encoded(self, split: str, length: int) -> Encoded:
        """The examples of a part, cut to `length` tokens."""
        if (split, length) not in self._encoded:
            self._encoded[split, length] = encode_examples(self.task.splits[split], self.vocabulary, length)
        return self._encoded[split, length]

    def scored(self, split: str, config: RunConfig) -> Encoded:
        """The examples of a part that an evaluation reads: all, or what `eval_tokens` allows."""
        encoded = self.encoded(split, config.segment_length)
        return encoded if config.eval_tokens is None else encoded.take(encoded.within(config.eval_tokens))

    def classifier(self, config: RunConfig) -> Classifier:
        """The model at step 0: pre-trained weights, a fresh head, frozen parts, the balance loss's weight."""
        settings = self.settings
        model = Classifier(
            config.model,
            len(self.task.classes),
            pooling=settings.pooling,
            dropout=settings.head_dropout,
            seed=config.seed,
        )
        if self.weights is not None:
            try:
                model.backbone.load_state_dict(self.weights)
            except RuntimeError as error:
                raise CheckpointError(f"the pre-trained weights do not fit: {str(error).splitlines()[-1]}") from None
        set_balance(model, settings.balance)
        if settings.freeze:
            try:
                freeze(model, *settings.freeze)
            except ValueError as error:
                raise RunError(str(error)) from None
        return model

    def build(self, config: RunConfig, device: torch.device) -> Parts:
        model = self.classifier(config).to(device)
        stream = TaskStream(self.encoded("train", config.segment_length), config.batch_size, config.seed, device)
        return Parts(model, stream, classification(model), stream.mean_tokens)

    def validate(self, model: Any, config: RunConfig, top_k: Sequence[int], around: Around) -> list[dict[str, Any]]:
        split = self.task.watched
        return [] if split is None else self._evaluate(model, config, split, top_k, around, routing=False)

    def evaluate(self, model: Any, config: RunConfig, around: Around) -> list[dict[str, Any]]:
        return self._evaluate(model, config, self.task.reported, config.eval_top_k, around, routing=True)

    def _evaluate(
        self, model: Classifier, config: RunConfig, split: str, top_k: Sequence[int], around: Around, *, routing: bool
    ) -> list[dict[str, Any]]:
        return evaluate_task(
            model,
            self.scored(split, config),
            split=split,
            top_k=top_k,
            batch_size=config.eval_batch_size,
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
        assert isinstance(model, Classifier)
        seconds = [row["step_seconds"] for row in metrics if row["kind"] == "train"]
        routers = {id(p): p for _, router in named_routers(model) for p in router.parameters() if p.requires_grad}
        record: dict[str, Any] = {
            "format": 1,
            "checkpoint": f"step-{step}",
            "protocol": self.protocol(config),
            "results": list(results),
            "router_parameters": sum(parameter.numel() for parameter in routers.values()),
            "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            "step_seconds": statistics.median(seconds) if seconds else None,
        }
        if self.weights is not None and any(True for _ in named_routers(model)):
            encoded = self.encoded(self.task.reported, config.segment_length)
            record["change_from_pretrained"] = change_from(self.weights, model, encoded)
        return record

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        """How the figures came about, for the tables."""
        settings, task = self.settings, self.task
        cut = {split: self.encoded(split, config.segment_length).truncated for split in ("train", task.reported)}
        read, all_of_it = len(self.scored(task.reported, config)), len(task.splits[task.reported])
        return {
            "task": task.description,
            "fingerprint": task.fingerprint,
            "split": task.reported,
            "length": config.segment_length,
            "truncated": cut,
            "pooling": settings.pooling,
            "trained_with_k": config.train_top_k,
            "frozen": list(settings.freeze),
            "balance": settings.balance,
            "from_scratch": settings.from_scratch,
            "steps": config.steps,
            "checkpoint_rule": "the last step",
            **({} if read == all_of_it else {"scored": f"{read:,} of {all_of_it:,} texts, drawn with a fixed seed"}),
        }

    def still_right(self, record: Mapping[str, Any], config: RunConfig) -> bool:
        k_values = {result["top_k"] for result in record.get("results", [])}
        return (
            record.get("checkpoint") == f"step-{config.steps}"
            and record.get("protocol") == self.protocol(config)
            and k_values == evaluated_k(config)
        )


def set_balance(model: nn.Module, balance: float | None) -> None:
    """Gives every router's balance loss this weight; None leaves them as they are."""
    if balance is not None:
        for _, router in named_routers(model):
            router.balance = balance


def classification(model: Classifier) -> Objective:
    """Mean cross-entropy of the labels; for THOR its two-pass form, (L1 + L2 + alpha C) / 2 (`training.objectives`)."""
    asked = objective_of(model.backbone)
    weight = next((router.objective_weight for _, router in named_routers(model) if router.objective), 0.0)

    def plain(model: Classifier, inputs: Tensor, labels: Tensor, memory: Memory | None, length: int) -> Outcome:
        loss = F.cross_entropy(model(inputs).float(), labels)
        return Outcome(loss, loss.detach(), None)

    def twice(model: Classifier, inputs: Tensor, labels: Tensor, memory: Memory | None, length: int) -> Outcome:
        log_p, log_q = (torch.log_softmax(model(inputs).float(), -1) for _ in range(2))
        loss_p, loss_q = F.nll_loss(log_p, labels), F.nll_loss(log_q, labels)
        divergence = 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1).mean()
        return Outcome((loss_p + loss_q + weight * divergence) / 2, loss_p.detach(), None)

    return Objective(asked.name, asked.passes, plain if asked.passes == 1 else twice)
