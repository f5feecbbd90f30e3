"""Which specs name the same router: the plainest spec of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pointsman.routers.frame.entries import BASELINES, MIXERS, ROUTERS, Entry, LayerSpec
from pointsman.routers.frame.registry import converted, halves, parse_spec, part


def canonical(spec: str) -> str:
    """The plainest spec of the same router: equal compositions have the same one (`smoe@smoe` is `smoe`).

    Options at their defaults are left out. `A@B` is `B` where B alone has the scores of A, and `A` where A alone has
    the choice of B.
    """
    parsed = parse_spec(spec)
    if parsed.router in BASELINES:
        return parsed.router
    of_scores, of_choice, common = halves(parsed, spec)
    choice, build = ROUTERS[parsed.chooses], ROUTERS[parsed.router].build
    changed = {name: value for name, value in of_choice.items() if value != choice.of_choice[name].default}
    changed |= {name: value for name, value in common.items() if value != choice.common_default(name)}
    virtual = {"nulls", "kind"} & changed.keys()
    alike = [one for one in ROUTERS.values() if _rules(one) == _rules(choice) and (_chosen(one) == _chosen(choice))]
    names = {one.name for one in alike if not virtual or one.choose}
    bare = [one for one in ROUTERS.values() if one.build is build and one.name in names]
    first = min(bare or [one for one in ROUTERS.values() if one.build is build], key=_plainness)
    second = None if bare else min((ROUTERS[name] for name in names), key=_plainness)
    differing = {name: value for name, value in of_scores.items() if value != first.of_scores[name].default}
    text = part(first.name, differing if second else {**differing, **changed})
    text += f"@{part(second.name, changed)}" if second else ""
    if parsed.mixer is None:
        return text
    defaults = MIXERS[parsed.mixer].of_scores
    mixed = converted(parsed.mixer_options, defaults, MIXERS[parsed.mixer], spec)
    return f"{text}+{part(parsed.mixer, {name: one for name, one in mixed.items() if one != defaults[name].default})}"


def same_routers(specs: Sequence[str]) -> list[tuple[str, str]]:
    """Each spec that names the router of an earlier one, and that; specs of a model's layers stand with "|" between."""
    first: dict[str, str] = {}
    found = [(spec, first.setdefault("|".join(map(canonical, spec.split("|"))), spec)) for spec in specs]
    return [(spec, earlier) for spec, earlier in found if spec != earlier]


def _rules(entry: Entry) -> tuple[Any, ...]:
    """What an entry settles besides its functions, as far as two can be told apart by it."""
    layers = [LayerSpec(8, 4, k) for k in (1, 2)]
    first = [entry.starts_at and entry.starts_at(layer) for layer in layers]
    return entry.balance, [entry.renormalize(layer) for layer in layers], first, entry.fixed_k


def _chosen(entry: Entry) -> Any:
    """The function of the choice; that of `smoe` without virtual experts is plain top-k."""
    return None if entry.choose is ROUTERS["smoe"].choose else entry.choose


def _plainness(entry: Entry) -> tuple[bool, int]:
    return entry.name != "smoe", list(ROUTERS).index(entry.name)
