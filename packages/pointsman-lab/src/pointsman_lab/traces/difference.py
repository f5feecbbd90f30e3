"""Where two traces of the same text differ, by how much, and which kind of fault explains it.

Each kind of fault is a rearrangement of one trace: a shift by a token, another order of sequences, batch and time
exchanged, other layers, rows of padding. A kind is named where undoing it removes most of the difference; of what is
left, the share that the noise of the logits predicts is called noise. Nothing is named between equal traces.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pointsman.traces.trace import MISSING, RoutingTrace
from pointsman_lab.traces.noise import LayerDifference, differing, of_layer, other_sets

EXPLAINED = 0.5
"""A rearrangement explains a difference if at most this share of the differing tokens differ still."""
CERTAIN = 4.0
"""Standard errors by which a share must fall, or exceed a prediction, before anything is said."""
UNRELATED = 0.5
"""Logits are called other ones where their differences are more than this share of what they vary by."""
BLOCK = 4096  # tokens of all layers that are compared at once
MOST_SEQUENCES = 2048  # that are matched one by one where their tokens are not known


@dataclass(frozen=True)
class Difference:
    """Attributes:
    kinds: what is between the traces, the largest first; () where they are equal.
    before, after: the share of (token, layer) with other experts, as they are and with the kinds undone.
    layers: layer of the first trace -> what is left.
    undone: both traces with the kinds undone, for `flips`.
    """

    kinds: tuple[str, ...]
    before: float
    after: float
    layers: Mapping[str, LayerDifference]
    undone: tuple[RoutingTrace, RoutingTrace] = field(repr=False)

    @property
    def equal(self) -> bool:
        return not self.kinds

    def to_dict(self) -> dict[str, Any]:
        layers = {name: dict(vars(one)) for name, one in self.layers.items()}
        return {"kinds": list(self.kinds), "before": self.before, "after": self.after, "layers": layers}


def compare(a: RoutingTrace, b: RoutingTrace) -> Difference:
    """What is between two traces of the same text by models that should route alike.

    Raises:
        ValueError: they have other numbers of experts, another k or other token ids, no token whose experts both have,
            or no rearrangement that is known gives them the same tokens.
    """
    kinds: list[str] = []
    b = _same_layers(a, b)
    _check_texts(a, b)
    if not torch.equal(a.lengths, b.lengths):
        a, b, kinds = _same_lengths(a, b)
    if not any(bool(differing(a.experts[layer], b.experts[layer])[1].any()) for layer in a.layers):
        raise ValueError("no token has recorded experts in both traces: there is nothing to compare")
    before = now = _share(a, b)
    if kinds:
        before = 1.0
    found = _explained(a, b, now, [*_token_orders(a, b), *_layer_orders(a, b)])
    if found is None and now:  # one fault can hide another
        pairs = [
            (f"{first}, {second}", one, other)
            for second, left, right in _token_orders(a, b, b.layers)
            for first, one, other in _layer_orders(left, right)
        ]
        found = _explained(a, b, now, pairs)
    if found is not None:
        undone, a, b = found
        now = _share(a, b)
        kinds += undone.split(", ")
    layers = {layer: of_layer(layer, a, b) for layer in a.layers}
    if now:
        kinds.append(_what_is_left(layers))
    return Difference(tuple(kinds), before, now, layers, (a, b))


Undone = tuple[str, RoutingTrace, RoutingTrace]


def _explained(a: RoutingTrace, b: RoutingTrace, now: float, tried: Sequence[Undone]) -> Undone | None:
    """The rearrangement after which least differs, if that is much less than `now`, beyond chance."""
    best = min(tried, key=lambda one: _share(*one[1:]), default=None)
    if best is None or not now or (left := _share(*best[1:])) > EXPLAINED * now:
        return None
    tokens = best[1].tokens  # that have a partner still; those of all layers are taken as one
    return best if now - left > CERTAIN * math.sqrt(max(now * (1 - now), 1 / tokens) / tokens) else None


def _share(a: RoutingTrace, b: RoutingTrace) -> float:
    """The share of (token, layer) with other experts; 1 where nothing can be compared."""
    found = [differing(a.experts[layer], b.experts[layer]) for layer in a.layers]
    known = sum(int(one.sum()) for _, one in found)
    return sum(int(one.sum()) for one, _ in found) / known if known else 1.0


def _same_layers(a: RoutingTrace, b: RoutingTrace) -> RoutingTrace:
    """`b` with the layers of `a`, by name or else in order: engines number them otherwise."""
    if len(a.layers) != len(b.layers):
        ends = "; ".join(f"{one.layers[0]} to {one.layers[-1]}" for one in (a, b))
        raise ValueError(f"{len(a.layers)} layers in one trace, {len(b.layers)} in the other: {ends}")
    names = a.layers if set(a.layers) == set(b.layers) else b.layers
    b = _with_layers(a, b, dict(zip(a.layers, names, strict=True)))
    for layer in a.layers:
        if a.num_experts[layer] != b.num_experts[layer]:
            numbers = f"{a.num_experts[layer]} experts in one trace, {b.num_experts[layer]} in the other"
            raise ValueError(f"layer {layer!r} has {numbers}")
        if a.top_k(layer) != b.top_k(layer):
            raise ValueError(f"layer {layer!r}: a token has {a.top_k(layer)} choices in one trace, {b.top_k(layer)} in "
                             "the other: record both at the same k")  # fmt: skip
    return b


def _check_texts(a: RoutingTrace, b: RoutingTrace) -> None:
    """ValueError where the hashes say that sequences of equal lengths have other tokens."""
    if a.hashes is None or b.hashes is None or not torch.equal(a.lengths.sort().values, b.lengths.sort().values):
        return
    if other := (Counter(a.hashes.tolist()) - Counter(b.hashes.tolist())).total():
        raise ValueError(f"{other:,} of {len(a.hashes):,} sequences have other tokens in the other trace: they are not "
                         "of the same text")  # fmt: skip


def _with_layers(a: RoutingTrace, b: RoutingTrace, of: Mapping[str, str]) -> RoutingTrace:
    """`b` with its layer of[name] as `name`, in the order of `a`."""
    parts = {
        part: {name: values[of[name]] for name in a.layers if of[name] in values}
        for part in ("experts", "weights", "logits", "num_experts", "virtual")
        if (values := getattr(b, part)) is not None
    }
    return replace(b, **parts)  # type: ignore[arg-type]


def _same_lengths(a: RoutingTrace, b: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace, list[str]]:
    """Both traces with sequences of the same lengths, and what was undone for it."""
    if len(a.lengths) == len(b.lengths) and torch.equal(a.lengths.sort().values, b.lengths.sort().values):
        return a, _in_order_of(a, b), ["sequences in another order"]
    if len(a.lengths) == len(b.lengths):
        longer, shorter = (a, b) if a.tokens > b.tokens else (b, a)
        if bool((longer.lengths >= shorter.lengths).all()):
            cut = _without_padding(longer, shorter)
            each = bool((longer.lengths - shorter.lengths == 1).all())
            what = "a token is missing at one end of every sequence" if each else "padding is counted"
            return (cut, b, [what]) if longer is a else (a, cut, [what])
    one, other = f"{len(a.lengths)} sequences of {a.tokens:,} tokens", f"{len(b.lengths)} of {b.tokens:,}"
    raise ValueError(f"{one} in one trace, {other} in the other: they are not of the same text")


def _without_padding(longer: RoutingTrace, shorter: RoutingTrace) -> RoutingTrace:
    """`longer` cut to the lengths of `shorter`, at the end or at the beginning of each sequence: what differs less."""
    pairs = list(zip(_places(longer), shorter.lengths.tolist(), strict=True))
    rows = [part[:length] for part, length in pairs], [part[len(part) - length :] for part, length in pairs]
    cuts = [longer.rows(torch.cat(parts), shorter.lengths, shorter.hashes) for parts in rows]
    return min(cuts, key=lambda cut: _share(shorter, cut))


def _places(trace: RoutingTrace) -> Sequence[Tensor]:
    """The places of each sequence's tokens."""
    return torch.split(torch.arange(trace.tokens), trace.lengths.tolist())


