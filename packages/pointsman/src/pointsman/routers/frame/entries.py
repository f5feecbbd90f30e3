"""What is registered: named routers and mixers, with their options as the signature of a function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from torch import nn

from pointsman._errors import did_you_mean
from pointsman._values import convert, settable
from pointsman.routers.frame.stages import NEEDS, Mixer, Normalizer, Scorer, Selector, Stages

BASELINES = {
    "dense": "One feed-forward layer with the parameters of all experts; no router.",
    "dense-dropout": "The dense baseline with dropout 0.1 in its feed-forward layers.",
    "plain": "One feed-forward layer of one expert's width, nothing where `after:` adds one: the papers' dense model.",
    "dense-matched": "As many feed-forward layers as routers have, with the FLOPs a token of the first k of training.",
}
"""Baselines without a router: models build them, `compare` lists them."""

RESERVED = {*BASELINES, "oracle", "all"}
"""Names that no router or mixer can have: `pointsman exam` has a row "oracle", and takes "all" for every router."""


def has_one_k(spec: str) -> bool:
    """Whether k is always the number of experts: a baseline, or a router with `fixed_k`."""
    parts = [part.partition("+")[0].rpartition("@")[2].partition(":")[0].strip() for part in spec.split("|")]
    return any(name in BASELINES or (name in ROUTERS and ROUTERS[name].fixed_k) for name in parts)


class Allowed(NamedTuple):
    """Which values an option may have, in words and as a test: part of its annotation, as in `NotNegative`."""

    words: str
    holds: Callable[[Any], bool]


NotNegative = Annotated[float, Allowed("numbers from 0", lambda value: value >= 0)]
Positive = Annotated[float, Allowed("numbers above 0", lambda value: value > 0)]
Probability = Annotated[float, Allowed("numbers from 0 to 1", lambda value: 0 <= value <= 1)]
BelowOne = Annotated[float, Allowed("numbers from 0, below 1", lambda value: 0 <= value < 1)]
Share = Annotated[float, Allowed("numbers above 0, up to 1", lambda value: 0 < value <= 1)]
Whole = Annotated[int, Allowed("whole numbers from 0", lambda value: value >= 0)]
Count = Annotated[int, Allowed("whole numbers from 1", lambda value: value >= 1)]


@dataclass
class LayerSpec:
    """Where a router will stand.

    Attributes:
        dim, num_experts, top_k: the layer's sizes; `top_k` is the k at construction.
        shared: what the routers of one model share (a hypernetwork), by key.
        vocab_size: how many token ids there are; None where the model does not say (`need_vocab_size`).
        place: how many sparse layers are below it in the model.
        renormalize: whether the k weights are divided by their sum: the option, or the choice's default.
        virtual: the kinds of the virtual experts that the choice's options `nulls` and `kind` ask for.
        scores, choice: the names of both halves.
    """

    dim: int
    num_experts: int
    top_k: int
    shared: dict[str, nn.Module] = field(default_factory=dict)
    vocab_size: int | None = None
    renormalize: bool = True
    place: int = 0
    virtual: tuple[str, ...] = ()
    scores: str = ""
    choice: str = ""

    @property
    def columns(self) -> int:
        """How many experts are scored: E and the virtual ones."""
        return self.num_experts + len(self.virtual)

    def need_vocab_size(self, router: str) -> int:
        """The vocabulary's size; ValueError where it is not known."""
        if self.vocab_size is None:
            raise ValueError(f"{router}: the router routes by token ids and needs vocab_size, the number of token ids")
        return self.vocab_size


