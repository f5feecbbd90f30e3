"""Hidden units and their gradient, for the ends of products: biases, activation, gate and dropout.

h = drop(act(u + b_in)), gated h = drop(act(g + b_gate) (u + b_in)), [S, H] for S rows sorted by expert. Which units are
dropped follows from (seed, assignment, unit) alone: the mask takes no memory, backward draws it again, and an
assignment's mask does not depend on how others are routed.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = {"relu": 0, "gelu": 1, "silu": 2}


@triton.jit
def act(x, ACT: tl.constexpr):
    if ACT == 0:
        return tl.maximum(x, 0.0)
    if ACT == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x / (1.0 + tl.exp(-x))


@triton.jit
def derivative(x, ACT: tl.constexpr):
    if ACT == 0:
        return tl.where(x > 0, 1.0, 0.0)
    if ACT == 1:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    s = 1.0 / (1.0 + tl.exp(-x))
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def hidden(up, gate, ACT: tl.constexpr, GATED: tl.constexpr):
    """Hidden units before dropout."""
    if GATED:
        return act(gate, ACT) * up
    return act(up, ACT)


@triton.jit
def through(inner, up, gate, ACT: tl.constexpr, GATED: tl.constexpr):
    """Hidden units before dropout, and the gradients of u and g (that of u again where there is no gate)."""
    if GATED:
        activated = act(gate, ACT)
        d_up = inner * activated
        return activated * up, d_up, inner * up * derivative(gate, ACT)
    d_up = inner * derivative(up, ACT)
    return act(up, ACT), d_up, d_up


@triton.jit
def kept(seed_ptr, slot, first, rate, scale, BR: tl.constexpr, BH: tl.constexpr):
    """scale where a unit is kept, 0 where it is dropped: [BR, BH], units from `first` on, four to a random draw."""
    group = first // 4 + tl.arange(0, BH // 4)
    slots = tl.broadcast_to(slot[:, None], (BR, BH // 4))
    groups = tl.broadcast_to(group[None, :], (BR, BH // 4))
    zero = slots * 0
    a, b, c, d = tl.philox(tl.load(seed_ptr), slots, groups, zero, zero)
    drawn = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return tl.where(tl.uint_to_uniform_float(drawn) >= rate, scale, 0.0)


class Setting(NamedTuple):
    """What is computed: biases come both or none; `seed` [1] int64 of the dropout masks."""

    activation: str
    dropout: float
    seed: Tensor
    b_in: Tensor | None
    b_gate: Tensor | None

    @property
    def numbers(self) -> tuple[float, float]:
        """The share of dropped units, and what the others are multiplied by."""
        return self.dropout, 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
