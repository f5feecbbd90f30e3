"""What an audit tries on the model: an expert without output, and schedules of k by layer.

Both are searched on one half of some text and verified on the other half, paired with the model as it is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise, product
from statistics import mean
from typing import Any

from torch import nn

from pointsman.hf.gates import Gate
from pointsman.hf.top_k import TopKField, gate_top_k
from pointsman_lab.checkpoints.audit.blocks import row_losses
from pointsman_lab.checkpoints.outputs import expert_sums, why_unreadable, without_expert
from pointsman_lab.checkpoints.text import PADDING, TEXT, Batches, TextBatch
from pointsman_lab.intervals import ratio

TRIED = 8
"""Experts whose output is removed, those with the largest output; all of them in a model with at most EVERY."""
EVERY = 32
EXACT = 128
"""Schedules that are all tried; above, k is lowered step by step."""

Rows = Sequence[tuple[float, int]]
"""(nats, tokens) of the parts of all rows."""


def halves(batches: Batches) -> tuple[list[TextBatch], list[TextBatch]]:
    """Every second row of the text, and the others."""
    found: tuple[list[TextBatch], list[TextBatch]] = ([], [])
    start = 0
    for one in batches:
        for half, into in enumerate(found):
            first = (half - start) % 2
            if len(one.ids) > first:
                into.append(TextBatch(one.ids[first::2], one.kinds[first::2]))
        start += len(one.ids)
    return found


def predicts(batches: Batches) -> bool:
    """Whether a row has a text token after another token."""
    return any(bool(((one.kinds[:, 1:] == TEXT) & (one.kinds[:, :-1] != PADDING)).any()) for one in batches)


def measured(model: nn.Module, batches: Batches) -> Rows:
    return [part for batch in batches for row in row_losses(model, batch) or () for part in row]


def mean_of(rows: Rows) -> float:
    return sum(nats for nats, _ in rows) / max(1, sum(tokens for _, tokens in rows))


def paired(rows: Rows, base: Rows, comparisons: int = 1) -> dict[str, Any]:
    """The difference of two settings on the same rows, in nats a token."""
    tops = [nats - other for (nats, _), (other, _) in zip(rows, base, strict=True)]
    return ratio(tops, [tokens for _, tokens in rows], comparisons)


def verdict(rise: Mapping[str, Any], loss: float, margin: float) -> dict[str, Any]:
    """A rise as a share of the loss, and whether it is within the margin; None where its interval does not decide."""
    change, half = rise["mean"] / loss, None if rise["half"] is None else rise["half"] / loss
    within = None if half is None else True if change + half <= margin else False if change - half > margin else None
    return {"share": change, "share_half": half, "within": within}


def super_experts(model: nn.Module, gates: Sequence[Gate], search: Batches, held_out: Batches) -> list[dict[str, Any]]:
    """The experts without whose output the loss changes most, largest first.

    In a model with many experts those with the largest output (max |f_i| over tokens) are tried.

    Raises:
        ValueError: the output of an expert cannot be read.
    """
    for gate in gates:
        if reason := why_unreadable(gate):
            raise ValueError(reason)
    with expert_sums(gates) as found:
        for batch in search:
            found.mask = (batch.kinds == TEXT).reshape(-1)
            row_losses(model, batch)
    peaks = [(float(found.layers[g.layer]["peak"][e]), g, e) for g in gates for e in range(g.num_experts)]
    if len(peaks) > EVERY:
        peaks = sorted(peaks, key=lambda one: -one[0])[:TRIED]
    base = measured(model, held_out)
    rows = []
    for peak, gate, expert in peaks:
        with without_expert(gate, expert):
            rise = paired(measured(model, held_out), base, len(peaks))
        rows.append({"layer": gate.layer, "expert": expert, "peak": peak, **rise})
    rows.sort(key=lambda row: -abs(row["mean"] or 0.0))
    return rows[:TRIED]


@contextmanager
def _schedule(fields: Sequence[TopKField], ks: Sequence[int]) -> Iterator[None]:
    before = [field.value for field in fields]
    try:
        for field, k in zip(fields, ks, strict=True):
            setattr(field.owner, field.attribute, k)
        yield
    finally:
        for field, k in zip(fields, before, strict=True):
            setattr(field.owner, field.attribute, k)


def schedules(
    model: nn.Module, gates: Sequence[Gate], ks: Iterable[int], search: Batches, held_out: Batches, margin: float
) -> list[dict[str, Any]]:
    """Schedules of k by layer with the fewest experts whose loss stays within `margin`, beside one k for all layers.

    Greedy: the layer in which one step down costs least on the first half goes down, while the loss there stays within
    the margin; for a budget, until the mean k is within it, midway between two values of k. Exact: of all schedules,
    where there are at most `EXACT`. Every one is then measured on the other half.

    Returns:
        Rows of {"kind", "ks" by layer, "mean_k", "searched" (rise on the first half, a share of the loss), the paired
        rise on the second half as `ratio` gives it, "share" and "share_half" of the loss, "kept": True where the whole
        interval is within the margin, False where it is beyond, None where the text does not decide}.

    Raises:
        ValueError: the class keeps one k for all layers.
    """
    fields = [gate_top_k(gate) for gate in gates]
    own = tuple(field.value for field in fields)
    if len({(id(field.owner), field.attribute) for field in fields}) < len(fields):
        raise ValueError(f"{type(model).__name__} keeps one k for all layers")
    levels = sorted({*(k for k in ks if k <= min(own)), *own})
    if len(levels) < 2:
        return []

    @cache
    def loss(schedule: tuple[int, ...]) -> float:
        with _schedule(fields, schedule):
            return mean_of(measured(model, search))

    allowed = loss(own) * (1 + margin)
    found: dict[str, tuple[int, ...]] = {f"k = {k}": (k,) * len(own) for k in levels}
    found["greedy"] = _greedy(own, levels, loss, allowed, 0.0)
    every = list(product(levels, repeat=len(own))) if len(levels) ** len(own) <= EXACT else []
    if every:
        within = [one for one in every if loss(one) <= allowed]
        found["exact"] = min(within, key=lambda one: (sum(one), loss(one)), default=own)
    for budget in [(low + high) / 2 for low, high in pairwise(levels)]:
        found[f"greedy, mean k {budget:g}"] = _greedy(own, levels, loss, float("inf"), budget)
        if every:
            found[f"exact, mean k {budget:g}"] = min((one for one in every if mean(one) <= budget), key=loss)
    base = measured(model, held_out)
    scale = mean_of(base)
    rows = []
    for kind, chosen in found.items():
        with _schedule(fields, chosen):
            rise = paired(measured(model, held_out), base, len(found))
        searched, same = loss(chosen) / loss(own) - 1, chosen == own
        of = verdict(rise, scale, margin)
        names = {gate.layer: k for gate, k in zip(gates, chosen, strict=True)}
        rows.append(
            {"kind": kind, "ks": names, "mean_k": mean(chosen), "searched": searched, **rise, "share": of["share"],
             "share_half": None if same else of["share_half"], "kept": True if same else of["within"]}
        )  # fmt: skip
    return rows


def _greedy(own: tuple[int, ...], levels: Sequence[int], loss: Any, allowed: float, budget: float) -> tuple[int, ...]:
    """Each layer's rise is measured alone, once for each level; the steps go in the order of rise a saved expert.

    They stop where the mean k is within the budget, or where none keeps the loss within what is allowed.
    """

    def stepped(ks: tuple[int, ...], layer: int, k: int) -> tuple[int, ...]:
        return (*ks[:layer], k, *ks[layer + 1 :])

    places = [(layer, k) for layer, most in enumerate(own) for k in levels if k <= most]
    rise: Mapping[tuple[int, int], float] = {place: loss(stepped(own, *place)) for place in places}
    now, stuck = own, set[int]()
    while True:
        steps = []
        for layer, k in enumerate(now):
            lower = [one for one in levels if one < k]
            if lower and layer not in stuck:
                steps.append(((rise[layer, lower[-1]] - rise[layer, k]) / (k - lower[-1]), layer, lower[-1]))
        if not steps or mean(now) <= budget:
            return now
        _, layer, k = min(steps)
        tried = stepped(now, layer, k)
        if loss(tried) <= allowed:
            now = tried
        else:
            stuck.add(layer)
