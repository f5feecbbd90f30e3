"""What an audit sums by block of text: losses at every k and loads, by domain; divergence, specialists, coverage.

A block is a row of tokens that the model reads on its own. The same blocks at every k pair their differences, which are
taken over quarters of rows: within a row they hardly depend on one another, as the losses themselves do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman_lab.checkpoints.text import PADDING, TEXT, TextBatch, device_of
from pointsman_lab.intervals import LEAST_BLOCKS, half_width, ratio

MOST = 512
"""Blocks that are kept; of more, each two neighbours of a domain become one."""
SERVES = 0.75
"""An expert serves one domain if at least this share of its choices is there, at equal numbers of tokens."""
PARTS = 4
"""Parts of a row, of equal numbers of positions."""


Key = int | str | None
"""k; "against" for another checkpoint."""
Parts = Sequence[tuple[float, int]]
"""Of every part of a row: its loss (nats, summed) and its number of predicted text tokens."""


@dataclass
class Block:
    """Sums over some text of one domain: its text tokens, losses of its parts by k, choices by layer."""

    domain: str
    read: int = 0
    losses: dict[Key, Parts] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def joined(self, other: Block) -> Block:
        losses: dict[Key, Parts] = {
            k: [(a + c, b + d) for (a, b), (c, d) in zip(parts, other.losses.get(k, ((0.0, 0),) * PARTS), strict=True)]
            for k, parts in self.losses.items()
        }
        counts = {layer: value + other.counts[layer] for layer, value in self.counts.items() if layer in other.counts}
        return Block(self.domain, self.read + other.read, losses, counts)


@torch.no_grad()
def row_losses(model: nn.Module, batch: TextBatch) -> list[Parts] | None:
    """The losses of each row's parts; None without logits [B, T, vocabulary]."""
    device = device_of(model)
    ids = batch.ids.to(device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": batch.mask.long().to(device)}
    config = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    logits = getattr(model(**inputs), "logits", None)
    if logits is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        return None
    counted = (batch.kinds[:, 1:] == TEXT) & (batch.kinds[:, :-1] != PADDING)
    known = logits.shape[-1] > int(ids.max())
    found: list[Parts] = []
    for row in range(ids.shape[0]):
        parts = []
        for places in torch.arange(ids.shape[1] - 1).tensor_split(PARTS):
            chosen = places[counted[row, places]].to(device)
            scores = logits[row, chosen].float()
            nats = float(F.cross_entropy(scores, ids[row, chosen + 1], reduction="sum")) if known else 0.0
            parts.append((nats, len(scores) if known else 0))
        found.append(parts)
    return found


class Blocks:
    """The blocks of an audit, in the order of the text; bounded."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.first = 0  # of the batch that is read now

    def begin(self, batch: TextBatch, domain: str) -> None:
        """A block for each row of the batch."""
        if len(self.all) >= MOST:
            of = [self.of(name) for name in self.domains]
            pairs = [blocks[place : place + 2] for blocks in of for place in range(0, len(blocks), 2)]
            self.all = [pair[0].joined(pair[1]) if len(pair) > 1 else pair[0] for pair in pairs]
        self.first = len(self.all)
        self.all += [Block(domain, read=int((row == TEXT).sum())) for row in batch.kinds]

    def add_losses(self, k: Key, rows: Sequence[Parts] | None) -> None:
        for block, parts in zip(self.all[self.first :], rows or (), strict=rows is not None):
            block.losses[k] = parts

    def add_choices(self, layer: str, experts: Tensor, text: Tensor, num_experts: int) -> None:
        """experts [B*T, k] of the batch; text [B*T] bool, the tokens that count."""
        rows = len(self.all) - self.first
        place = torch.arange(rows, device=experts.device).repeat_interleave(len(experts) // rows)[:, None]
        kept = (experts >= 0) & (experts < num_experts) & text[:, None]
        counts = torch.bincount((place * num_experts + experts)[kept], minlength=rows * num_experts)
        for block, row in zip(self.all[self.first :], counts.view(rows, num_experts).cpu(), strict=True):
            block.counts[layer] = row

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(block.domain for block in self.all))

    def of(self, domain: str | None) -> list[Block]:
        return [block for block in self.all if domain in (None, block.domain)]

    def loss(self, k: Key, domain: str | None = None) -> dict[str, Any]:
        """The loss a token at this k as `ratio` gives it; over parts of rows where there are too few rows."""
        rows = [block.losses[k] for block in self.of(domain) if k in block.losses]
        if len(rows) >= LEAST_BLOCKS:
            rows = [[(sum(nats for nats, _ in parts), sum(tokens for _, tokens in parts))] for parts in rows]
        return _ratio([part for parts in rows for part in parts])

    def tokens(self, k: Key) -> int:
        return sum(count for block in self.all for _, count in block.losses.get(k, ()))

    def difference(self, k: Key, own: Key, comparisons: int, domain: str | None = None) -> dict[str, Any] | None:
        """The loss at k minus that at the model's own k, part by part."""
        pairs = [(block.losses[k], block.losses[own]) for block in self.of(domain) if {k, own} <= block.losses.keys()]
        parts = [(one - other, count) for a, b in pairs for (one, count), (other, _) in zip(a, b, strict=True)]
        return None if k == own else _ratio(parts, comparisons)

    def counts(self, layer: str, domain: str | None = None) -> Tensor:
        """[blocks, E] of the blocks that have this layer."""
        found = [block.counts[layer].double() for block in self.of(domain) if layer in block.counts]
        return torch.stack(found) if found else torch.zeros(0, 0, dtype=torch.float64)

    def divergences(self, layers: Sequence[str]) -> list[dict[str, Any]]:
        """Each two domains: the Jensen-Shannon divergence of their loads in bits, mean over layers, with its half."""
        names = self.domains
        loads = {name: [self.counts(layer, name) for layer in layers] for name in names}
        pairs = [(one, two) for place, one in enumerate(names) for two in names[place + 1 :]]
        return [{"domains": list(pair), **_divergence(loads[pair[0]], loads[pair[1]], len(pairs))} for pair in pairs]

    def specialists(self, layers: Sequence[str]) -> list[dict[str, Any]]:
        """Experts that serve one domain (`SERVES`), the lower end of the interval included."""
        names, found = self.domains, []
        for layer in layers if len(names) > 1 else ():
            loads = [self.counts(layer, name) for name in names]
            share, half = _shares(loads, [[one.read for one in self.of(name) if layer in one.counts] for name in names])
            for expert in torch.nonzero((share - half >= SERVES).any(0))[:, 0].tolist():
                at = int(share[:, expert].argmax())
                found.append(
                    {"layer": layer, "expert": expert, "domain": names[at], "share": float(share[at, expert]),
                     "half": float(half[at, expert]), "tokens": int(loads[at][:, expert].sum())}
                )  # fmt: skip
        return found

    def coverage(self, layers: Sequence[str], times: Sequence[int]) -> list[dict[str, Any]]:
        """For each n: how many experts n of the text's choices reach, and the smallest part of the text that does it.

        The subset is found greedily: the block that adds the most missing choices goes first. `at_least` blocks are
        needed in any case, by the expert that needs the most of them.
        """
        counts = torch.cat([self.counts(layer) for layer in layers], 1)
        read = torch.tensor([block.read for block in self.all])
        found = []
        for n in times:
            reached = counts[:, counts.sum(0) >= n]
            one: dict[str, Any] = {"times": n, "experts": counts.shape[1], "reached": reached.shape[1]}
            if reached.shape[1]:
                done = (reached.cumsum(0) >= n).all(1)
                one["first_tokens"] = int(read[: int(done.int().argmax()) + 1].sum())
                needed = (reached.sort(0, descending=True).values.cumsum(0) < n).sum(0) + 1
                chosen, missing, left = [], torch.full((reached.shape[1],), float(n)), reached.clone()
                while bool((missing > 0).any()):
                    best = int(left.minimum(missing.to(left)).sum(1).argmax())
                    chosen.append(best)
                    missing = (missing - left[best]).clamp_min(0)
                    left[best] = 0
                one |= {"blocks": len(chosen), "at_least": int(needed.max()), "tokens": int(read[chosen].sum())}
            found.append(one)
        return found


def _ratio(parts: Parts, comparisons: int = 1) -> dict[str, Any]:
    return ratio([nats for nats, _ in parts], [tokens for _, tokens in parts], comparisons)


def _js(one: Tensor, two: Tensor) -> Tensor:
    """Jensen-Shannon divergence in bits of loads [..., E]."""
    p, q = (load / load.sum(-1, keepdim=True).clamp_min(1e-30) for load in (one, two))
    mixed, mine, its = (torch.special.entr(each).sum(-1) / math.log(2) for each in ((p + q) / 2, p, q))
    divergence: Tensor = mixed - (mine + its) / 2
    return divergence


def _divergence(one: Sequence[Tensor], two: Sequence[Tensor], comparisons: int) -> dict[str, Any]:
    """The mean over layers, bias and standard error by leaving out each block once (jackknife)."""
    pairs = list(zip(one, two, strict=True))
    value = float(torch.stack([_js(a.sum(0), b.sum(0)) for a, b in pairs]).mean())
    least = min(len(one[0]), len(two[0]))
    if least < 2:
        return {"mean": value, "half": None, "blocks": least}
    without = (
        torch.stack([_js(a.sum(0) - a, b.sum(0)) for a, b in pairs]).mean(0),
        torch.stack([_js(a.sum(0), b.sum(0) - b) for a, b in pairs]).mean(0),
    )
    bias = sum((len(each) - 1) * (float(each.mean()) - value) for each in without)
    variance = sum((len(each) - 1) * float(each.var(correction=0)) for each in without)
    return {"mean": max(0.0, value - bias), "half": half_width(variance**0.5, least, comparisons), "blocks": least}


def _shares(loads: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """[D, E]: each domain's share of an expert's choices at equal numbers of tokens, and half of its interval."""

    def shares(sums: Sequence[Tensor]) -> Tensor:
        rates = torch.stack([each[:-1] / each[-1].clamp_min(1) for each in sums])
        return rates / rates.sum(0).clamp_min(1e-30)

    counted = [torch.cat([load, load.new_tensor(read)[:, None]], 1) for load, read in zip(loads, tokens, strict=True)]
    sums, variance = [rows.sum(0) for rows in counted], torch.zeros(len(loads), loads[0].shape[-1], dtype=torch.float64)
    for place, rows in enumerate(counted):
        each = torch.stack([shares([*sums[:place], sums[place] - row, *sums[place + 1 :]]) for row in rows])
        variance += (len(rows) - 1) / len(rows) * (each - each.mean(0)).square().sum(0)
    least = min(map(len, loads))
    factor = half_width(1.0, least, variance.numel())
    return shares(sums), torch.full_like(variance, float("inf")) if factor is None else factor * variance.sqrt()


def mapped(texts: Any) -> Mapping[str, Any]:
    """Domain -> its texts; texts without domains are one called "text". ValueError for a string instead of texts."""
    found = texts if isinstance(texts, Mapping) else {"text": texts}
    for name, of in found.items():
        if isinstance(of, str):
            raise ValueError(f"texts: {name!r} is one string; it must be a list (or any iterable) of texts: [text]")
    return found
