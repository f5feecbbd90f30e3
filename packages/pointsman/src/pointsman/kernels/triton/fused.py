"""Products with the units' work at their ends: biases, activation, gate and dropout before a tile leaves the registers.

Forward: u (and g) = x W_in' + b, x read through `order`; h = drop(act(u)), gated h = drop(act(g) u). Backward: q = dy
W_out, dy read through `order`, never stored: from its tile follow the gradients of u and g, the weighted units, and a
part of h . q. Shapes: S rows sorted by expert, H units, D wide. Which units are dropped follows from (seed, assignment,
unit) alone: the mask takes no memory, backward draws it again, and a mask does not depend on how others are routed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, dot, major_capability, power_of_2, precision, tile_for, tile_of
from pointsman.kernels.triton.products import Sorted, accumulated

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
    """What is computed: biases, of forward alone, come both or none; `seed` [1] int64 of the dropout masks."""

    activation: str
    dropout: float
    seed: Tensor
    b_in: Tensor | None = None
    b_gate: Tensor | None = None

    @property
    def numbers(self) -> tuple[float, float]:
        """The share of dropped units, and what the others are multiplied by."""
        return self.dropout, 1 / (1 - self.dropout) if self.dropout < 1 else 0.0


@triton.jit
def up_kernel(
    x_ptr, w_ptr, gate_w_ptr, up_bias_ptr, gate_bias_ptr, order_ptr, ends_ptr, seed_ptr, up_ptr, gate_ptr, out_ptr,
    D, H, stride_e, gate_stride_e, K, rate, scale, rows, columns,
    E: tl.constexpr, EP: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """u, g [S, H] with biases, and h, from x [tokens, D] and weights [E, H, D]."""
    expert, start, end, column = tile_of(ends_ptr, rows, columns, E, EP, BM)
    if expert >= E:
        return
    row = start + tl.arange(0, BM)
    inside = row < end
    slot = tl.load(order_ptr + row, mask=inside, other=0)
    first = column * BN
    n = first + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    x_ptrs = x_ptr + (slot // K)[:, None].to(tl.int64) * D + inner[None, :]
    at_w = n[None, :].to(tl.int64) * D + inner[:, None]
    w_ptrs = w_ptr + expert.to(tl.int64) * stride_e + at_w
    up = tl.zeros((BM, BN), dtype=tl.float32)
    gate = up
    if GATED:
        gate_ptrs = gate_w_ptr + expert.to(tl.int64) * gate_stride_e + at_w
        for at in range(0, D, BK):  # both products of one tile of x
            deep = inner + at < D
            x = tl.load(x_ptrs, mask=inside[:, None] & deep[None, :], other=0.0)
            there = (n[None, :] < H) & deep[:, None]
            up = dot(x, tl.load(w_ptrs, mask=there, other=0.0), up, PRECISION)
            gate = dot(x, tl.load(gate_ptrs, mask=there, other=0.0), gate, PRECISION)
            x_ptrs += BK
            w_ptrs += BK
            gate_ptrs += BK
    else:
        up = accumulated(up, x_ptrs, w_ptrs, inside, n < H, D, 1, PRECISION, BK)
    mask = inside[:, None] & (n[None, :] < H)
    at_out = row[:, None].to(tl.int64) * H + n[None, :]
    of_expert = expert.to(tl.int64) * H + n
    kind = out_ptr.dtype.element_ty
    if BIAS:  # before rounding, which then changes no sign
        up += tl.load(up_bias_ptr + of_expert, mask=n < H, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate += tl.load(gate_bias_ptr + of_expert, mask=n < H, other=0.0).to(tl.float32)[None, :]
    up = up.to(kind)  # as it is stored, and as backward will see it
    tl.store(up_ptr + at_out, up, mask=mask)
    up = up.to(tl.float32)
    if GATED:
        gate = gate.to(kind)
        tl.store(gate_ptr + at_out, gate, mask=mask)
        gate = gate.to(tl.float32)
    value = hidden(up, gate, ACT, GATED)
    if DROP:
        value = value * kept(seed_ptr, slot, first, rate, scale, BM, BN)
    tl.store(out_ptr + at_out, value.to(kind), mask=mask)


@triton.jit
def inner_kernel(
    dy_ptr, w_ptr, up_ptr, gate_ptr, weight_ptr, order_ptr, ends_ptr, seed_ptr,
    d_up_ptr, d_gate_ptr, units_ptr, parts_ptr, D, H, stride_e, K, rate, scale, rows, columns,
    E: tl.constexpr, EP: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """From dy [tokens, D] and W_out [E, D, H] the weighted gradients of u and g, the weighted units, all [S, H], and
    parts [S, columns], by assignment: h . q over the units of one tile."""
    expert, start, end, column = tile_of(ends_ptr, rows, columns, E, EP, BM)
    if expert >= E:
        return
    row = start + tl.arange(0, BM)
    inside = row < end
    slot = tl.load(order_ptr + row, mask=inside, other=0)
    first = column * BN
    n = first + tl.arange(0, BN)
    deep = tl.arange(0, BK)
    dy_ptrs = dy_ptr + (slot // K)[:, None].to(tl.int64) * D + deep[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * stride_e + deep[:, None].to(tl.int64) * H + n[None, :]
    inner = tl.zeros((BM, BN), dtype=tl.float32)
    inner = accumulated(inner, dy_ptrs, w_ptrs, inside, n < H, D, H, PRECISION, BK)
    mask = inside[:, None] & (n[None, :] < H)
    at = row[:, None].to(tl.int64) * H + n[None, :]
    weight = tl.load(weight_ptr + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if DROP:
        mask_of_units = kept(seed_ptr, slot, first, rate, scale, BM, BN)
        inner = inner * mask_of_units
    gate = up
    if GATED:
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    units, d_up, d_gate = through(inner, up, gate, ACT, GATED)
    kind = units_ptr.dtype.element_ty
    tl.store(d_up_ptr + at, (d_up * weight).to(kind), mask=mask)
    if GATED:
        tl.store(d_gate_ptr + at, (d_gate * weight).to(kind), mask=mask)
    total = tl.sum(tl.where(mask, units * inner, 0.0), 1)
    tl.store(parts_ptr + slot.to(tl.int64) * columns + column, total, mask=inside)
    weighted = units * weight
    if DROP:
        weighted = weighted * mask_of_units
    tl.store(units_ptr + at, weighted.to(kind), mask=mask)


def _plain(weight: Tensor) -> Tensor:
    """Weights [E, A, N] with each expert's contiguous; halves of a fused tensor stay views."""
    return weight if weight.stride()[1:] == (weight.shape[2], 1) else weight.contiguous()


