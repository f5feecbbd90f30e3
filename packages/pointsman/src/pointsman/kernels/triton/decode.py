"""The experts for a few assignments without gradients, as when a model decodes: each chosen weight is read once.

Three launches and no sort. A program belongs to one assignment and works only if that is the first of its expert (or
the first of the next 16); it finds the others itself. So that few tokens keep a whole device busy, inner dimensions
are split, and partial sums [splits, S, ...] are added in order by whoever reads them. Shapes: S = T k assignments, T
tokens, D wide, H units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.fused import ACTIVATIONS, hidden
from pointsman.kernels.triton.language import FUSED, Tile, dot, major_capability, power_of_2, precision

PROGRAMS = 512  # that should be at work at once: about four for each multiprocessor
PARTS = 4  # of an inner dimension, at most
BLOCKS = 4  # of an inner dimension, that a part of it has at least


@triton.jit
def mine(expert_ptr, S, E, SP: tl.constexpr, ROWS: tl.constexpr):
    """The expert of this program (E: it has nothing to do), its assignments [ROWS], and which of these there are."""
    own = tl.program_id(0)
    j = tl.arange(0, SP)
    experts = tl.load(expert_ptr + j, mask=j < S, other=-1).to(tl.int32)
    expert = tl.load(expert_ptr + own).to(tl.int32)
    same = (experts == expert) & (j < S)
    place = tl.cumsum(same.to(tl.int32), 0) - 1
    before = tl.sum((same & (j < own)).to(tl.int32), 0)
    takes = same[None, :] & ((place - before)[None, :] == tl.arange(0, ROWS)[:, None])
    slot = tl.sum(tl.where(takes, j[None, :], 0), 1)
    there = tl.sum(takes.to(tl.int32), 1) > 0
    idle = (expert < 0) | (expert >= E) | (before % ROWS != 0)
    return tl.where(idle, E, expert), slot, there


@triton.jit
def decode_up_kernel(
    x_ptr, w_ptr, gate_w_ptr, expert_ptr, up_ptr, gate_ptr, S, D, H, stride_e, gate_stride_e, share, K,
    E: tl.constexpr, SP: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """u, g [splits, S, H], float32, before biases: parts of x [tokens, D] times weights [E, H, D]."""
    expert, slot, there = mine(expert_ptr, S, E, SP, ROWS)
    if expert >= E:
        return
    split = tl.program_id(2)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    up = tl.zeros((ROWS, BN), dtype=tl.float32)
    gate = up
    for start in range(split * share, tl.minimum(D, split * share + share), BK):
        deep = start + tl.arange(0, BK)
        x = tl.load(
            x_ptr + (slot // K)[:, None] * D + deep[None, :], mask=there[:, None] & (deep[None, :] < D), other=0.0
        )
        at = n[None, :].to(tl.int64) * D + deep[:, None]
        inside = (n[None, :] < H) & (deep[:, None] < D)
        w = tl.load(w_ptr + expert.to(tl.int64) * stride_e + at, mask=inside, other=0.0)
        up = dot(x, w, up, PRECISION)
        if GATED:
            w = tl.load(gate_w_ptr + expert.to(tl.int64) * gate_stride_e + at, mask=inside, other=0.0)
            gate = dot(x, w, gate, PRECISION)
    at = (split * S + slot)[:, None].to(tl.int64) * H + n[None, :]
    mask = there[:, None] & (n[None, :] < H)
    tl.store(up_ptr + at, up, mask=mask)
    if GATED:
        tl.store(gate_ptr + at, gate, mask=mask)


@triton.jit
def decode_down_kernel(
    up_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, w_ptr, expert_ptr, out_ptr, S, D, H, stride_e, share,
    E: tl.constexpr, SP: tl.constexpr, SPLITS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [splits, S, D], float32: parts of h times W_out [E, D, H], from u, g [SPLITS, S, H]."""
    expert, slot, there = mine(expert_ptr, S, E, SP, ROWS)
    if expert >= E:
        return
    split = tl.program_id(2)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((ROWS, BN), dtype=tl.float32)
    for start in range(split * share, tl.minimum(H, split * share + share), BK):
        deep = start + tl.arange(0, BK)
        w_at = n[None, :].to(tl.int64) * H + deep[:, None]
        inside = (n[None, :] < D) & (deep[:, None] < H)
        w = tl.load(w_ptr + expert.to(tl.int64) * stride_e + w_at, mask=inside, other=0.0)
        mask = there[:, None] & (deep[None, :] < H)
        up = tl.zeros((ROWS, BK), dtype=tl.float32)
        gate = up
        for part in tl.static_range(SPLITS):
            at = (part * S + slot)[:, None].to(tl.int64) * H + deep[None, :]
            up += tl.load(up_ptr + at, mask=mask, other=0.0)
            if GATED:
                gate += tl.load(gate_ptr + at, mask=mask, other=0.0)
        if BIAS:
            of_expert = expert.to(tl.int64) * H + deep
            up += tl.load(up_bias_ptr + of_expert, mask=deep < H, other=0.0).to(tl.float32)[None, :]
            if GATED:
                gate += tl.load(gate_bias_ptr + of_expert, mask=deep < H, other=0.0).to(tl.float32)[None, :]
        units = tl.where(mask, hidden(up, gate, ACT, GATED), 0.0)
        acc = dot(units.to(w_ptr.dtype.element_ty), w, acc, PRECISION)
    at = (split * S + slot)[:, None].to(tl.int64) * D + n[None, :]
    tl.store(out_ptr + at, acc, mask=there[:, None] & (n[None, :] < D))


