"""Named routers and mixers, the spec grammar, and building a router from a spec.

    name[:option=value]*[+mixer[:option=value]*]        xmoe:gate=sigmoid:routing_dim=8+similarity:tau=0.1

A named router is a function `(layer, *, option=default, …) -> Stages`; its signature is the schema that options are
checked against, its docstring what `pointsman routers NAME` prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

from torch import nn

from pointsman._errors import did_you_mean
from pointsman._values import check_whole, convert, written
from pointsman.routers.router import Router, check_top_k
from pointsman.routers.select import Capacity, TopK
from pointsman.routers.stages import Mixer, Selector, Stages

BASELINES = {
    "dense": "One feed-forward layer with the parameters of all experts; no router.",
    "dense-dropout": "The dense baseline with dropout 0.1 in its feed-forward layers.",
}
"""Baselines without a router: models build them, `compare` lists them."""


def is_baseline(spec: str) -> bool:
    """Whether a router setting (a spec, or several) is a baseline, which always stands alone."""
    return spec.partition(":")[0] in BASELINES


@dataclass
class LayerSpec:
    """Where a router will stand.

    Attributes:
        dim, num_experts, top_k: the layer's sizes; `top_k` is the k at construction.
        shared: what the routers of one model share (a hypernetwork), by key.
    """

    dim: int
    num_experts: int
    top_k: int
    shared: dict[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A registered router or mixer."""

    name: str
    build: Callable[..., Any]
    summary: str
    paper: str
    balance: float = 0.0
    renormalize: Callable[[LayerSpec], bool] = lambda layer: True

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Its own options by name, with annotation and default."""
        hints = get_type_hints(self.build)
        return {
            name: parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(self.build).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }


_ROUTERS: dict[str, Entry] = {}
_MIXERS: dict[str, Entry] = {}


def _common(
    *,
    balance: float = 0.0,
    z_loss: float = 0.0,
    capacity: float | None = None,
    renormalize: bool | None = None,
    lr_scale: float = 1.0,
) -> None:
    """The options of every router.

    balance: weight of the balance loss E sum_i f_i P_i, which is 1 at perfect balance.
    z_loss: weight of the mean squared log-sum-exp of the logits.
    capacity: an expert takes at most ceil(capacity T k / E) assignments of a sequence (none = all of them).
    renormalize: whether the k weights are divided by their sum (none = as the router's paper does).
    lr_scale: the router's parameters train with this times the learning rate (read by pointsman's trainer).
    """


COMMON = Entry("all", _common, inspect.getdoc(_common) or "", "")


def register_router(
    name: str, *, paper: str, balance: float = 0.0, renormalize: bool | Callable[[LayerSpec], bool] = True
) -> Callable[[Callable[..., Stages]], Callable[..., Stages]]:
    """Registers a function `(layer, *, options) -> Stages` under `name`.

    Args:
        paper: where the router comes from.
        balance: default weight of the balance loss.
        renormalize: whether weights are renormalised over the k, or a function of the `LayerSpec` that says so.
    """

    def add(build: Callable[..., Stages]) -> Callable[..., Stages]:
        rule = renormalize if callable(renormalize) else lambda layer: bool(renormalize)
        _ROUTERS[name] = Entry(name, build, inspect.getdoc(build) or "", paper, balance, rule)
        return build

    return add


def register_mixer(name: str, *, paper: str) -> Callable[[Callable[..., Mixer]], Callable[..., Mixer]]:
    """Registers a function `(layer, *, options) -> Mixer` under `name`; `name` alone means `smoe+name`."""

    def add(build: Callable[..., Mixer]) -> Callable[..., Mixer]:
        _MIXERS[name] = Entry(name, build, inspect.getdoc(build) or "", paper)
        return build

    return add


def list_routers() -> list[str]:
    """Names of all registered routers, sorted. Baselines and mixers are not among them."""
    return sorted(_ROUTERS)


def list_mixers() -> list[str]:
    """Names of all registered mixers, sorted."""
    return sorted(_MIXERS)


def entry(name: str) -> Entry:
    """The registered router or mixer of that name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    known = _ROUTERS | _MIXERS
    if name not in known:
        raise ValueError(f"unknown router {name!r}: {did_you_mean(name, known | BASELINES)}")
    return known[name]


class ParsedSpec(NamedTuple):
    """A router spec taken apart; options are still strings."""

    router: str
    options: dict[str, str]
    mixer: str | None
    mixer_options: dict[str, str]


def parse_spec(spec: str) -> ParsedSpec:
    """Takes a spec apart and checks its names and options; ValueError says what is wrong and what is allowed."""
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"a router spec must be a name such as 'smoe', got {spec!r}")
    parts = spec.strip().split("+")
    if len(parts) > 2:
        raise ValueError(f"router spec {spec!r}: at most one mixer, as in 'smoe+similarity'")
    name, options = _parse_part(parts[0], spec)
    mixer: str | None = None
    mixer_options: dict[str, str] = {}
    if name in _MIXERS:
        if len(parts) == 2:
            raise ValueError(f"router spec {spec!r}: {name!r} is a mixer; put a router before '+'")
        name, options, mixer, mixer_options = "smoe", {}, name, options
    elif len(parts) == 2:
        mixer, mixer_options = _parse_part(parts[1], spec)
        if mixer not in _MIXERS:
            raise ValueError(f"router spec {spec!r}: unknown mixer {mixer!r}: {did_you_mean(mixer, _MIXERS)}")
    if name in BASELINES:
        if options or mixer:
            raise ValueError(f"router spec {spec!r}: {name!r} has no router and takes no options")
        return ParsedSpec(name, {}, None, {})
    if name not in _ROUTERS:
        raise ValueError(f"unknown router {name!r}: {did_you_mean(name, _ROUTERS | _MIXERS | BASELINES)}")
    _convert(options, _ROUTERS[name], spec, COMMON)
    if mixer is not None:
        _convert(mixer_options, _MIXERS[mixer], spec)
    return ParsedSpec(name, options, mixer, mixer_options)


