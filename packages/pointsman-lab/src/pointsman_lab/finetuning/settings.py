"""What determines a fine-tuning, besides the pre-trained run and the seed; the papers' settings are the defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from pointsman._errors import RunError, did_you_mean
from pointsman._values import convert, most, upper
from pointsman.routers.frame.registry import BASELINES, split_specs
from pointsman_lab.data.multilingual.splits import XtremeData
from pointsman_lab.data.tasks import LabelledTexts, parse_task
from pointsman_lab.models.classifier import Pooling
from pointsman_lab.training.config import RunConfig

BATCH_SIZE = {"imdb": 4}  # HyperRouter, Table A2: 16 for every other task
EPOCHS = {"banking77": 15}  # HyperRouter, Table A2: 3 for every other task
XTREME_EPOCHS = {
    "xnli": 5, "pawsx": 5, "pawsx-test": 5, "udpos": 10, "panx": 10, "tydiqa": 3, "xquad": 3, "mlqa": 3
}  # fmt: skip
QUESTIONS = ("tydiqa", "xquad", "mlqa")
SMALL_RATE = {"udpos": 1e-3, "panx": 1e-3}
"""Learning rates of small encoders, found by trial; 5e-4 for the other tasks. XTREME's 2e-5 moves them too little."""

PRESETS = ("finetune-xmoe",)
CHECKPOINT_EVERY = 250
VALIDATIONS = 10  # of a run whose best validation chooses the evaluated weights


