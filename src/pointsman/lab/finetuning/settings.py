"""What determines a fine-tuning, besides the pre-trained run and the seed; the papers' settings are the defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from pointsman._errors import RunError, did_you_mean
from pointsman._values import convert, most, upper
from pointsman.lab.data.tasks import LabelledTexts, parse_task
from pointsman.lab.models.classifier import Pooling
from pointsman.lab.training.config import RunConfig
from pointsman.routers.registry import BASELINES, split_specs

BATCH_SIZE = {"imdb": 4}  # HyperRouter, Table A2: 16 for every other task
EPOCHS = {"banking77": 15}  # HyperRouter, Table A2: 3 for every other task
BALANCE_SWEEP = (0.0, 1e-3, 1e-2, 1e-1)  # X-MoE, Table 6
CHECKPOINT_EVERY = 250


@dataclass(frozen=True)
class Finetuning:
    """The settings of a fine-tuning.

    Defaults are HyperRouter's (Section 4.1, Table A2): all experts chosen, length 512, Adam at 1e-4, batch 16 (IMDB:
    4), 3 epochs (BANKING77: 15); clipping at 0.25 and the cosine to 0 are its code's. What else a run has is as in
    pre-training.

    Attributes:
        task: a task, as `--task` names it.
        steps: optimizer steps; None = `epochs`.
        epochs: passes over the training split, if `steps` is None; None = the paper's.
        train_top_k: k while fine-tuning; "N" = dense.
        freeze: roles that do not train: "router", "experts", … (X-MoE freezes both).
        balance: weight of the routers' balance losses; None = as in pre-training.
        pooling: "last", the hidden state of the last token, "first", or "mean".
        length: tokens of a text; longer ones are cut.
        head_dropout: of the classification head.
        from_scratch: fresh weights instead of the pre-trained ones: the control.
        settings: any others, as `RunConfig.with_overrides` takes them.
    """

    task: str
    steps: int | None = None
    epochs: float | None = None
    train_top_k: str = "N"
    freeze: tuple[str, ...] = ()
    balance: float | None = None
    pooling: Pooling = "last"
    length: int = 512
    head_dropout: float = 0.1
    from_scratch: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise RunError(f"pooling={self.pooling!r}: {did_you_mean(self.pooling, get_args(Pooling))}")
        if self.balance is not None and not (self.balance >= 0 and math.isfinite(self.balance)):
            raise RunError(f"balance={self.balance}: allowed are numbers from 0")
        if self.epochs is not None and not 0 < self.epochs <= most("epochs", float):
            raise RunError(f"epochs={self.epochs}: allowed are numbers above 0 to {upper(most('epochs', float))}")
        if not 0 <= self.head_dropout < 1:
            raise RunError(f"head_dropout={self.head_dropout}: allowed are numbers from 0 up to, not including, 1")

    @property
    def variant(self) -> str:
        """A folder name: the task, and what differs from the defaults of dense fine-tuning."""
        name = parse_task(self.task)[0].rstrip("/").rpartition("/")[2]
        words = ["".join(letter if letter.isalnum() or letter in "-_.=" else "_" for letter in name)]
        words += [f"k={self.train_top_k.replace(':', '-').replace('/', '_')}"] if self.train_top_k != "N" else []
        words += [f"freeze={'+'.join(self.freeze)}"] if self.freeze else []
        words += [f"balance={self.balance:g}"] if self.balance is not None else []
        words += [self.pooling] if self.pooling != "last" else []
        words += ["from-scratch"] if self.from_scratch else []
        return ",".join(words)

    def config(self, pretrained: RunConfig, data: LabelledTexts, seed: int) -> RunConfig:
        """The settings of one run.

        Raises:
            RunError: a setting that does not exist or is out of range.
        """
        batch_size = convert(self.settings.get("batch_size", BATCH_SIZE.get(data.name, 16)), int, "setting batch_size")
        steps = self.steps
        if steps is None:
            epochs = EPOCHS.get(data.name, 3) if self.epochs is None else self.epochs
            steps = max(1, round(epochs * -(-len(data.splits["train"]) // max(1, batch_size))))
        base = RunConfig(
            model=pretrained.model,
            data=self.task,
            steps=steps,
            seed=seed,
            batch_size=batch_size,
            segment_length=self.length,
            memory_length=0,
            eval_batch_size=32,
            eval_segment_length=self.length,
            eval_memory_length=0,
            eval_top_k=pretrained.eval_top_k,
            train_top_k=self.train_top_k,
            learning_rate=1e-4,
            clip_norm=0.25,
            precision=pretrained.precision,
            deterministic=pretrained.deterministic,
            imports=pretrained.imports,
            checkpoint_every=min(CHECKPOINT_EVERY, max(1, steps // 2)),
            keep_checkpoints=1,
            preset="finetune",
        )
        overridden = base.with_overrides(self.settings)
        changed = {key for key in self.settings if key.startswith("model.") and key not in ("model.dropout",)}
        if changed and not self.from_scratch:
            raise RunError(f"{min(changed)} cannot be set: the model is that of the pre-trained run")
        return overridden

    def for_router(self, router: str) -> Finetuning:
        """The same for a row of a comparison: without what a dense baseline does not have."""
        if any(spec in BASELINES for spec in split_specs(router)):
            kept = tuple(role for role in self.freeze if role not in ("router", "experts", "moe"))
            return replace(self, freeze=kept, balance=None)
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; steps, k and the like are in the run's config.json."""
        left_out = ("steps", "epochs", "train_top_k", "length", "settings")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        return {**values, "freeze": list(self.freeze)}