def split_specs(spec: str | Sequence[str]) -> list[str]:
    """`a|b` or a list of specs -> the list that is cycled over the sparse layers, each checked."""
    specs = spec.split("|") if isinstance(spec, str) else list(spec)
    if not specs:
        raise ValueError("router specs: the list is empty; it needs at least one")
    for one in specs:
        parse_spec(one)
    return specs


def _parse_part(text: str, spec: str) -> tuple[str, dict[str, str]]:
    name, *pieces = text.strip().split(":")
    options: dict[str, str] = {}
    for piece in pieces:
        key, separator, value = piece.partition("=")
        if not separator or not key or not value:
            raise ValueError(f"router spec {spec!r}: {piece!r} is not option=value")
        if key in options:
            raise ValueError(f"router spec {spec!r}: option {key!r} is given twice")
        options[key] = value
    return name, options


def _convert(
    options: dict[str, str] | dict[str, Any], entry: Entry, spec: str, extra: Entry | None = None
) -> dict[str, Any]:
    """Options checked against the signatures of `entry` (and `extra`), strings turned into their types."""
    schema = {**({} if extra is None else extra.options), **entry.options}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in schema:
            raise ValueError(f"router spec {spec!r}: {entry.name!r} has no option {key!r}: {did_you_mean(key, schema)}")
        values[key] = convert(value, schema[key].annotation, f"router spec {spec!r}: option {key}")
    return values


def build_router(
    spec: str, *, dim: int, num_experts: int, top_k: int = 2, shared: dict[str, nn.Module] | None = None, **options: Any
) -> Router:
    """Builds the router that `spec` names.

    Args:
        spec: `name[:option=value]*[+mixer[:option=value]*]`.
        dim: width of the hidden states.
        num_experts: E.
        top_k: experts a token at construction (`set_top_k` changes it later; `switch` always starts at 1).
        shared: modules that several routers share; `build_routers` passes one dict for a whole model.
        options: the router's options by keyword, on top of the spec's.

    Raises:
        ValueError: an unknown name or option, or a value out of range, with what is allowed and the nearest name.
    """
    parsed = parse_spec(spec)
    if parsed.router in BASELINES:
        raise ValueError(f"{parsed.router!r} is a baseline without a router; models build it from the spec themselves")
    for name, value in (("dim", dim), ("num_experts", num_experts)):
        check_whole(name, value)
    entry = _ROUTERS[parsed.router]
    if entry.name == "switch":
        top_k = 1
    layer = LayerSpec(dim, num_experts, check_top_k(top_k, num_experts), {} if shared is None else shared)
    values = _convert({**parsed.options, **options}, entry, spec, COMMON)
    common = {name: values.pop(name) for name in COMMON.options if name in values}
    stages: Stages = entry.build(layer, **values)
    mixer: Mixer | None = None
    if parsed.mixer is not None:
        mixer_entry = _MIXERS[parsed.mixer]
        mixer = mixer_entry.build(layer, **_convert(parsed.mixer_options, mixer_entry, spec))
    for name in ("balance", "z_loss"):
        if common.get(name, 0.0) < 0:
            raise ValueError(f"router spec {spec!r}: option {name}={common[name]}: allowed are numbers from 0")
    if not common.get("lr_scale", 1.0) > 0:
        raise ValueError(f"router spec {spec!r}: option lr_scale={common['lr_scale']}: allowed are numbers above 0")
    renormalize = common.get("renormalize")
    select: Selector = stages.select or TopK(entry.renormalize(layer) if renormalize is None else renormalize)
    if common.get("capacity") is not None:
        if common["capacity"] <= 0:
            raise ValueError(f"router spec {spec!r}: option capacity={common['capacity']}: allowed is a number above 0")
        select = Capacity(select, common["capacity"])
    return Router(
        stages,
        select,
        mix=mixer,
        spec=format_spec(parsed, options) if options else spec.strip(),
        dim=dim,
        num_experts=num_experts,
        top_k=layer.top_k,
        balance=common.get("balance", entry.balance),
        z_loss=common.get("z_loss", 0.0),
        lr_scale=common.get("lr_scale", 1.0),
    )


def format_spec(parsed: ParsedSpec, options: dict[str, Any]) -> str:
    """The spec with `options` of the router on top of its own."""

    def part(name: str, values: Mapping[str, Any]) -> str:
        return name + "".join(f":{key}={written(value)}" for key, value in values.items())

    router = part(parsed.router, {**parsed.options, **options})
    return router if parsed.mixer is None else f"{router}+{part(parsed.mixer, parsed.mixer_options)}"


def build_routers(
    spec: str | Sequence[str], *, layers: int, dim: int, num_experts: int, top_k: int = 2
) -> list[Router]:
    """One router for each of `layers` sparse layers; several specs (`a|b` or a list) are cycled.

    Routers of one call share what their options say is shared (`hyperrouter:share=true`: one hypernetwork).

    Raises:
        ValueError: what `build_router` raises.
    """
    specs = split_specs(spec)
    shared: dict[str, nn.Module] = {}
    return [
        build_router(specs[layer % len(specs)], dim=dim, num_experts=num_experts, top_k=top_k, shared=shared)
        for layer in range(layers)
    ]
