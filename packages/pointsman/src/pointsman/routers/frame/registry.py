"""The grammar of router specs, and building a router from a spec.

    name[:option=value]*[+mixer[:option=value]*]        xmoe:gate=sigmoid:routing_dim=8+similarity:tau=0.1

A named router is a function `(layer, *, option=default, …) -> Stages`; its signature is the schema that options are
checked against, its docstring what `pointsman routers NAME` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from pointsman._errors import did_you_mean
from pointsman._values import check_whole, convert, written
from pointsman.routers.frame.balance import Balance
from pointsman.routers.frame.capacity import Capacity
from pointsman.routers.frame.entries import (
    BASELINES,
    COMMON,
    MIXERS,
    ROUTERS,
    Entry,
    LayerSpec,
    entry,
    has_one_k,
    is_baseline,
    list_mixers,
    list_routers,
    register_mixer,
    register_router,
)
from pointsman.routers.frame.router import Router, check_top_k
from pointsman.routers.frame.select import TopK
from pointsman.routers.frame.stages import Mixer, Selector, Softmax, Stages

__all__ = [
    "BASELINES",
    "COMMON",
    "MIXERS",
    "ROUTERS",
    "Entry",
    "LayerSpec",
    "ParsedSpec",
    "build_router",
    "build_routers",
    "entry",
    "format_spec",
    "has_one_k",
    "is_baseline",
    "list_mixers",
    "list_routers",
    "parse_spec",
    "register_mixer",
    "register_router",
    "split_specs",
]


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
    if name in MIXERS:
        if len(parts) == 2:
            raise ValueError(f"router spec {spec!r}: {name!r} is a mixer; put a router before '+'")
        name, options, mixer, mixer_options = "smoe", {}, name, options
    elif len(parts) == 2:
        mixer, mixer_options = _parse_part(parts[1], spec)
        if mixer not in MIXERS:
            raise ValueError(f"router spec {spec!r}: unknown mixer {mixer!r}: {did_you_mean(mixer, MIXERS)}")
    if name in BASELINES:
        if options or mixer:
            raise ValueError(f"router spec {spec!r}: {name!r} has no router and takes no options")
        return ParsedSpec(name, {}, None, {})
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}: {did_you_mean(name, ROUTERS | MIXERS | BASELINES)}")
    _convert(options, ROUTERS[name], spec, COMMON)
    if mixer is not None:
        _convert(mixer_options, MIXERS[mixer], spec)
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
    both = (entry,) if extra is None else (extra, entry)
    schema = {key: option for one in both for key, option in one.options.items()}
    ranges = {key: allowed for one in both for key, allowed in one.allowed.items()}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in schema:
            raise ValueError(f"router spec {spec!r}: {entry.name!r} has no option {key!r}: {did_you_mean(key, schema)}")
        values[key] = value = convert(value, schema[key].annotation, f"router spec {spec!r}: option {key}")
        if value is not None and key in ranges and not ranges[key].holds(value):
            raise ValueError(f"{entry.name}: option {key}={value}: allowed are {ranges[key].words}")
    return values


def build_router(
    spec: str,
    *,
    dim: int,
    num_experts: int,
    top_k: int = 2,
    shared: dict[str, nn.Module] | None = None,
    vocab_size: int | None = None,
    place: int = 0,
    **options: Any,
) -> Router:
    """Builds the router that `spec` names.

    Args:
        spec: `name[:option=value]*[+mixer[:option=value]*]`.
        dim: width of the hidden states.
        num_experts: E.
        top_k: experts a token at construction (`set_top_k` changes it later). A router may start at a k of its own:
            `switch` at 1.
        shared: modules that several routers share; `build_routers` passes one dict for a whole model.
        vocab_size: the number of token ids, for routers that look at them.
        place: how many sparse layers are below it, for routers that draw other tables in each layer.
        options: the router's options by keyword, on top of the spec's.

    Raises:
        ValueError: an unknown name or option, or a value out of range, with what is allowed and the nearest name.
    """
    parsed = parse_spec(spec)
    if parsed.router in BASELINES:
        raise ValueError(f"{parsed.router!r} is a baseline without a router; models build it from the spec themselves")
    for name, value in (("dim", dim), ("num_experts", num_experts)):
        check_whole(name, value)
    if vocab_size is not None:
        check_whole("vocab_size", vocab_size)
    entry = ROUTERS[parsed.router]
    check_whole("place", place, least=0)
    shared = {} if shared is None else shared
    layer = LayerSpec(dim, num_experts, check_top_k(top_k, num_experts), shared, vocab_size, place=place)
    values = _convert({**parsed.options, **options}, entry, spec, COMMON)
    common = {name: option.default for name, option in COMMON.options.items()} | {"balance": entry.balance}
    common |= {name: values.pop(name) for name in COMMON.options if name in values}
    given = {name for name, value in common.items() if value != COMMON.options[name].default}
    renormalize = common.pop("renormalize")
    layer.renormalize = entry.renormalize(layer) if renormalize is None else renormalize
    stages: Stages = entry.build(layer, **values)
    mixer: Mixer | None = None
    if parsed.mixer is not None:
        mixer_entry = MIXERS[parsed.mixer]
        mixer = mixer_entry.build(layer, **_convert(parsed.mixer_options, mixer_entry, spec))
    select: Selector = stages.select or TopK(layer.renormalize)
    overridden = select.overrides | ({"renormalize"} if select.renormalize != renormalize else set())
    for name in sorted(overridden & given):
        raise ValueError(f"router spec {spec!r}: {parsed.router} has its own rule for {name}; leave the option out")
    temperature = stages.balance_temperature
    training, evaluation = common.pop("capacity"), common.pop("eval_capacity")
    order, scope, unit = (common.pop(f"capacity_{name}") for name in ("order", "scope", "unit"))
    limit: Capacity | None = None
    if training is not None or evaluation is not None:
        limit = Capacity(training, training if evaluation is None else evaluation, order, scope, unit)
    elif (order, scope, unit) != ("token", "sequence", "share"):
        names = "capacity_order, capacity_scope and capacity_unit"
        raise ValueError(f"router spec {spec!r}: {names} need capacity or eval_capacity")
    balancing = Balance(
        scope=common.pop("balance_scope"),
        basis=common.pop("balance_on"),
        temperature=temperature,
        reuse=isinstance(stages.normalize, Softmax) and temperature == 1.0,
        counted=stages.counted,
        pooled=len(stages.virtual) if len(set(stages.virtual) - {"constant"}) == len(set(stages.virtual)) == 1 else 0,
    )
    return Router(
        stages,
        select,
        mix=mixer,
        spec=format_spec(parsed, options) if options else spec.strip(),
        dim=dim,
        num_experts=num_experts,
        top_k=_first_k(entry, layer),
        balancing=balancing,
        fixed_k=entry.fixed_k,
        limit=limit,
        **common,
    )


def _first_k(entry: Entry, layer: LayerSpec) -> int:
    if entry.fixed_k:
        return layer.num_experts
    return layer.top_k if entry.starts_at is None else entry.starts_at(layer)


def format_spec(parsed: ParsedSpec, options: dict[str, Any]) -> str:
    """The spec with `options` of the router on top of its own."""

    def part(name: str, values: Mapping[str, Any]) -> str:
        return name + "".join(f":{key}={written(value)}" for key, value in values.items())

    router = part(parsed.router, {**parsed.options, **options})
    return router if parsed.mixer is None else f"{router}+{part(parsed.mixer, parsed.mixer_options)}"


def build_routers(
    spec: str | Sequence[str],
    *,
    layers: int,
    dim: int,
    num_experts: int,
    top_k: int = 2,
    vocab_size: int | None = None,
) -> list[Router]:
    """One router for each of `layers` sparse layers; several specs (`a|b` or a list) are cycled.

    Routers of one call share what their options say is shared (`hyperrouter:share=true`: one hypernetwork).

    Raises:
        ValueError: what `build_router` raises.
    """
    specs = split_specs(spec)
    shared: dict[str, nn.Module] = {}
    return [
        build_router(
            specs[layer % len(specs)],
            dim=dim,
            num_experts=num_experts,
            top_k=top_k,
            shared=shared,
            vocab_size=vocab_size,
            place=layer,
        )
        for layer in range(layers)
    ]