@dataclass(frozen=True)
class Entry:
    """A registered router or mixer; the fields are `register_router`'s arguments.

    Attributes:
        build: the scores, `(layer, *, options) -> Stages`; a mixer, `(layer, *, options) -> Mixer`.
        choose: the choice, `(layer, stages, *, options) -> Stages`; None: the k best.
    """

    name: str
    build: Callable[..., Any]
    summary: str
    paper: str
    balance: float = 0.0
    renormalize: Callable[[LayerSpec], bool] = lambda layer: True
    starts_at: Callable[[LayerSpec], int] | None = None
    fixed_k: bool = False
    choose: Callable[..., Any] | None = None
    needs: str = "positive"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def of_scores(self) -> dict[str, inspect.Parameter]:
        """The options of the scores (of the mixer) by name, with annotation and default."""
        found = _options(self.build)
        return {name: one.replace(default=self.defaults.get(name, one.default)) for name, one in found.items()}

    @cached_property
    def of_choice(self) -> dict[str, inspect.Parameter]:
        """The options of the choice by name."""
        return {} if self.choose is None else _options(self.choose)

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Its own options by name, of both halves."""
        return {**self.of_scores, **self.of_choice}

    @cached_property
    def allowed(self) -> dict[str, Allowed]:
        """The range of each option that has one."""
        both = [get_type_hints(one, include_extras=True) for one in (self.build, self.choose) if one is not None]
        parts = [(name, part) for hints in both for name, hint in hints.items() for part in (hint, *get_args(hint))]
        return {name: part.__metadata__[0] for name, part in parts if get_origin(part) is Annotated}

    def check_range(self, name: str, value: Any, where: str) -> None:
        """ValueError, which begins with `where`, for a value out of the option's range."""
        one = self.allowed.get(name) or COMMON.allowed.get(name)
        if one is not None and isinstance(value, int | float) and not one.holds(value):
            raise ValueError(f"{where}={value}: allowed are {one.words}")

    @property
    def halves(self) -> tuple[str, str]:
        """What it is as scores and what as choice, a line each, without what they are of another router."""
        choice = (inspect.getdoc(self.choose) or "") if self.choose else "The k best."
        scores = inspect.getdoc(self.build) or ""
        return scores.partition("\n")[0], choice.partition("\n")[0]