@triton.jit
def decode_combine_kernel(
    rows_ptr, bias_ptr, weight_ptr, expert_ptr, out_ptr, S, D,
    K: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out [T, D]: each token's weighted sum of rows [SPLITS, S, D] and biases, in order of k and of splits."""
    t = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), dtype=tl.float32)
    for j in range(K):
        slot = t * K + j
        expert = tl.load(expert_ptr + slot).to(tl.int32)
        if (expert >= 0) & (expert < E):
            row = tl.zeros((BD,), dtype=tl.float32)
            for part in tl.static_range(SPLITS):
                row += tl.load(rows_ptr + (part * S + slot).to(tl.int64) * D + d, mask=d < D, other=0.0)
            if BIAS:
                row += tl.load(bias_ptr + expert.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
            acc += row * tl.load(weight_ptr + slot).to(tl.float32)
    tl.store(out_ptr + t.to(tl.int64) * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


def tile(dtype: torch.dtype, gated: bool, capability: int) -> Tile:
    """Of the first product, on a device of this major compute capability (0: the interpreter)."""
    if capability == 0:
        return Tile(16, 32, 16, 4, 1)
    if dtype == torch.float32:
        return Tile(16, 32, 64, 4, 3)
    return Tile(16, 32 if gated else 64, 128, 4, 4)


def second_tile(dtype: torch.dtype, capability: int) -> Tile:
    """Of the second product, whose operand is the sum of up to `PARTS` parts of u and of g: less at a time."""
    plain = tile(dtype, False, capability)
    return plain if capability == 0 else plain._replace(inner=plain.inner // 2, stages=3)


def _split(programs: int, inner: int, block: int) -> tuple[int, int]:
    """How many parts an inner dimension is split into, and how much each has: whole blocks."""
    blocks = triton.cdiv(inner, block)
    share = triton.cdiv(blocks, max(1, min(PARTS, PROGRAMS // max(1, programs), blocks // BLOCKS)))
    return triton.cdiv(blocks, share), share * block


@torch.library.custom_op("pointsman::triton_decode", mutates_args=())
def decode(
    x: Tensor, weight: Tensor, expert: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
    w_gate: Tensor | None, b_gate: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """The experts' combined output [tokens, dim] without dropout, which has no gradient.

    Args:
        x: [tokens, dim].
        weight, expert: [tokens, k], together few (at most `kernels.experts.MOST_FEW`); an expert of -1 is none.
        w_in, …: the experts' parameters, each expert's weights contiguous.
    """
    with torch.cuda.device_of(x):
        x, weight, expert = x.contiguous(), weight.contiguous(), expert.contiguous()
        slots, k, (experts, width, dim) = expert.numel(), expert.shape[1], w_in.shape
        gated, chosen, padded = w_gate is not None, min(slots, experts), power_of_2(slots, 16)
        t = tile(x.dtype, gated, major_capability(x.device))
        tiles = triton.cdiv(width, t.columns)
        splits, share = _split(chosen * tiles, dim, t.inner)
        u = x.new_empty(splits, slots, width, dtype=torch.float32)
        g = torch.empty_like(u) if gated else u
        other = w_in if w_gate is None else w_gate
        decode_up_kernel[slots, tiles, splits](
            x, w_in, other, expert, u, g, slots, dim, width, w_in.stride(0), other.stride(0), share, k,
            experts, padded, gated, precision(x), t.rows, t.columns, t.inner,
            num_warps=t.warps, num_stages=t.stages, **FUSED,
        )  # fmt: skip
        t = second_tile(x.dtype, major_capability(x.device))
        tiles = triton.cdiv(dim, t.columns)
        parts, share = _split(chosen * tiles, width, t.inner)
        rows = x.new_empty(parts, slots, dim, dtype=torch.float32)
        decode_down_kernel[slots, tiles, parts](
            u, g, u if b_in is None else b_in, u if b_gate is None else b_gate, w_out, expert, rows,
            slots, dim, width, w_out.stride(0), share, experts, padded, splits, ACTIVATIONS[activation], gated,
            b_in is not None, precision(x), t.rows, t.columns, t.inner,
            num_warps=t.warps, num_stages=t.stages, **FUSED,
        )  # fmt: skip
        output = torch.empty_like(x)
        wide = min(512, power_of_2(dim, 16))
        decode_combine_kernel[len(x), triton.cdiv(dim, wide)](
            rows, rows if b_out is None else b_out, weight, expert, output, slots, dim,
            k, experts, parts, b_out is not None, wide, **FUSED,
        )  # fmt: skip
        return output


@decode.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)