def _in_order_of(a: RoutingTrace, b: RoutingTrace, layers: Sequence[str] = ()) -> RoutingTrace:
    """The sequences of `b` in the order of `a`: by their hashes, or else each by the one that differs least.

    The first layer of `a` is compared with that of `b`, or with the one of these `layers` after which least differs.
    """
    mine = torch.split(a.experts[a.layers[0]].sort(-1).values, a.lengths.tolist())
    lengths, known = b.lengths.tolist(), a.hashes is not None and b.hashes is not None
    marks = [trace.hashes.tolist() if known and trace.hashes is not None else [0] * len(lengths) for trace in (a, b)]
    found = []
    for layer in layers if layers and not known else b.layers[:1]:
        its, free = torch.split(b.experts[layer].sort(-1).values, lengths), list(range(len(lengths)))
        order, total = [], 0.0
        for chosen, mark in zip(mine, marks[0], strict=True):
            fits = [one for one in free if lengths[one] == len(chosen)]
            fits = [one for one in fits if marks[1][one] == mark] or fits
            other, counted = other_sets(chosen, torch.stack([its[one] for one in fits]))
            shares = other.sum(-1, dtype=torch.double) / counted.sum(-1).clamp_min(1)
            order.append(fits[int(shares.argmin())])
            total += float(shares.min())
            free.remove(order[-1])
        found.append((total, order))
    order = min(found, key=lambda one: one[0])[1]
    places = _places(b)
    hashes = None if b.hashes is None else b.hashes[order]
    return b.rows(torch.cat([places[one] for one in order]), b.lengths[order], hashes)


