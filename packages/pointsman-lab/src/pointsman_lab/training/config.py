"""RunConfig: everything that determines a run, checked, as JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_type_hints

from pointsman._errors import RunError, did_you_mean
from pointsman.ops.kernels import PLAIN, Kernels
from pointsman.routers.frame.registry import split_specs
from pointsman_lab._files import parse_json
from pointsman_lab._values import most, typed_fields, typed_value, upper
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.registry import OLDEST, entries, family, own_settings
from pointsman_lab.runs.imports import import_recorded
from pointsman_lab.training.k_schedule import Shape, TopKSchedule, doublings, parse_top_k
from pointsman_lab.training.settings import EARLIER, GONE, derived, flat, without_effect

FORMAT = 1
TRACKERS = ("wandb", "trackio")


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run and of its evaluation.

    Attributes:
        model: the model's family, shape and router. Its `vocab_size` is that of the data once the run starts, its
            `seed` the run's, its `top_k` the first k of `train_top_k`.
        data: a corpus or a set of images, as `--data` names it.
        steps: optimizer steps.
        seed: of initial weights, dropout and routing noise.
        batch_size: sequences a step; `accumulation` micro-batches share them.
        segment_length, memory_length: tokens of a training segment, and of the memory before it.
        eval_batch_size, eval_segment_length, eval_memory_length: the same in evaluation.
        eval_tokens: tokens of the test split that are scored, whole segments evenly spaced; None = all.
        eval_top_k: the k values of the final evaluation.
        eval_split: the part of the final evaluation.
        valid_tokens: as `eval_tokens`, for the validations on the way.
        train_top_k: "2", "2:N" or "N/2:N": k, or its first and last value.
        k_schedule: how k grows from the first to the last (`training.k_schedule`).
        learning_rate: the highest one, reached after `warmup_steps`.
        lr_schedule: what follows the warm-up: "cosine" or "linear" to `final_learning_rate` at the last step,
            "inverse-sqrt" (rate sqrt(warmup_steps / step)), or "constant".
        clip_norm: largest norm of the whole gradient; 0 = no clipping.
        betas, adam_eps, weight_decay: Adam's.
        decay: "l2", weight decay is added to the gradient (Adam), or "decoupled", taken off the weights (AdamW).
        decay_on: "all", or "matrices": no biases, norms, embeddings or positions.
        label_smoothing: share of the target's probability that all classes get in the training loss.
        choose: of fine-tuning: which weights are evaluated, those of the "last" step, or "best-valid", those with the
            best figure on the held-out rows (of XTREME's tasks English ones), at the k of training.
        precision: "float32", "bfloat16" (autocast), or "auto": bfloat16 on CUDA, float32 on a CPU.
        gpu_kernels: on a CUDA device, "torch" (its operators) or "triton" (our kernels, `docs/gpu.md`).
        deterministic: plain kernels and PyTorch's deterministic algorithms.
        validate_every, checkpoint_every: in steps; 0 = only at the end.
        keep_checkpoints: how many of the last ones are kept.
        log_every: steps between two training lines in metrics.jsonl.
        observe_every: steps between two looks at the routing.
        tensorboard: whether to write TensorBoard files as well.
        track: where the metrics go besides: "wandb", "trackio".
        imports: modules and files of the user that registered routers, as `--import` takes them.
        preset: name of the preset or recipe that the settings come from, for the record.
        own: the settings that only tasks of this family of models have (`TaskEntry.settings`), with their defaults.
    """

    model: ModelConfig
    data: str = "stdlib"
    steps: int = 1000
    seed: int = 0
    batch_size: int = 22
    segment_length: int = 512
    memory_length: int = 512
    accumulation: int = 1
    eval_batch_size: int = 10
    eval_segment_length: int = 128
    eval_memory_length: int = 896
    eval_tokens: int | None = None
    eval_top_k: tuple[int, ...] = ()
    eval_split: Literal["valid", "test"] = "test"
    valid_tokens: int | None = 100_000
    train_top_k: str = "N/2:N"
    k_schedule: Shape = "linear"
    learning_rate: float = 2.5e-4
    lr_schedule: Literal["cosine", "linear", "inverse-sqrt", "constant"] = "cosine"
    final_learning_rate: float = 0.0
    warmup_steps: int = 0
    clip_norm: float = 0.25
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    decay: Literal["l2", "decoupled"] = "l2"
    decay_on: Literal["all", "matrices"] = "all"
    label_smoothing: float = 0.0
    choose: Literal["last", "best-valid"] = "last"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    gpu_kernels: Literal["torch", "triton"] = "torch"
    deterministic: bool = False
    validate_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    log_every: int = 10
    observe_every: int = 50
    tensorboard: bool = False
    track: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    preset: str = ""
    own: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelConfig, **values: Any) -> RunConfig:
        """Settings by name, those of the task among the others."""
        own = {name: values.pop(name) for name in own_settings(model.family) if name in values}
        return cls(model=model, own=own, **values)

    def __post_init__(self) -> None:
        known = own_settings(self.model.family)
        for name in self.own:
            if name not in known:
                raise RunError(f"setting {name!r} has no effect on models of the family {self.model.family!r}")
        own = {name: self.own.get(name, setting.default) for name, setting in known.items()}
        object.__setattr__(self, "own", own)
        for name, setting in known.items():
            if isinstance(setting.default, float):
                if not setting.least <= own[name] <= (math.inf if setting.most is None else setting.most):
                    upto = "" if setting.most is None else f" to {setting.most:g}"
                    raise RunError(f"{name}={own[name]}: allowed are numbers from {setting.least:g}{upto}")
            elif isinstance(setting.default, int):
                _at_least(name, own[name], int(setting.least))
        for name in _POSITIVE:
            _at_least(name, getattr(self, name), 1)
        for name in _NOT_NEGATIVE:
            _at_least(name, getattr(self, name), 0)
        for name in ("eval_tokens", "valid_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name, right, allowed in (
            ("learning_rate", self.learning_rate > 0, "numbers above 0"),
            ("adam_eps", 0 < self.adam_eps < 1, "numbers above 0 and below 1"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "numbers from 0 to below 1"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 up to, not including, 1"),
        ):
            if not right:
                raise RunError(f"{name}={getattr(self, name)}: allowed are {allowed}")
        if self.batch_size % self.accumulation:
            raise RunError(f"accumulation={self.accumulation}: batch_size={self.batch_size} is no multiple of it")
        if not self.eval_top_k:
            object.__setattr__(self, "eval_top_k", doublings(1, self.model.num_experts))
        most_k = self.model.num_experts
        for k in self.eval_top_k:
            if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most_k:
                raise RunError(f"eval_top_k: k={k!r} is no whole number from 1 to {most_k}, the number of experts")
        if len(set(self.eval_top_k)) != len(self.eval_top_k):
            raise RunError(f"eval_top_k={','.join(map(str, self.eval_top_k))}: a k is given twice")
        for name in self.track:
            if name not in TRACKERS:
                raise RunError(f"track={name!r}: {did_you_mean(name, TRACKERS)}")
        if self.gpu_kernels == "triton" and self.deterministic:
            raise RunError("gpu_kernels=triton: deterministic=true takes the plain kernels")
        split_specs(self.model.router)
        object.__setattr__(self, "model", replace(self.model, seed=self.seed, top_k=self.top_k_schedule.low))

    @property
    def top_k_schedule(self) -> TopKSchedule:
        """k as a function of the step."""
        return TopKSchedule(*parse_top_k(self.train_top_k, self.model.num_experts), self.steps, self.k_schedule)

    @property
    def kernels(self) -> Kernels:
        """What computes in the run and in everything that is computed from it."""
        return PLAIN if self.deterministic else Kernels(gpu=self.gpu_kernels)

    def with_overrides(self, overrides: Mapping[str, Any]) -> RunConfig:
        """A copy with settings replaced: {"learning_rate": "1e-3", "model.dim": 64}; strings are read as their type.

        Raises:
            RunError: an unknown setting (with the nearest name), or a value of another type or out of range.
        """
        allowed, fixed = settings(self.model.family), derived(self.model.family)
        own: dict[str, Any] = {}
        model: dict[str, Any] = {}
        of_task: dict[str, Any] = {}
        for key, value in overrides.items():
            if key in fixed:
                raise RunError(f"setting {key!r} cannot be set: {fixed[key]}")
            if key not in allowed:
                if any(key in entry.settings for entry in entries()):
                    raise RunError(f"setting {key!r} has no effect on models of the family {self.model.family!r}")
                raise RunError(f"unknown setting {key!r}: {did_you_mean(key, allowed)}")
            head, _, rest = key.rpartition(".")
            into = model if head else of_task if key in self.own else own
            into[rest] = typed_value(value, allowed[key], f"setting {key}")
        if model.get("num_experts", self.model.num_experts) != self.model.num_experts and "eval_top_k" not in own:
            own["eval_top_k"] = ()  # the default of the new number of experts
        shape = replace(self.model, **{**model, "top_k": 1})  # which fits any number of experts; the schedule sets it
        return replace(self, model=shape, own={**self.own, **of_task}, **own)

    def with_vocabulary(self, size: int) -> RunConfig:
        """A copy whose model has the vocabulary of the data, if it reads tokens."""
        model: Any = self.model
        if not model.reads_tokens:
            return self
        return replace(self, model=replace(model, vocab_size=size))

    def differing(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """The settings in which another training would be the result: name -> (own value, the other's)."""
        free = without_effect(self.model.family)
        if self.choose != "last":
            free = free - {"validate_every", "eval_tokens"}  # when, and of how many rows, a validation chooses
        return {name: values for name, values in differing_settings(self, other).items() if name not in free}

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: tuples are lists, the model is a dict of its own."""
        values = dataclasses.asdict(self)
        model = {"family": self.model.family, **values["model"]}
        own = values.pop("own")
        plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **values, **own, "model": model}))
        return plain

    def to_json(self) -> str:
        """The content of `config.json`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config") -> RunConfig:
        """What `to_dict` gave; strict.

        Raises:
            RunError: another format, an unknown setting, a value of another type or out of range.
        """
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, Mapping) else type(values).__name__
            raise RunError(f"{where}: not a run configuration of format {FORMAT} (format is {found!r})")
        own = {key: value for key, value in values.items() if key not in ("format", "model")}
        model = values.get("model")
        if not isinstance(model, Mapping):
            raise RunError(f"{where}: model is missing")
        try:
            kind = family(model.get("family", OLDEST))
        except ValueError as error:
            raise RunError(f"{where}: {error}") from None
        known = own_settings(kind.family)
        kinds = {name: type(setting.default) for name, setting in known.items() if name in own}
        of_task = {name: typed_value(own.pop(name), of, f"{where}: {name}") for name, of in kinds.items()}
        own = {name: value for name, value in own.items() if name not in EARLIER - known.keys()}
        kept = typed_fields(cls, own, f"{where}: ", leave=("model",))
        import_recorded(str(model.get("router", "smoe")), kept.get("imports", ()))
        values = {key: value for key, value in model.items() if key != "family" and GONE.get(key, ...) != value}
        typed = typed_fields(kind, values, f"{where}: model.")
        try:
            return cls(model=kind(**typed), own=of_task, **kept)
        except ValueError as error:
            raise RunError(f"{where}: {error}") from None

    @classmethod
    def from_json(cls, text: str, where: str = "config") -> RunConfig:
        """What `to_json` gave; errors as in `from_dict`."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise RunError(f"{where} is not JSON: {error}") from None
        return cls.from_dict(values, where)


_POSITIVE = (
    "steps", "batch_size", "segment_length", "accumulation", "eval_batch_size", "eval_segment_length",
    "keep_checkpoints", "log_every", "observe_every",
)  # fmt: skip
_NOT_NEGATIVE = (
    "seed", "memory_length", "eval_memory_length", "warmup_steps", "clip_norm", "weight_decay", "final_learning_rate",
    "validate_every", "checkpoint_every",
)  # fmt: skip


@cache
def settings(family_name: str = OLDEST) -> Mapping[str, Any]:
    """Every setting that `--set` takes, with its type; those of a family's model as "model.…"."""
    own = {name: kind for name, kind in _kinds(RunConfig).items() if name != "model"}
    own |= {name: type(setting.default) for name, setting in own_settings(family_name).items()}
    model = {f"model.{name}": kind for name, kind in _kinds(family(family_name)).items()}
    fixed = derived(family_name)
    return types.MappingProxyType({name: kind for name, kind in {**own, **model}.items() if name not in fixed})


def differing_settings(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two runs differ: name -> (value in one, value in the other)."""
    first, second = flat(one.to_dict()), flat(other.to_dict())
    names = dict.fromkeys([*first, *second])
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def _kinds(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass with their types."""
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def _at_least(name: str, value: float, least: int) -> None:
    whole = name not in ("clip_norm", "weight_decay", "final_learning_rate")
    largest = most(name, int if whole else float)
    right = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    if not right or not least <= value <= largest:
        kind = "whole numbers" if whole else "numbers"
        raise RunError(f"{name}={value!r}: allowed are {kind} from {least} to {upper(largest)}")