@dataclass(frozen=True)
class Finetuning:
    """The settings of a fine-tuning.

    XTREME's tasks have the settings of its scripts (Hu et al. 2020): batch 32, epochs as in `XTREME_EPOCHS`, length
    128, of questions 384, AdamW, linear decay to 0, k as in pre-training. Their learning rate is one for small
    encoders; the preset "finetune-xmoe" has the scripts' (2e-5, of questions 3e-5 with 500 steps of warm-up and decay
    1e-4), freezes routers and experts, and keeps the balance loss at 0.01 (X-MoE, 4.2 and Table 6).

    For all other tasks defaults are HyperRouter's (Section 4.1, Table A2): all experts chosen, length 512, Adam at
    1e-4, batch 16 (IMDB: 4), 3 epochs (BANKING77: 15); clipping at 0.25 and the cosine to 0 are its code's. What else
    a run has is as in pre-training.

    Attributes:
        task: a task, as `--task` names it.
        steps: optimizer steps; None = `epochs`.
        epochs: passes over the training split, if `steps` is None; None = the paper's.
        train_top_k: k while fine-tuning; "N" = dense. None: dense, of XTREME's tasks as in pre-training.
        freeze: roles that do not train: "router", "experts", … (X-MoE freezes both).
        balance: weight of the routers' balance losses; None = as in pre-training.
        pooling: "last", the hidden state of the last token, "first", or "mean". None: "last", of pairs "first".
        length: tokens of a text; longer ones are cut. None: 512, of XTREME's tasks as there.
        head_dropout: of the classification head.
        from_scratch: fresh weights instead of the pre-trained ones: the control.
        preset: "" or "finetune-xmoe".
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
        if self.preset and self.preset not in PRESETS:
            raise RunError(f"preset {self.preset!r}: {did_you_mean(self.preset, PRESETS)}")
        if self.preset and not self.is_crosslingual:
            raise RunError(f"preset {self.preset!r}: it is for XTREME's tasks: {', '.join(XTREME_EPOCHS)}")
        if self.preset:
            object.__setattr__(self, "freeze", self.freeze or ("router", "experts"))
            object.__setattr__(self, "balance", 0.01 if self.balance is None else self.balance)
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise RunError(f"pooling={self.pooling!r}: {did_you_mean(self.pooling, get_args(Pooling))}")
        if self.balance is not None and not (self.balance >= 0 and math.isfinite(self.balance)):
            raise RunError(f"balance={self.balance}: allowed are numbers from 0")
        if self.epochs is not None and not 0 < self.epochs <= most("epochs", float):
            raise RunError(f"epochs={self.epochs}: allowed are numbers above 0 to {upper(most('epochs', float))}")
        if not 0 <= self.head_dropout < 1:
            raise RunError(f"head_dropout={self.head_dropout}: allowed are numbers from 0 up to, not including, 1")

    @property
    def is_crosslingual(self) -> bool:
        """Whether it is one of XTREME's tasks."""
        return self.task.partition(":")[0] in XTREME_EPOCHS

    @property
    def pooled(self) -> Pooling:
        """Which hidden state is classified."""
        return self.pooling or ("first" if self.is_crosslingual else "last")

    @property
    def variant(self) -> str:
        """A folder name: the task, and what differs from the defaults of dense fine-tuning."""
        name = parse_task(self.task)[0].rstrip("/").rpartition("/")[2]
        words = ["".join(letter if letter.isalnum() or letter in "-_.=" else "_" for letter in name)]
        default = (None,) if self.is_crosslingual else (None, "N")
        if self.train_top_k is not None and self.train_top_k not in default:
            words += [f"k={self.train_top_k.replace(':', '-').replace('/', '_')}"]
        words += [f"freeze={'+'.join(self.freeze)}"] if self.freeze else []
        words += [f"balance={self.balance:g}"] if self.balance is not None else []
        words += [self.pooling] if self.pooling not in (None, "first" if self.is_crosslingual else "last") else []
        words += ["from-scratch"] if self.from_scratch else []
        words += [self.preset] if self.preset else []
        return ",".join(words)

    def check(self, pretrained: RunConfig) -> None:
        """Refuses settings that no fine-tuning of such a run can have, before anything is trained or read.

        Raises:
            RunError: a setting that does not exist, is out of range, or is one of the model's.
        """
        changed = {key for key in self.settings if key.startswith("model.") and key not in ("model.dropout",)}
        if changed and not self.from_scratch:
            raise RunError(f"{min(changed)} cannot be set: the model is that of the pre-trained run")
        replace(pretrained, accumulation=1).with_overrides(self.settings)

    def config(self, pretrained: RunConfig, data: LabelledTexts | XtremeData, seed: int) -> RunConfig:
        """The settings of one run.

        Raises:
            RunError: a setting that does not exist or is out of range.
        """
        self.check(pretrained)
        batch_size = convert(self.settings.get("batch_size", self._batch_size(data.name)), int, "setting batch_size")
        steps = self.steps
        if steps is None:
            usual = {**EPOCHS, **XTREME_EPOCHS}.get(data.name, 3)
            epochs = usual if self.epochs is None else self.epochs
            steps = max(1, round(epochs * -(-len(data.splits["train"]) // max(1, batch_size))))
        length = self.length or (512 if not self.is_crosslingual else 384 if data.name in QUESTIONS else 128)
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
            train_top_k=self.train_top_k or (pretrained.train_top_k if self.is_crosslingual else "N"),
            learning_rate=1e-4,
            clip_norm=0.25,
            precision=pretrained.precision,
            deterministic=pretrained.deterministic,
            imports=pretrained.imports,
            checkpoint_every=min(CHECKPOINT_EVERY, max(1, steps // 2)),
            keep_checkpoints=1,
            preset="finetune",
        )
        if self.is_crosslingual:
            base = base.with_overrides(self._xtreme(data.name, steps))
        overridden = base.with_overrides(self.settings)
        if overridden.choose != "last" and not overridden.validate_every:
            overridden = replace(overridden, validate_every=max(1, -(-steps // VALIDATIONS)))
        return overridden

    def _batch_size(self, name: str) -> int:
        return 32 if self.is_crosslingual else BATCH_SIZE.get(name, 16)

    def _xtreme(self, name: str, steps: int) -> dict[str, Any]:
        """The settings of XTREME's scripts, with their learning rate or one for small encoders."""
        questions, papers = name in QUESTIONS, self.preset == "finetune-xmoe"
        return {
            "lr_schedule": "linear",
            "decay": "decoupled",
            "clip_norm": 1.0,
            "learning_rate": (3e-5 if questions else 2e-5) if papers else SMALL_RATE.get(name, 5e-4),
            "warmup_steps": (500 if papers else steps // 10) if questions else 0,
            "weight_decay": 1e-4 if questions else 0.0,
            "preset": self.preset or "finetune",
        }

    def for_router(self, router: str) -> Finetuning:
        """The same for a row of a comparison: without what a dense baseline does not have."""
        if any(spec in BASELINES for spec in split_specs(router)):
            kept = tuple(role for role in self.freeze if role not in ("router", "experts", "moe"))
            bare = replace(self, freeze=kept, balance=None)
            if self.preset:  # which sets both
                object.__setattr__(bare, "freeze", kept)
                object.__setattr__(bare, "balance", None)
            return bare
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; steps, k and the like are in the run's config.json."""
        left_out = ("steps", "epochs", "train_top_k", "length", "preset", "settings")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        return {**values, "pooling": self.pooled, "freeze": list(self.freeze)}