def up(
    rows: Tensor, w_in: Tensor, w_gate: Tensor | None, where: Sorted, k: int, setting: Setting
) -> tuple[Tensor, Tensor | None, Tensor]:
    """rows [tokens, D], weights [E, H, D]: u, g and h, all [S, H]; undefined where dropped."""
    slots, (experts, width, dim) = where.order.numel(), w_in.shape
    w_in, other = _plain(w_in), w_in if w_gate is None else _plain(w_gate)
    u, h = rows.new_empty(slots, width), rows.new_empty(slots, width)
    g = None if w_gate is None else rows.new_empty(slots, width)
    t = tile_for("up" if g is None else "gated up", rows.dtype, slots // experts, major_capability(rows.device))
    tiles = triton.cdiv(slots, t.rows) + experts, triton.cdiv(width, t.columns)
    b_in, b_gate = setting.b_in, setting.b_gate
    up_kernel[tiles[0] * tiles[1],](
        rows, w_in, other, u if b_in is None else b_in, u if b_gate is None else b_gate, where.order, where.ends,
        setting.seed, u, u if g is None else g, h, dim, width, w_in.stride(0), other.stride(0), k, *setting.numbers,
        *tiles, experts, power_of_2(experts + 1), ACTIVATIONS[setting.activation], g is not None,
        b_in is not None, setting.dropout > 0, precision(rows), **t.options, **FUSED,
    )  # fmt: skip
    return u, g, h


def inner(
    gradient: Tensor, w_out: Tensor, u: Tensor, g: Tensor | None, weight: Tensor, where: Sorted, setting: Setting
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """From gradient [tokens, D] and w_out [E, D, H]: the weighted gradients of u and g, the weighted units, all [S, H],
    and the gradient of weight [T, k]."""
    (slots, width), (experts, dim, _) = u.shape, w_out.shape
    w_out = _plain(w_out)
    d_up, weighted = torch.empty_like(u), torch.empty_like(u)
    d_gate = None if g is None else torch.empty_like(u)
    t = tile_for("inner" if g is None else "gated inner", u.dtype, slots // experts, major_capability(u.device))
    tiles = triton.cdiv(slots, t.rows) + experts, triton.cdiv(width, t.columns)
    parts = u.new_zeros(slots, tiles[1], dtype=torch.float32)  # dropped assignments have no row, and no gradient
    inner_kernel[tiles[0] * tiles[1],](
        gradient, w_out, u, u if g is None else g, weight, where.order, where.ends, setting.seed,
        d_up, u if d_gate is None else d_gate, weighted, parts, dim, width, w_out.stride(0), weight.shape[1],
        *setting.numbers, *tiles, experts, power_of_2(experts + 1), ACTIVATIONS[setting.activation], g is not None,
        setting.dropout > 0, precision(u), **t.options, **FUSED,
    )  # fmt: skip
    return d_up, d_gate, weighted, parts.sum(1).view_as(weight).to(weight.dtype)
