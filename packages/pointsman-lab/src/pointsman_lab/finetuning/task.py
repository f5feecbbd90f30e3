"""Learning a task from pre-trained weights: what all such tasks share, and how far the routing moved meanwhile."""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import freeze, named_routers, set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.diagnostics.statistics import Fluctuation
from pointsman.recording import record_routing
from pointsman_lab.data.task_streams import Encoded, eval_batches
from pointsman_lab.evaluation.diagnose import Batch
from pointsman_lab.evaluation.passes import eval_top_k
from pointsman_lab.finetuning.settings import Defaults, Finetuning
from pointsman_lab.models.config import build_model
from pointsman_lab.runs.checkpoints import CheckpointError
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.task import Observed, Task, target_nats

EXAMPLES = 256
TOP_K = 2


class FineTuning(Task):
    """A task that is learned from pre-trained weights; `TaskEntry.fine_tuning` returns the class."""

    may_choose = True

    def __init__(self, data: Any, settings: Finetuning, vocabulary: Any, weights: Mapping[str, Tensor] | None) -> None:
        self.data = data
        self.name, self.reported = data.name, data.reported
        self.settings = settings
        self.vocabulary = vocabulary
        self.weights = weights
        self.fingerprint = f"{data.fingerprint}-{vocabulary.digest}"

    @classmethod
    def find(cls, spec: str) -> None:
        """Refuses a task that does not exist, without reading it."""

    @classmethod
    @abstractmethod
    def read(cls, spec: str) -> Any:
        """The task's data: an object with `name`, `classes`, `splits` (with "train"), `description` (the protocol
        line), `reported` (the judged part) and `fingerprint`.
        """

    @classmethod
    def path(cls, spec: str) -> str:
        """A spec without its options: its last part names the folders of runs."""
        return spec

    @classmethod
    def defaults(cls, name: str) -> Defaults:
        """What a fine-tuning on data of this name has unless it is told otherwise."""
        return Defaults()

    @classmethod
    @abstractmethod
    def model(cls, config: RunConfig, name: str, classes: int, settings: Finetuning) -> nn.Module:
        """The model of a task of this name with fresh weights; its attribute `backbone` is the pre-trained one."""

    def remarks(self, config: RunConfig) -> list[str]:
        """What a user must know before the run."""
        return []

    @abstractmethod
    def truncated(self, config: RunConfig) -> dict[str, int]:
        """Part -> how many texts were cut."""

    @abstractmethod
    def read_again(self, config: RunConfig) -> Encoded:
        """The texts on which the routing is compared with the pre-trained model's."""

    @abstractmethod
    def rows(self, config: RunConfig, split: str) -> Mapping[str, Encoded]:
        """What an evaluation of a part reads, by group: languages, or one group."""

    def check(self, config: RunConfig) -> None:
        self.batches(config, torch.device("cpu"))

    def build_model(self, config: RunConfig) -> nn.Module:
        """Pre-trained weights in the `backbone`, a fresh head, frozen parts, the balance loss's weight.

        Raises:
            CheckpointError: the weights belong to another model.
        """
        model: Any = self.model(config, self.name, len(self.data.classes), self.settings)
        if self.weights is not None:
            try:
                model.backbone.load_state_dict(self.weights)
            except RuntimeError as error:
                raise CheckpointError(f"the pre-trained weights do not fit: {str(error).splitlines()[-1]}") from None
        if self.settings.balance is not None:
            routers = [one for _, one in named_routers(model) if "balance" not in one.select.overrides]
            for router in routers:
                router.balance = self.settings.balance
            told = (
                f"balance={self.settings.balance:g} has no effect: {config.model.router} has no balance loss to weigh"
            )
            self.notes = () if routers else (told,)
        if self.settings.freeze:
            try:
                freeze(model, *self.settings.freeze)
            except ValueError as error:
                raise RunError(str(error)) from None
        return model  # type: ignore[no-any-return]

    def reported_split(self, config: RunConfig) -> str:
        return str(self.reported)

    def observed(self, config: RunConfig, split: str, tokens: int | None, device: torch.device) -> Observed:
        """The rows that an evaluation of this part scores."""
        parts = self.rows(replace(config, eval_tokens=tokens), split)
        batches = [
            Batch(one.tokens, one.labels, one.tokens >= 0, number if len(parts) > 1 else None)
            for number, encoded in enumerate(parts.values())
            for one in eval_batches(encoded, config.eval_batch_size, device)
        ]
        read_tokens = sum(int((one.inputs >= 0).sum()) for one in batches)
        protocol = {"data": self.data.description, "split": split, "tokens": read_tokens}
        groups = tuple(parts) if len(parts) > 1 else ()
        return Observed(batches, len(batches), lambda: target_nats(config, device), protocol, groups)

    def further_results(self, model: Any, config: RunConfig) -> dict[str, Any]:
        """How far the routing moved from the pre-trained model's, and whether what was frozen is as it was, bit by bit.

        Returns:
            {"change_from_pretrained": as of `change_from`, "frozen": {"roles", "tensors": how many were frozen,
            "changed": names of those that differ}}; "frozen" only if something was, {} without weights or routers.
        """
        if self.weights is None or not any(True for _ in named_routers(model)):
            return {}
        found: dict[str, Any] = {"change_from_pretrained": change_from(self.weights, model, self.read_again(config))}
        if self.settings.freeze:
            own, before = model.backbone.state_dict(), self.weights
            frozen = [name for name, parameter in model.backbone.named_parameters() if not parameter.requires_grad]
            changed = [name for name in frozen if not torch.equal(own[name].cpu(), before[name].cpu())]
            found["frozen"] = {"roles": list(self.settings.freeze), "tensors": len(frozen), "changed": changed}
        return found

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
            "checkpoint_rule": "the last step"
            if config.choose == "last"
            else "the best step on held-out rows of training",
        }


@torch.no_grad()
def change_from(weights: Mapping[str, Tensor], model: Any, encoded: Encoded) -> dict[str, Any]:
    """Routing fluctuation between the pre-trained model and the fine-tuned one, on the same texts at k = 2 (a
    router with one k: at that).

    Returns:
        {"top_k", "examples", "layers": {layer: what `Fluctuation` gives}}; padding is left out.
    """
    device = next(model.parameters()).device
    before = build_model(model.config)
    before.load_state_dict(weights)
    before.to(device)
    part = encoded.take(np.arange(len(encoded))[:EXAMPLES])
    layers = {name: Fluctuation() for name, _ in named_routers(before)}
    (k,) = eval_top_k(before, (min(TOP_K, model.config.num_experts),))
    at = [set_top_k(one, k) if k else nullcontext() for one in (model, before)]
    with at[0], at[1]:
        for batch in eval_batches(part, 32, device):
            mask = batch.tokens >= 0
            with evaluating(before, 0), record_routing(before) as one:
                before.encode(batch.tokens.clamp_min(0), padding_mask=mask)
            with evaluating(model, 0), record_routing(model.backbone) as two:
                model.backbone.encode(batch.tokens.clamp_min(0), padding_mask=mask)
            for name, fluctuation in layers.items():
                fluctuation.update(one[name], two[name], mask.reshape(-1))
    results = {name: fluctuation.result() for name, fluctuation in layers.items()}
    return {"top_k": k or model.config.num_experts, "examples": len(part), "layers": results}
