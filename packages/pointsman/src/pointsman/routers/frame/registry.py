"""The grammar of router specs, and building a router from a spec.

    scores[:option=value]*[@choice[:option=value]*][+mixer[:option=value]*]   xmoe:tau0=0.1@loss-free:nulls=1+uniform

`A@B` has the scorer and the gate of router A, and the selection, the losses, the virtual experts and the state of B; a
bare name has both halves of its own. The signatures of the registered functions are the schema that options are checked
against, their docstrings what `pointsman routers NAME` prints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from pointsman._errors import did_you_mean
from pointsman._values import check_whole, convert, written
from pointsman.routers.frame import steps
from pointsman.routers.frame.entries import (
    BASELINES,
    COMMON,
    MIXERS,
    ROUTERS,
    Entry,
    LayerSpec,
    checked,
    entry,
    has_one_k,
    list_mixers,
    list_routers,
    register_mixer,
    register_router,
)  # fmt: skip
from pointsman.routers.frame.router import Router, check_top_k
from pointsman.routers.frame.stages import NEEDS, Mixer, Selector, Stages, TopK

__all__ = [
    "BASELINES", "COMMON", "MIXERS", "ROUTERS", "Entry", "LayerSpec", "entry", "has_one_k", "list_mixers",
    "list_routers", "register_mixer", "register_router",
]  # fmt: skip


class ParsedSpec(NamedTuple):
    """A router spec taken apart; options are still strings.

    Attributes:
        router, options: the scores; of a bare name the whole router, with the options of both halves.
        choice, choice_options: what follows "@"; None for a bare name.
    """

    router: str
    options: dict[str, str]
    mixer: str | None = None
    mixer_options: dict[str, str] = {}  # noqa: RUF012 - never changed
    choice: str | None = None
    choice_options: dict[str, str] = {}  # noqa: RUF012

    @property
    def chooses(self) -> str:
        """The name of the router that chooses."""
        return self.choice or self.router


def parse_spec(spec: str) -> ParsedSpec:
    """Takes a spec apart and checks its names and options; ValueError says what is wrong and what is allowed."""
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"a router spec must be a name such as 'smoe', got {spec!r}")
    parts = spec.strip().split("+")
    if len(parts) > 2:
        raise ValueError(f"router spec {spec!r}: at most one mixer, as in 'smoe+similarity'")
    if "@" in parts[-1] and len(parts) == 2:
        raise ValueError(f"router spec {spec!r}: the mixer comes last: scores@choice+mixer")
    pair = parts[0].split("@")
    if len(pair) > 2:
        raise ValueError(f"router spec {spec!r}: at most one choice, as in 'xmoe@loss-free'")
    name, options = parsed_part(pair[0], spec)
    mixer, mixer_options = parsed_part(parts[1], spec) if len(parts) == 2 else (None, {})
    choice, choice_options = parsed_part(pair[1], spec) if len(pair) == 2 else (None, {})
    if "" in (name, mixer, choice):
        raise ValueError(f"router spec {spec!r}: a name is missing, before or after '@' or '+'")
    if name in MIXERS and mixer is None and choice is None:
        name, options, mixer, mixer_options = "smoe", {}, name, options
    for one in (name, choice):
        if one in MIXERS:
            raise ValueError(f"router spec {spec!r}: {one!r} is a mixer; put it behind '+'")
    if mixer in ROUTERS:
        raise ValueError(f"router spec {spec!r}: {mixer!r} is a router; what follows '+' is a mixer, '@' a choice")
    if mixer is not None and mixer not in MIXERS:
        raise ValueError(f"router spec {spec!r}: unknown mixer {mixer!r}: {did_you_mean(mixer, MIXERS)}")
    if name in BASELINES or choice in BASELINES:
        if options or mixer or choice:
            one = name if name in BASELINES else choice
            raise ValueError(f"router spec {spec!r}: {one!r} has no router and takes no options")
        return ParsedSpec(name, {})
    for one, allowed in ((name, ROUTERS | MIXERS | BASELINES), (choice, ROUTERS)):
        if one is not None and one not in ROUTERS:
            raise ValueError(f"unknown router {one!r}: {did_you_mean(one, allowed)}")
    parsed = ParsedSpec(name, options, mixer, mixer_options, choice, choice_options)
    halves(parsed, spec)
    if mixer is not None:
        converted(mixer_options, MIXERS[mixer].options, MIXERS[mixer], spec)
    return parsed


def split_specs(spec: str | Sequence[str]) -> list[str]:
    """`a|b` or a list of specs -> the list that is cycled over the sparse layers, each checked."""
    specs = spec.split("|") if isinstance(spec, str) else list(spec)
    if not specs:
        raise ValueError("router specs: the list is empty; it needs at least one")
    for one in specs:
        parse_spec(one)
    return specs


def parsed_part(text: str, spec: str) -> tuple[str, dict[str, str]]:
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


def halves(parsed: ParsedSpec, spec: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """All options of the scores, of the choice and of every router, defaults among them, in their types."""
    scores, choice = ROUTERS[parsed.router], ROUTERS[parsed.chooses]
    after, given, chosen = {**COMMON.options, **choice.of_choice}, parsed.options, parsed.choice_options
    if parsed.choice is None:
        own = both = converted(given, {**after, **scores.of_scores, **scores.of_choice}, scores, spec)
        # where both halves have an option of the same name, one that this name settles is the choice's
        own = {name: one for name, one in both.items() if name not in scores.of_choice or name not in scores.defaults}
    else:
        for names, mine, theirs, half, place in (
            (given, scores.of_scores, {**after, **scores.of_choice}, "choice", "after"),
            (chosen, after, {**scores.of_scores, **choice.of_scores}, "scores", "before"),
        ):
            for name in names:
                if name not in mine and name in theirs:
                    raise ValueError(f"router spec {spec!r}: {name!r} is an option of the {half}: write it {place} '@'")
        own, both = converted(given, scores.of_scores, scores, spec), converted(chosen, after, choice, spec)
    own_default = {"balance": choice.balance}
    return (
        {name: own.get(name, one.default) for name, one in scores.of_scores.items()},
        {name: both.get(name, one.default) for name, one in choice.of_choice.items()},
        {name: both.get(name, own_default.get(name, one.default)) for name, one in COMMON.options.items()},
    )


def converted(options: Mapping[str, Any], schema: Mapping[str, Any], entry: Entry, spec: str) -> dict[str, Any]:
    """Options checked against the schema and the ranges of `entry`, strings turned into their types."""
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in schema:
            raise ValueError(f"router spec {spec!r}: {entry.name!r} has no option {key!r}: {did_you_mean(key, schema)}")
        values[key] = value = convert(value, schema[key].annotation, f"router spec {spec!r}: option {key}")
        entry.check_range(key, value, f"{entry.name}: option {key}")
    return values


def part(name: str, values: Mapping[str, Any]) -> str:
    return name + "".join(f":{key}={written(value)}" for key, value in values.items())


def build_router(
    spec: str, *, dim: int, num_experts: int, top_k: int = 2, shared: dict[str, nn.Module] | None = None,
    vocab_size: int | None = None, place: int = 0, **options: Any,
) -> Router:  # fmt: skip
    """Builds the router that `spec` names.

    Args:
        spec: `scores[:option=value]*[@choice[:option=value]*][+mixer[:option=value]*]`.
        dim: width of the hidden states.
        num_experts: E.
        top_k: experts a token at first (`set_top_k` changes it). A router may start at a k of its own: `switch` at 1.
        shared: modules that several routers share; `build_routers` passes one dict for a whole model.
        vocab_size: the number of token ids, for routers that look at them.
        place: how many sparse layers are below it, for routers that draw other tables in each layer.
        options: the router's options by keyword, on top of the spec's.

    Raises:
        ValueError: an unknown name or option, a value out of range, a choice on scores that it cannot choose by, or
            what would change nothing; with what is allowed and the nearest name.
    """
    parsed = parse_spec(spec)
    if parsed.router in BASELINES:
        raise ValueError(f"{parsed.router!r} is a baseline without a router; models build it from the spec themselves")
    for name, value, least in (("dim", dim, 1), ("num_experts", num_experts, 1), ("place", place, 0)):
        check_whole(name, value, least=least)
    if vocab_size is not None:
        check_whole("vocab_size", vocab_size)
    first = {n: v for n, v in options.items() if parsed.choice is None or n in ROUTERS[parsed.router].of_scores}
    second = {**parsed.choice_options, **{name: value for name, value in options.items() if name not in first}}
    parsed = parsed._replace(options={**parsed.options, **first}, choice_options=second)  # each in the half that has it
    written_spec = format_spec(parsed) if options else spec.strip()
    where = f"router spec {written_spec!r}: "
    of_scores, of_choice, common = halves(parsed, written_spec)
    entry = ROUTERS[parsed.chooses]
    layer = LayerSpec(dim, num_experts, check_top_k(top_k, num_experts), {} if shared is None else shared, vocab_size)
    layer.place, layer.scores, layer.choice = place, parsed.router, entry.name
    layer.renormalize = entry.renormalize(layer) if common["renormalize"] is None else common["renormalize"]
    if of_choice.get("nulls") == 0 and of_choice.get("kind", "zero") != "zero":
        raise ValueError(f"{where}kind={of_choice['kind']} needs nulls, the number of virtual experts")
    if of_choice.get("counted") == "first" and not common["balance"]:
        raise ValueError(f"{where}counted=first needs balance")
    layer.virtual = steps.virtual_experts(entry.name, of_choice.get("nulls", 0), of_choice.get("kind", "zero"))
    stages, select = _stages(parsed, layer, of_scores, of_choice, where)
    mixer: Mixer | None = None
    if parsed.mixer is not None:
        found = MIXERS[parsed.mixer]
        values = converted(parsed.mixer_options, found.options, found, written_spec)
        mixer = checked(Mixer, found.build(layer, **values), where, parsed.mixer)
    _check_effects(common, stages, select, mixer, where, entry.name, bool(layer.virtual))
    if entry.fixed_k or entry.starts_at is not None:
        top_k = num_experts if entry.starts_at is None else entry.starts_at(layer)
    router = Router(stages, select, mixer, layer, common, spec=written_spec, top_k=top_k, fixed_k=entry.fixed_k)
    sizes: dict[str, Any] = {"dim": dim, "num_experts": num_experts, "vocab_size": vocab_size, "place": place}
    router.fresh = partial(build_router, written_spec, top_k=layer.top_k, **sizes)
    return router


def _stages(
    parsed: ParsedSpec, layer: LayerSpec, of_scores: dict[str, Any], of_choice: dict[str, Any], where: str
) -> tuple[Stages, Selector]:
    """The scores of one router with the choice of another, or of the same."""
    choice = ROUTERS[parsed.chooses]
    stages: Stages = checked(Stages, ROUTERS[parsed.router].build(layer, **of_scores), where, parsed.router)
    if parsed.choice is not None:
        other = [] if choice.choose else [(choice.name, choice.build(replace(layer, shared={})))]
        for name, one in [(parsed.router, stages), *other]:
            if one.select is not None:
                raise ValueError(f"{where}{name!r} is registered as a whole, with its own selector: it has no halves")
    if stages.select is None:
        gives, words = stages.normalize.gives, stages.normalize.words
        if not stages.score.tells_apart:
            gives, words = frozenset({"nothing"}), NEEDS["nothing"]
        if not any(set(one.split()) <= gives for one in choice.needs.split("|")):
            needs = NEEDS[choice.needs.rpartition("|")[2]]
            raise ValueError(f"{where}the choice {choice.name!r} needs {needs}; {parsed.router!r} gives {words}")
    if choice.choose is not None:
        chosen = checked(Stages, choice.choose(layer, replace(stages, losses={}), **of_choice), where, choice.name)
        again = {f"scores_{name}" if name in chosen.losses else name: one for name, one in stages.losses.items()}
        stages = replace(chosen, losses={**again, **chosen.losses})
    return stages, stages.select or TopK(layer.renormalize)


OWNERS = {
    **dict.fromkeys([one for one in COMMON.options if one.startswith("capacity_")], ("capacity", "eval_capacity")),
    "capacity_total": ("capacity",), "balance_scope": ("balance",), "balance_on": ("balance",),
}  # fmt: skip
"""Options that change nothing without one of these others."""


def _check_effects(
    common: Mapping[str, Any], router: Stages, select: Selector, mixer: Mixer | None, where: str, name: str,
    virtual: bool,
) -> None:  # fmt: skip
    """ValueError for what would change nothing."""
    changed = {one for one, value in common.items() if value != COMMON.options[one].default}
    changed |= set() if mixer is None else {"mixer"}
    own_rule = select.overrides | ({"renormalize"} if select.renormalize != common["renormalize"] else set())
    for option in sorted(own_rule & (changed | {f"{one}={common[one]}" for one in changed - {"mixer"}})):
        if option == "mixer":
            raise ValueError(f"{where}{name} does not read mixed scores; leave the mixer out")
        raise ValueError(f"{where}{name} has its own rule for {option}; leave the option out")
    for option in sorted(changed & OWNERS.keys()):
        if not any(common[owner] for owner in OWNERS[option]):
            raise ValueError(f"{where}{option} needs {' or '.join(OWNERS[option])}")
    if (rounded := changed & {"capacity_rounding", "capacity_multiple"}) and common["capacity_unit"] == "tokens":
        raise ValueError(f"{where}{min(rounded)}: capacity_unit=tokens is the number itself; leave the option out")
    if router.eta != 1 and not common["balance"]:
        raise ValueError(f"{where}eta needs balance")
    if common["capacity_order"] in ("probs", "priority") and not router.score.tells_apart:
        raise ValueError(f"{where}capacity_order={common['capacity_order']} needs scores that tell experts apart")
    if "dense_gradient" in changed:
        if type(select).replay is not Selector.replay:
            raise ValueError(f"{where}dense_gradient needs weights that are scores; {name} has a rule of its own")
        if "weigh" in changed or virtual or router.steps:
            raise ValueError(f"{where}dense_gradient: not with weigh=input, nulls, and outputs that {name} changes")
    if "balance_on" in changed and router.gives_softmax:
        raise ValueError(f"{where}balance_on=scores: the scores are softmax(logits) already; leave the option out")
    parts = [part for part in (router.score, router.normalize, select, mixer) if part is not None]
    if "lr_scale" in changed and not any(one.requires_grad for part in parts for one in part.parameters()):
        raise ValueError(f"{where}lr_scale: the router has no parameter that trains")


def format_spec(parsed: ParsedSpec) -> str:
    """The spec that is taken apart so."""
    choice = f"@{part(parsed.choice, parsed.choice_options)}" if parsed.choice else ""
    mixer = f"+{part(parsed.mixer, parsed.mixer_options)}" if parsed.mixer else ""
    return part(parsed.router, parsed.options) + choice + mixer


def build_routers(
    spec: str | Sequence[str], *, layers: int, dim: int, num_experts: int, top_k: int = 2,
    vocab_size: int | None = None,
) -> list[Router]:  # fmt: skip
    """One router for each of `layers` sparse layers; several specs (`a|b` or a list) are cycled.

    Routers of one call share what their options say is shared (`hyperrouter:share=true`: one hypernetwork).

    Raises:
        ValueError: what `build_router` raises.
    """
    specs = split_specs(spec)
    check_whole("layers", layers, least=0)
    built = partial(build_router, dim=dim, num_experts=num_experts, top_k=top_k, vocab_size=vocab_size, shared={})
    return [built(specs[at % len(specs)], place=at) for at in range(layers)]