def _token_orders(a: RoutingTrace, b: RoutingTrace, layers: Sequence[str] = ()) -> Iterator[Undone]:
    """(name, a, b) with one kind of fault undone; `layers` of `b`: as of `_in_order_of`."""
    for by in (1, -1):
        yield f"shifted by a token ({by:+d})", *_shifted(a, b, by)
    number = len(a.lengths)
    if 1 < number <= MOST_SEQUENCES:
        yield "sequences in another order", a, _in_order_of(a, b, layers)
        length = int(a.lengths[0])
        if bool((a.lengths == length).all()) and length > 1:
            rows = torch.arange(a.tokens).view(number, length).t().reshape(-1)
            undone = torch.empty_like(rows).scatter_(0, rows, torch.arange(a.tokens))
            for order in (rows, undone):
                yield "batch and sequence exchanged", a, b.rows(order, b.lengths, b.hashes)


def _layer_orders(a: RoutingTrace, b: RoutingTrace) -> Iterator[Undone]:
    """(name, a, b) with the layers turned so that least differs, and with each layer beside the one nearest to it."""
    names = a.layers
    if len({(a.num_experts[name], a.top_k(name)) for name in names}) > 1 or len(names) < 2:
        return
    other, known = _table(a, b)
    every = torch.arange(len(names))
    turned = (every + every[1:, None]) % len(names)
    shares = other[every, turned].sum(1).double() / known[every, turned].sum(1).clamp_min(1)
    by = int(shares.argmin()) + 1
    shown = by if 2 * by <= len(names) else by - len(names)
    matched = dict(zip(names, names[by:] + names[:by], strict=True))
    yield f"layers misaligned by {shown:+d}", a, _with_layers(a, b, matched)
    matched = {name: names[nearest] for name, nearest in zip(names, other.argmin(1).tolist(), strict=True)}
    if len(set(matched.values())) == len(names):  # no two take the same one
        yield "layers in another order", a, _with_layers(a, b, matched)


def _table(a: RoutingTrace, b: RoutingTrace) -> tuple[Tensor, Tensor]:
    """[layers, layers] each: the tokens that differ between a layer of `a` and one of `b`, and those that are known."""
    other, known = (torch.zeros(len(a.layers), len(b.layers), dtype=torch.long) for _ in range(2))
    for tokens in torch.split(torch.arange(a.tokens), BLOCK):
        mine, its = (
            torch.stack([of.experts[name][tokens] for name in of.layers]).sort(-1).values.permute(2, 0, 1).contiguous()
            for of in (a, b)
        )  # [k, layers, tokens]: MISSING comes first
        there = its[0] != MISSING
        for layer in range(len(a.layers)):
            both = there & (mine[0, layer] != MISSING)
            other[layer] += ((mine[:, layer, None] != its).any(0) & both).sum(-1)
            known[layer] += both.sum(-1)
    return other, known


def _shifted(a: RoutingTrace, b: RoutingTrace, by: int) -> tuple[RoutingTrace, RoutingTrace]:
    """Token t of `a` beside token t + by of `b`, inside each sequence; the ends that have no partner are left out."""
    ends = a.lengths.cumsum(0)
    first = (ends - a.lengths).repeat_interleave(a.lengths)
    last = (ends - 1).repeat_interleave(a.lengths)
    places = torch.arange(a.tokens)
    kept = places[(places + by >= first) & (places + by <= last)]
    lengths = (a.lengths - 1).clamp_min(0)
    return a.rows(kept, lengths), b.rows(kept + by, lengths)


def _what_is_left(layers: Mapping[str, LayerDifference]) -> str:
    """Whether what differs still is as much as the logits' noise predicts."""
    left = {name: one for name, one in layers.items() if one.differing}
    share = sum(one.differing * one.tokens for one in layers.values()) / max(1, sum(o.tokens for o in layers.values()))
    said = f"other experts for {share:.2%} of tokens and layers"
    if any(one.predicted is None for one in left.values()):
        return f"{said} (record finite logits in both to compare with noise)"
    if other := ", ".join(name for name, one in left.items() if (one.noise or 0) > UNRELATED * (one.spread or 0)):
        return f"{said}, and other logits: {other}"
    above = ", ".join(name for name, one in left.items() if _exceeds(one))
    return f"{said}, more than the noise of the logits predicts: {above}" if above else f"noise of the logits: {said}"


def _exceeds(one: LayerDifference) -> bool:
    """Whether more differs than predicted: beyond chance, and beyond half of the prediction, which is of pairs."""
    expected = one.predicted or 0.0
    error = math.sqrt(max(expected * (1 - expected), 1 / one.tokens) / one.tokens)
    return one.differing > 1.5 * expected + CERTAIN * error