def _options(build: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    if not inspect.isfunction(build):
        raise ValueError(f"a router or mixer is registered from a function of its own (def), not from {build!r}")
    hints, given = get_type_hints(build), inspect.signature(build).parameters
    found = {name: one for name, one in given.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    for name in [name for name, one in given.items() if name not in found and one.default is not one.empty]:
        raise ValueError(f"{build.__name__}: option {name!r} must come after a *: (layer, *, {name}: float = …)")
    needed = {name: "a default" for name, one in found.items() if one.default is one.empty}
    for name in [name for name in found if not settable(hints.get(name))]:
        needed[name] = f"bool, int, float or Literal, not {hints[name]}" if name in hints else "a type"
    for name, what in needed.items():
        raise ValueError(f"{build.__name__}: option {name!r} needs {what}, as in {name}: float = …")
    return {name: one.replace(annotation=hints[name]) for name, one in found.items()}


ROUTERS: dict[str, Entry] = {}
MIXERS: dict[str, Entry] = {}


def _common(
    *, balance: NotNegative = 0.0, balance_scope: Literal["batch", "sequence", "step"] = "batch",
    balance_on: Literal["softmax", "scores"] = "softmax", z_loss: NotNegative = 0.0, capacity: Positive | None = None,
    eval_capacity: Positive | None = None,
    capacity_order: Literal["token", "rank", "priority", "probs", "random"] = "token",
    capacity_scope: Literal["sequence", "batch"] = "sequence", capacity_unit: Literal["share", "tokens"] = "share",
    capacity_rounding: Literal["ceil", "round"] = "ceil", capacity_multiple: Count = 1,
    capacity_total: Literal["kept", "one"] = "kept", renormalize: bool | None = None, scale: Positive = 1.0,
    lr_scale: Positive = 1.0, weigh: Literal["output", "input"] = "output", dense_gradient: bool = False,
) -> None:  # fmt: skip
    """The options of every router.

    balance: weight of the balance loss E sum_i f_i P_i, which is 1 at perfect balance.
    balance_scope: f and P over the micro-batch (batch); of each sequence, then the mean (sequence); f over all
        micro-batches of the optimizer step so far (step).
    balance_on: P is the mean of softmax(logits) or of the scores divided by their sum.
    z_loss: weight of the mean squared log-sum-exp of the logits.
    capacity: an expert takes at most ceil(capacity T k / E) assignments of a sequence (none = all of them).
    eval_capacity: the same in evaluation (none = capacity).
    capacity_order: earlier tokens first (token); all first choices before all second ones (rank); the same with the
        tokens of the largest probability first (priority, V-MoE) or in a drawn order (random, DeepSpeed); the
        assignments of the largest probability first (probs, Megatron-core).
    capacity_scope: T is the length of each sequence (sequence), or all tokens of the micro-batch together (batch).
    capacity_unit: capacity is that share of T k / E, or the number of assignments itself (tokens).
    capacity_rounding: the share is rounded up (ceil), or to the nearest whole number (round, V-MoE).
    capacity_multiple: the limit is rounded up to a multiple of this (V-MoE: 4).
    capacity_total: weights stay as they were when others of the token are dropped (kept), or are divided by their sum
        again (one, DeepSpeed).
    renormalize: whether the k weights are divided by their sum (none = as the router's paper does).
    scale: factor of the combine weights, after renormalisation (DeepSeek-V3's routed_scaling_factor).
    lr_scale: the router's parameters train with this times the learning rate (read by pointsman's trainer).
    weigh: whether a combine weight multiplies the expert's output or, as in Llama 4, its input.
    dense_gradient: the router's gradient is that of all experts' outputs (DenseMixer); in backward all experts run.
    """


COMMON = Entry("all", _common, inspect.getdoc(_common) or "", "")


def _add(table: dict[str, Entry], new: Entry) -> None:
    """Registers `new`; the same function of the same file may come again, as when a notebook's cell runs again."""
    if new.name in RESERVED or not re.fullmatch(r"[^\s:@+|,=]+", new.name):
        told = "it is reserved" if new.name in RESERVED else "allowed is a word without any of : @ + | , ="
        raise ValueError(f"a router or mixer cannot be called {new.name!r}: {told}")
    for known in (ROUTERS.get(new.name), MIXERS.get(new.name)):
        if known is not None and _place(known.choose or known.build) != _place(new.choose or new.build):
            raise ValueError(f"the name {new.name!r} is taken: {_place(known.build)[0]} registers it; choose another")
    for name in sorted(new.options.keys() & COMMON.options) if table is ROUTERS else []:
        raise ValueError(f"router {new.name!r}: every router has an option {name!r}; choose another name for yours")
    for name, one in new.options.items():
        if one.default is not None:
            new.check_range(name, convert(one.default, one.annotation, where := f"{new.name}: default {name}"), where)
    new.check_range("balance", new.balance, f"{new.name}: balance")
    for words, names in ((new.needs.replace("|", " ").split() or [""], set(NEEDS)), (new.defaults, set(new.of_scores))):
        for word in [word for word in words if word not in names]:
            raise ValueError(f"router {new.name!r}: unknown {word!r}: {did_you_mean(word, names)}")
    table[new.name] = new


def _place(build: Callable[..., Any]) -> tuple[str, str]:
    code = getattr(build, "__code__", None)
    return build.__module__ if code is None else code.co_filename, getattr(build, "__qualname__", repr(build))


def register_router(
    name: str, *, paper: str, scores: Callable[..., Stages] | None = None, defaults: Mapping[str, Any] | None = None,
    needs: str = "positive", balance: float = 0.0, renormalize: bool | Callable[[LayerSpec], bool] = True,
    starts_at: Callable[[LayerSpec], int] | None = None, fixed_k: bool = False,
) -> Callable[[Callable[..., Stages]], Callable[..., Stages]]:  # fmt: skip
    """Registers a router under `name`: a function `(layer, *, options) -> Stages`, which gives the scores.

    With `scores` the function is the choice, `(layer, stages, *, options) -> Stages`: it gets the stages of whatever
    scores it is put on, and puts its own selector, losses and steps there. Its options `nulls` and `kind`, if it has
    them, are virtual experts, which scores find in `layer.columns`.

    Args:
        paper: where the router comes from.
        scores: the function that gives the scores under this name alone, for a router that is a choice.
        defaults: its options whose defaults differ under this name.
        needs: what the choice needs of scores, a word of `stages.NEEDS`; several alternatives stand with "|" between.
        balance: default weight of the balance loss.
        renormalize: whether weights are renormalised over the k, or a function of the `LayerSpec` that says so.
        starts_at: the router's first k as a function of the `LayerSpec`, whose `top_k` is the layer's; None: that.
        fixed_k: whether every token uses all experts, so that k is E and cannot be set.

    Raises:
        ValueError: another router or mixer has that name, it is reserved or no name in specs, an option of the function
            lacks a type or default or is one of every router, `needs` or `defaults` has an unknown name, or it is none.
    """

    def add(function: Callable[..., Stages]) -> Callable[..., Stages]:
        always = renormalize if callable(renormalize) else convert(renormalize, bool, f"{name}: renormalize")
        rule = always if callable(always) else lambda layer: always
        weight, fixed = convert(balance, float, f"{name}: balance"), convert(fixed_k, bool, f"{name}: fixed_k")
        new = Entry(
            name, scores or function, _summary(function, scores), paper, weight, rule, starts_at, fixed,
            function if scores else None, needs, defaults or {},
        )  # fmt: skip
        _add(ROUTERS, new)
        return function

    return add


def _summary(function: Callable[..., Any], scores: Callable[..., Any] | None) -> str:
    """The function's docstring, then the lines about options of the scores' that it does not name itself."""
    own = inspect.getdoc(function) or ""
    if scores is None:
        return own
    theirs = (inspect.getdoc(scores) or "").partition("\n\n")[2]
    names = inspect.signature(function).parameters
    kept = [part for part in re.split(r"\n(?=\w+: )", theirs) if part and part.partition(":")[0] not in names]
    gap = "\n" if re.search(r"^\w+: ", own, re.MULTILINE) else "\n\n"
    return own + (gap + "\n".join(kept) if kept else "")


def register_mixer(name: str, *, paper: str) -> Callable[[Callable[..., Mixer]], Callable[..., Mixer]]:
    """Registers a function `(layer, *, options) -> Mixer` under `name`; `name` alone means `smoe+name`."""

    def add(build: Callable[..., Mixer]) -> Callable[..., Mixer]:
        _add(MIXERS, Entry(name, build, inspect.getdoc(build) or "", paper))
        return build

    return add


def list_routers() -> list[str]:
    """Names of all registered routers, sorted. Baselines and mixers are not among them."""
    return sorted(ROUTERS)


def list_mixers() -> list[str]:
    """Names of all registered mixers, sorted."""
    return sorted(MIXERS)


def entry(name: str) -> Entry:
    """The registered router or mixer of that name; ValueError, which names the nearest, if there is none."""
    known = ROUTERS | MIXERS
    if name not in known:
        raise ValueError(f"unknown router {name!r}: {did_you_mean(name, known | BASELINES)}")
    return known[name]


def checked(kind: type, given: Any, where: str, name: str) -> Any:
    """What the function of router or mixer `name` returned; ValueError unless it is of this kind."""
    if not isinstance(given, kind):
        raise ValueError(f"{where}the function of {name!r} returns a {type(given).__name__}, not {kind.__name__}(…)")
    kinds = {"score": Scorer, "normalize": Normalizer, "select": Selector} if kind is Stages else {}
    for stage, of in kinds.items():
        found = getattr(given, stage)
        if not isinstance(found, of) and (found is not None or of is not Selector):
            raise ValueError(f"{where}Stages({stage}={found!r:.80}) of {name!r} must be a {of.__name__}(…)")
    return given
