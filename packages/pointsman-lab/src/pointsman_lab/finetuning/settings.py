"""What determines a fine-tuning, besides the pre-trained run and the seed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, get_args

from pointsman._errors import RunError, did_you_mean
from pointsman.routers.frame.registry import BASELINES, split_specs
from pointsman_lab._values import convert, most, upper
from pointsman_lab.models.classifier import Pooling
from pointsman_lab.registry import learner
from pointsman_lab.training.config import RunConfig

CHECKPOINT_EVERY = 250
UNREAD = {"data", "memory_length", "eval_memory_length", "eval_segment_length", "eval_split", "valid_tokens"}
"""Settings of a run that no fine-tuning reads: the task gives the data and their parts, its rows have one length."""
VALIDATIONS = 10  # of a run whose best validation chooses the evaluated weights


@dataclass(frozen=True)
class Defaults:
    """What a fine-tuning has unless it is told otherwise.

    Attributes:
        train_top_k: k while fine-tuning; None: as in pre-training.
        pools: whether one hidden state of a text is classified.
        presets: name -> (roles that do not train, weight of the balance loss).
        settings: of (steps, preset): further settings, as `RunConfig.with_overrides` takes them.
    """

    batch_size: int = 16
    epochs: float = 3
    length: int = 512
    train_top_k: str | None = "N"
    pooling: Pooling = "last"
    pools: bool = True
    presets: Mapping[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    settings: Callable[[int, str], Mapping[str, Any]] = lambda steps, preset: {}


@dataclass(frozen=True)
class Finetuning:
    """The settings of a fine-tuning: those of its task (`FineTuning.defaults`) where nothing else is said.

    Adam at 1e-4, clipping at 0.25 and the cosine to 0 are HyperRouter's (Table A2, and its code). What else a run has
    is as in pre-training.

    Attributes:
        task: a task, as `--task` names it.
        steps: optimizer steps; None = `epochs`.
        epochs: passes over the training split, if `steps` is None; None = the task's.
        train_top_k: k while fine-tuning; "N" = dense. None: the task's.
        freeze: roles that do not train: "router", "experts", … (X-MoE freezes both); "none" alone: also of a preset.
        balance: weight of the routers' balance losses; None = as in pre-training.
        pooling: "last", the hidden state of the last token, "first", or "mean". None: the task's.
        length: tokens of a text; longer ones are cut. None: the task's.
        head_dropout: of the classification head.
        from_scratch: fresh weights instead of the pre-trained ones: the control.
        preset: "", or one of the task's.
        settings: any others, as `RunConfig.with_overrides` takes them.
    """

    task: str
    steps: int | None = None
    epochs: float | None = None
    train_top_k: str | None = None
    freeze: tuple[str, ...] = ()
    balance: float | None = None
    pooling: Pooling | None = None
    length: int | None = None
    head_dropout: float = 0.1
    from_scratch: bool = False
    preset: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset:
            presets = self.defaults.presets
            if self.preset not in presets:
                told = did_you_mean(self.preset, presets) if presets else f"the task {self.task} has none"
                raise RunError(f"preset {self.preset!r}: {told}")
            frozen, balance = presets[self.preset]
            object.__setattr__(self, "freeze", self.freeze or frozen)
            object.__setattr__(self, "balance", balance if self.balance is None else self.balance)
        if self.freeze == ("none",):
            object.__setattr__(self, "freeze", ())
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise RunError(f"pooling={self.pooling!r}: {did_you_mean(self.pooling, get_args(Pooling))}")
        if self.balance is not None and not (self.balance >= 0 and math.isfinite(self.balance)):
            raise RunError(f"balance={self.balance}: allowed are numbers from 0")
        if self.epochs is not None and not 0 < self.epochs <= most("epochs", float):
            raise RunError(f"epochs={self.epochs}: allowed are numbers above 0 to {upper(most('epochs', float))}")
        if not 0 <= self.head_dropout < 1:
            raise RunError(f"head_dropout={self.head_dropout}: allowed are numbers from 0 up to, not including, 1")

    @cached_property
    def kind(self) -> Any:
        """The task's class, a `FineTuning`."""
        return learner(self.task).fine_tuning()

    @property
    def defaults(self) -> Defaults:
        found: Defaults = self.kind.defaults(self.task.partition(":")[0])
        return found

    @property
    def pooled(self) -> Pooling:
        """Which hidden state is classified."""
        return self.pooling or self.defaults.pooling

    @property
    def variant(self) -> str:
        """A folder name: the task, and what differs from the defaults of dense fine-tuning."""
        name = os.path.basename(os.path.abspath(self.kind.path(self.task)))  # also of "." and ".."
        words = ["".join(letter if letter.isalnum() or letter in "-_.=" else "_" for letter in name)]
        if self.train_top_k not in (None, self.defaults.train_top_k):
            assert self.train_top_k is not None
            words += [f"k={self.train_top_k.replace(':', '-').replace('/', '_')}"]
        words += [f"freeze={'+'.join(self.freeze)}"] if self.freeze else []
        words += [f"balance={self.balance:g}"] if self.balance is not None else []
        words += [self.pooling] if self.pooling not in (None, self.defaults.pooling) else []
        words += ["from-scratch"] if self.from_scratch else []
        words += [self.preset] if self.preset else []
        return ",".join(words)

    def check(self, pretrained: RunConfig) -> None:
        """Refuses settings that no fine-tuning of such a run can have, before anything is trained or read.

        Raises:
            RunError: a setting that does not exist, is out of range, or is one of the model's; a family that does not
                learn this task.
        """
        entry = learner(self.task)
        if pretrained.model.family not in (allowed := (*entry.families, *entry.takes)):
            told = f"models of the family {pretrained.model.family!r} do not learn the task {self.task}"
            raise RunError(f"{told}; allowed are {', '.join(allowed)}")
        if not self.defaults.pools and self.pooled != self.defaults.pooling:
            raise RunError(f"pooling={self.pooling!r} has no effect on {self.task}, which reads every hidden state")
        changed = {key for key in self.settings if key.startswith("model.") and key not in ("model.dropout",)}
        if changed and not self.from_scratch:
            raise RunError(f"{min(changed)} cannot be set: the model is that of the pre-trained run")
        if unread := sorted(UNREAD & self.settings.keys()):
            raise RunError(f"{unread[0]} cannot be set: no fine-tuning reads it")
        replace(pretrained, accumulation=1).with_overrides(self.settings)

    def config(self, pretrained: RunConfig, data: Any, seed: int) -> RunConfig:
        """The settings of one run.

        Raises:
            RunError: a setting that does not exist or is out of range.
        """
        self.check(pretrained)
        usual = self.kind.defaults(data.name)
        batch_size = convert(self.settings.get("batch_size", usual.batch_size), int, "setting batch_size")
        steps = self.steps
        if steps is None:
            epochs = usual.epochs if self.epochs is None else self.epochs
            steps = max(1, round(epochs * -(-len(data.splits["train"]) // max(1, batch_size))))
        length = self.length or usual.length
        asked = self.train_top_k or usual.train_top_k
        if pretrained.model.router == "dense-matched":  # whose width follows from the first k of pre-training
            asked = None
        base = RunConfig(
            model=pretrained.model,
            data=self.task,
            steps=steps,
            seed=seed,
            batch_size=batch_size,
            segment_length=length,
            memory_length=0,
            eval_batch_size=32,
            eval_segment_length=length,
            eval_memory_length=0,
            eval_top_k=pretrained.eval_top_k,
            train_top_k=asked or pretrained.train_top_k,
            learning_rate=1e-4,
            clip_norm=0.25,
            precision=pretrained.precision,
            gpu_kernels=pretrained.gpu_kernels,
            deterministic=pretrained.deterministic,
            imports=pretrained.imports,
            checkpoint_every=min(CHECKPOINT_EVERY, max(1, steps // 2)),
            keep_checkpoints=1,
            preset=self.preset or "finetune",
        )
        overridden = base.with_overrides({**usual.settings(steps, self.preset), **self.settings})
        if overridden.choose != "last" and not overridden.validate_every:
            overridden = replace(overridden, validate_every=max(1, -(-steps // VALIDATIONS)))
        length, limit = overridden.segment_length, getattr(overridden.model, "max_length", math.inf)
        if length > limit and getattr(overridden.model, "positions", "") == "learned":
            raise RunError(f"segment_length={length} (--length): model.max_length is {limit}")
        return overridden

    def for_router(self, router: str) -> Finetuning:
        """The same for a row of a comparison: without what a dense baseline does not have."""
        if not any(spec in BASELINES for spec in split_specs(router)):
            return self
        kept = tuple(role for role in self.freeze if role not in ("router", "experts", "moe"))
        bare = replace(self, freeze=kept or ("none",))
        object.__setattr__(bare, "balance", None)  # also that of a preset
        return bare

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; steps, k and the like are in the run's config.json."""
        left_out = ("steps", "epochs", "train_top_k", "length", "preset", "settings")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        return {**values, "pooling": self.pooled, "freeze": list(self.freeze)}
