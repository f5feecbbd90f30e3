"""Hidden units and their gradient: biases, activation, gate and dropout in one pass over memory.

h = drop(act(u + b_in)), gated h = drop(act(g + b_gate) (u + b_in)), [S, H] for S rows sorted by expert. Which units are
dropped follows from (seed, assignment, unit) alone: the mask takes no memory, backward draws it again, and an
assignment's mask does not depend on how others are routed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, power_of_2
from pointsman.kernels.triton.sort import Sorted

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


@triton.jit
def units_kernel(
    up_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, order_ptr, expert_ptr, ends_ptr, seed_ptr, out_ptr, H, rate, scale,
    E: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < tl.load(ends_ptr + E - 1)
    first = tl.program_id(1) * BH
    unit = first + tl.arange(0, BH)
    mask = inside[:, None] & (unit[None, :] < H)
    at = row[:, None].to(tl.int64) * H + unit[None, :]
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    expert = tl.load(expert_ptr + row, mask=inside, other=0)
    of_expert = expert[:, None].to(tl.int64) * H + unit[None, :]
    if BIAS:
        up += tl.load(up_bias_ptr + of_expert, mask=mask, other=0.0).to(tl.float32)
    gate = up
    if GATED:
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            gate += tl.load(gate_bias_ptr + of_expert, mask=mask, other=0.0).to(tl.float32)
    value = hidden(up, gate, ACT, GATED)
    if DROP:
        slot = tl.load(order_ptr + row, mask=inside, other=0)
        value = value * kept(seed_ptr, slot, first, rate, scale, BR, BH)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def units_backward_kernel(
    inner_ptr, up_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, weight_ptr, order_ptr, expert_ptr, ends_ptr, seed_ptr,
    d_up_ptr, d_gate_ptr, units_ptr, d_weight_ptr, H, rate, scale,
    E: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """From q = W_out' dy [S, H], not yet weighted, the weighted gradients of u and g, the weighted units (for W_out's
    gradient), and h . q, the gradient of each assignment's combine weight."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < tl.load(ends_ptr + E - 1)
    slot = tl.load(order_ptr + row, mask=inside, other=0)
    expert = tl.load(expert_ptr + row, mask=inside, other=0)
    weight = tl.load(weight_ptr + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((BR,), dtype=tl.float32)
    for first in range(0, H, BH):
        unit = first + tl.arange(0, BH)
        mask = inside[:, None] & (unit[None, :] < H)
        at = row[:, None].to(tl.int64) * H + unit[None, :]
        of_expert = expert[:, None].to(tl.int64) * H + unit[None, :]
        inner = tl.load(inner_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            up += tl.load(up_bias_ptr + of_expert, mask=mask, other=0.0).to(tl.float32)
        if DROP:
            inner = inner * kept(seed_ptr, slot, first, rate, scale, BR, BH)
        gate = up
        if GATED:
            gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if BIAS:
                gate += tl.load(gate_bias_ptr + of_expert, mask=mask, other=0.0).to(tl.float32)
        units, d_up, d_gate = through(inner, up, gate, ACT, GATED)
        if GATED:
            tl.store(d_gate_ptr + at, (d_gate * weight).to(d_gate_ptr.dtype.element_ty), mask=mask)
        total += tl.sum(units * inner, 1)
        tl.store(d_up_ptr + at, (d_up * weight).to(d_up_ptr.dtype.element_ty), mask=mask)
        weighted = units * weight
        if DROP:  # the same draw again: in registers it would cost more
            weighted = weighted * kept(seed_ptr, slot, first, rate, scale, BR, BH)
        tl.store(units_ptr + at, weighted.to(units_ptr.dtype.element_ty), mask=mask)
    tl.store(d_weight_ptr + slot, total.to(d_weight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sums_kernel(rows_ptr, ends_ptr, out_ptr, H, SPLITS, E: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """out [SPLITS, E, H], float32: the sums of each expert's rows, a part of them in each split."""
    expert, split = tl.program_id(1), tl.program_id(2)
    unit = tl.program_id(0) * BH + tl.arange(0, BH)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    share = (end - start + SPLITS - 1) // SPLITS
    first = start + split * share
    end = tl.minimum(end, first + share)
    total = tl.zeros((BH,), dtype=tl.float32)
    for begin in range(first, end, BR):
        row = begin + tl.arange(0, BR)
        mask = (row[:, None] < end) & (unit[None, :] < H)
        value = tl.load(rows_ptr + row[:, None].to(tl.int64) * H + unit[None, :], mask=mask, other=0.0)
        total += tl.sum(value.to(tl.float32), 0)
    tl.store(out_ptr + (split * E + expert).to(tl.int64) * H + unit, total, mask=unit < H)


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


def _blocks(width: int, wide: int) -> tuple[int, int]:
    columns = min(wide, power_of_2(width, 16))
    return max(1, 2048 // columns), columns


def units(up: Tensor, gate: Tensor | None, where: Sorted, setting: Setting) -> Tensor:
    """u and, gated, g [S, H], before biases: h [S, H]. Rows of dropped assignments are undefined."""
    rows, width = up.shape
    output = torch.empty_like(up)
    tall, wide = _blocks(width, 512)
    bias, other = setting.b_in, setting.b_gate
    units_kernel[triton.cdiv(rows, tall), triton.cdiv(width, wide)](
        up, up if gate is None else gate, up if bias is None else bias, up if other is None else other, where.order,
        where.expert, where.ends, setting.seed, output, width, *setting.numbers, len(where.ends),
        ACTIVATIONS[setting.activation], gate is not None, bias is not None, setting.dropout > 0, tall, wide, **FUSED,
    )  # fmt: skip
    return output


def units_backward(
    inner: Tensor, up: Tensor, gate: Tensor | None, weight: Tensor, where: Sorted, setting: Setting
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The weighted gradients of u and g, the weighted units, all [S, H], and the gradient of weight [T, k]."""
    rows, width = up.shape
    d_up, weighted, d_weight = torch.empty_like(up), torch.empty_like(up), torch.zeros_like(weight)
    d_gate = None if gate is None else torch.empty_like(up)
    tall, wide = _blocks(width, 512)
    bias, other = setting.b_in, setting.b_gate
    units_backward_kernel[triton.cdiv(rows, tall),](
        inner, up, up if gate is None else gate, up if bias is None else bias, up if other is None else other, weight,
        where.order, where.expert, where.ends, setting.seed, d_up, up if d_gate is None else d_gate, weighted, d_weight,
        width, *setting.numbers, len(where.ends), ACTIVATIONS[setting.activation], gate is not None, bias is not None,
        setting.dropout > 0, tall, wide, **FUSED,
    )  # fmt: skip
    return d_up, d_gate, weighted, d_weight


def sums(rows: Tensor, where: Sorted) -> Tensor:
    """rows [S, H] -> [E, H]: the sum of each expert's rows, in an order that does not depend on the run."""
    slots, width = rows.shape
    experts = len(where.ends)
    splits = max(1, min(32, slots // (experts * 256)))
    wide = min(128, power_of_2(width, 16))
    parts = rows.new_empty(splits, experts, width, dtype=torch.float32)
    grid = triton.cdiv(width, wide), experts, splits
    sums_kernel[grid](rows, where.ends, parts, width, splits, experts, 32, wide, **FUSED)
    return parts.sum(0).to(rows.dtype)
