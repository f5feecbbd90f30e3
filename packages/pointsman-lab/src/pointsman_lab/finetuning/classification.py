"""Classification: a pre-trained model with a head learns the classes of texts, judged by accuracy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import freeze, named_routers
from pointsman_lab.data import Vocabulary
from pointsman_lab.data.task_streams import Encoded, TaskStream, encode_examples
from pointsman_lab.data.tasks import LabelledTexts
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.evaluation.tasks import evaluate_task
from pointsman_lab.finetuning.routing import change_from
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.models.memory import Memory
from pointsman_lab.runs.checkpoints import CheckpointError
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import Objective, Outcome, objective_of
from pointsman_lab.training.task import Batches, Task


class FineTuning(Task):
    """A task that is learned from pre-trained weights.

    Args:
        data: what is learned.
        settings: of the fine-tuning.
        vocabulary: of the pre-trained run.
        weights: of the pre-trained model; None = fresh ones.
    """

    may_choose = True

    def __init__(self, data: Any, settings: Finetuning, vocabulary: Any, weights: Mapping[str, Tensor] | None) -> None:
        self.data = data
        self.settings = settings
        self.vocabulary = vocabulary
        self.weights = weights
        self.fingerprint = f"{data.fingerprint}-{vocabulary.digest}"

    @abstractmethod
    def truncated(self, config: RunConfig) -> dict[str, int]:
        """Part -> how many texts were cut."""

    @abstractmethod
    def read_again(self, config: RunConfig) -> Encoded:
        """The texts on which the routing is compared with the pre-trained model's."""

    def check(self, config: RunConfig) -> None:
        self.batches(config, torch.device("cpu"))

    def further_results(self, model: Any, config: RunConfig) -> dict[str, Any]:
        """How far the routing moved from the pre-trained model's."""
        if self.weights is None or not any(True for _ in named_routers(model)):
            return {}
        change = {"change_from_pretrained": change_from(self.weights, model, self.read_again(config))}
        return change | unchanged(model, self.settings, self.weights)

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        """How the figures came about, for the tables."""
        settings, data = self.settings, self.data
        return {
            "task": data.description,
            "fingerprint": data.fingerprint,
            "split": self.reported_split(config),
            "length": config.segment_length,
            "truncated": self.truncated(config),
            "pooling": settings.pooled,
            "trained_with_k": config.train_top_k,
            "frozen": list(settings.freeze),
            "balance": settings.balance,
            "from_scratch": settings.from_scratch,
            "steps": config.steps,
            "checkpoint_rule": checkpoint_rule(config),
        }


class Classification(FineTuning):
    """Learns to classify texts.

    Args:
        reported: the part that is judged; None: as in `data`.
    """

    data: LabelledTexts
    vocabulary: Vocabulary

    def __init__(
        self,
        data: LabelledTexts,
        settings: Finetuning,
        vocabulary: Vocabulary,
        weights: Mapping[str, Tensor] | None,
        *,
        reported: str | None = None,
    ) -> None:
        super().__init__(data, settings, vocabulary, weights)
        self.reported = reported or data.reported
        self._encoded: dict[tuple[str, int], Encoded] = {}

    def encoded(self, split: str, length: int) -> Encoded:
        """The examples of a part, cut to `length` tokens."""
        if (split, length) not in self._encoded:
            self._encoded[split, length] = encode_examples(self.data.splits[split], self.vocabulary, length)
        return self._encoded[split, length]

    def scored(self, split: str, config: RunConfig) -> Encoded:
        """The examples of a part that an evaluation reads: all, or what `eval_tokens` allows."""
        encoded = self.encoded(split, config.segment_length)
        return encoded if config.eval_tokens is None else encoded.take(encoded.within(config.eval_tokens))

    def remarks(self, config: RunConfig) -> list[str]:
        """What a user must know before the run."""
        data, found = self.data, []
        for split in ("train", self.reported):
            if cut := self.encoded(split, config.segment_length).truncated:
                texts = len(data.splits[split])
                found.append(f"{data.name} {split}: {cut:,} of {texts:,} texts cut to {config.segment_length} tokens")
        if scored := self.protocol(config).get("scored"):
            found.append(f"{data.name} {self.reported}: accuracy is that of {scored}")
        return found

    def build_model(self, config: RunConfig) -> Classifier:
        """Pre-trained weights, a fresh head, frozen parts, the balance loss's weight."""
        settings = self.settings
        model = Classifier(
            config.model,
            len(self.data.classes),
            pooling=settings.pooled,
            dropout=settings.head_dropout,
            seed=config.seed,
        )
        return from_pretrained(model, settings, self.weights)

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        return TaskStream(self.encoded("train", config.segment_length), config.batch_size, config.seed, device)

    def objective(self, model: Any, config: RunConfig) -> Objective:
        return objective_of(model, label_loss, label_logits, label_smoothing=config.label_smoothing)

    def validation_split(self, config: RunConfig) -> str | None:
        return self.data.watched

    def reported_split(self, config: RunConfig) -> str:
        return self.reported

    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        return evaluate_task(
            model, self.scored(split, config), split=split, top_k=top_k, batch_size=config.eval_batch_size,
            how=context,
        )  # fmt: skip

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


def checkpoint_rule(config: RunConfig) -> str:
    """Which weights are evaluated, in words."""
    return "the last step" if config.choose == "last" else "the best step on held-out rows of training"


Model = TypeVar("Model", bound=nn.Module)


def from_pretrained(model: Model, settings: Finetuning, weights: Mapping[str, Tensor] | None) -> Model:
    """A model with the pre-trained weights in its `backbone`, frozen parts and the balance loss's weight.

    Raises:
        CheckpointError: the weights belong to another model.
        RunError: a role that the model does not have.
    """
    if weights is not None:
        try:
            model.backbone.load_state_dict(weights)  # type: ignore[union-attr]
        except RuntimeError as error:
            raise CheckpointError(f"the pre-trained weights do not fit: {str(error).splitlines()[-1]}") from None
    set_balance(model, settings.balance)
    if settings.freeze:
        try:
            freeze(model, *settings.freeze)
        except ValueError as error:
            raise RunError(str(error)) from None
    return model


def unchanged(model: Any, settings: Finetuning, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compares what was frozen with the pre-trained weights bit by bit.

    Returns:
        {"frozen": {"roles", "tensors": how many were frozen, "changed": names of those that differ}}; {} if nothing was
        frozen.
    """
    if not settings.freeze:
        return {}
    found = [name for name, parameter in model.backbone.named_parameters() if not parameter.requires_grad]
    own = model.backbone.state_dict()
    changed = [name for name in found if not torch.equal(own[name].cpu(), weights[name].cpu())]
    return {"frozen": {"roles": list(settings.freeze), "tensors": len(found), "changed": changed}}


def set_balance(model: nn.Module, balance: float | None) -> None:
    """Gives every router's balance loss this weight; None leaves them as they are."""
    if balance is not None:
        for _, router in named_routers(model):
            router.balance = balance


def label_loss(model: Classifier, inputs: Tensor, labels: Tensor, memory: Memory | None, length: int) -> Outcome:
    """Mean cross-entropy of the labels."""
    loss = F.cross_entropy(model(inputs).float(), labels)
    return Outcome(loss, loss.detach(), None)


def label_logits(model: Classifier, inputs: Tensor, memory: Memory | None, length: int) -> tuple[Tensor, None]:
    """[B, C]."""
    return model(inputs), None
