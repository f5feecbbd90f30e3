"""The base class of the mixers in which tokens inform each other: past tokens, padding, neighbours, strength."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pointsman.ops.visible import Visible
from pointsman.routers.frame.stages import Mixer
from pointsman.routing import RouterState, RoutingContext


class Neighbours(NamedTuple):
    """How far a mixer mixes, per token.

    Attributes:
        own: [B, T], S[i, i]: 1 means that no other token informs token i.
        effective: [B, T], exp(entropy of S[i, :]): how many tokens inform token i.
    """

    own: Tensor
    effective: Tensor


class Given(NamedTuple):
    """What a mixer mixes: arguments as of `Mixer.forward`; `past` is cut to the keys that `visible` counts."""

    probs: Tensor
    hidden: Tensor
    context: RoutingContext
    past: RouterState | None
    visible: Visible


Rows = Iterator[tuple[slice, int, int, Tensor]]
"""(sequences, start, stop, S [n, stop - start, keys seen]) by blocks."""


class TokenMixer(Mixer):
    """The base class of both mixers: past tokens, padding, neighbours, and `strength`.

    Args:
        strength: p = (1 - strength) e + strength (mixed e).
        neighbours: "all", or "lower-entropy": only tokens whose scores' entropy is at most a token's own inform it
            (Proposition 1).
    """

    def __init__(self, strength: float, neighbours: str) -> None:
        super().__init__()
        self.strength, self.neighbours_rule = strength, neighbours

    def forward(
        self, probs: Tensor, hidden: Tensor, context: RoutingContext
    ) -> tuple[Tensor, RouterState | None, Mapping[str, Tensor]]:
        given, mixed = self._given(probs, hidden, context), probs
        if self.strength:  # a rank without tokens has gradients and statistics, too: the ranks' are added up
            mixed = self.mix(given) if probs.numel() else sum((one.sum() for one in self.parameters()), probs)
        if 0 < self.strength < 1:
            mixed = torch.lerp(probs, mixed, self.strength)
        return mixed, self._carry(probs, hidden, context), self.statistics(context, given.visible)

    def mix(self, given: Given) -> Tensor:
        """sum_j S[i, j] e_j [B, T, E]."""
        raise NotImplementedError

    def rows(self, given: Given) -> Rows:
        """The rows of S, without gradients."""
        raise NotImplementedError

    def statistics(self, context: RoutingContext, visible: Visible) -> Mapping[str, Tensor]:
        """The statistics for `gather`."""
        return {}

    def sees_earlier(self, context: RoutingContext) -> bool:
        """Whether only earlier tokens inform a token."""
        return context.causal

    def keys(self, context: RoutingContext, past: int) -> int:
        """How many of the `past` tokens can inform."""
        return past

    @torch.no_grad()
    def neighbours(self, probs: Tensor, hidden: Tensor, context: RoutingContext) -> Neighbours:
        """S[i, i] and the effective number of neighbours of each token; arguments as of `forward`. Linear memory."""
        given = self._given(probs, hidden, context)
        visible = given.visible
        own, effective = probs.new_ones(probs.shape[:2]), probs.new_ones(probs.shape[:2])
        for group, start, stop, weights in self.rows(given):
            weights = weights * self.strength
            own_weight = weights[:, :, visible.past + start : visible.past + stop].diagonal(dim1=1, dim2=2)
            own_weight += 1 - self.strength
            own[group, start:stop] = own_weight
            effective[group, start:stop] = torch.special.entr(weights).sum(-1).exp()
        return Neighbours(own, effective)

    def _given(self, probs: Tensor, hidden: Tensor, context: RoutingContext) -> Given:
        batch, length, _ = probs.shape
        past = context.past
        if past is not None and past["probs"].shape[0] != batch:
            raise ValueError(f"RoutingContext.past is of {past['probs'].shape[0]} sequences, the input of {batch}")
        count = 0 if past is None else self.keys(context, past["probs"].shape[1])
        past = None if past is None or not count else {name: value[:, -count:] for name, value in past.items()}
        sure = None
        if self.neighbours_rule == "lower-entropy":
            with torch.no_grad():
                sure = entropy(_joined(past, "probs", probs))
        visible = Visible(length, count + length, self.sees_earlier(context), _real(past, context, probs), sure)
        return Given(probs, hidden, context, past, visible)

    def _carry(self, probs: Tensor, hidden: Tensor, context: RoutingContext) -> RouterState:
        kept = {key: _joined(context.past, key, value) for key, value in self.carried(probs, hidden, context).items()}
        real = _real(context.past, context, probs)
        return kept if real is None else {**kept, "real": real}

    def carried(self, probs: Tensor, hidden: Tensor, context: RoutingContext) -> dict[str, Tensor]:
        """The tensors that later tokens need, detached."""
        return {"probs": probs.detach()}


def _joined(past: RouterState | None, name: str, now: Tensor) -> Tensor:
    """Past and present [B, S, ...]."""
    return now if past is None else torch.cat([past[name].to(now.dtype), now], 1)


def _real(past: RouterState | None, context: RoutingContext, probs: Tensor) -> Tensor | None:
    """[B, S] bool, False for padding; None where all are real."""
    before = None if past is None else past.get("real")
    if before is None and context.padding_mask is None:
        return None
    if past is not None and before is None:
        before = torch.ones(past["probs"].shape[:2], dtype=torch.bool, device=probs.device)
    now = context.padding_mask
    if now is None:
        now = torch.ones(probs.shape[:2], dtype=torch.bool, device=probs.device)
    return now if before is None else torch.cat([before, now], 1)


def entropy(probs: Tensor) -> Tensor:
    """-sum p log p in nats, of probs [..., E] normalised to sum to 1 (a sigmoid gate's do not)."""
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
    return -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
