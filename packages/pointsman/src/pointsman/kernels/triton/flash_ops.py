"""The kernels of `flash.py` as two operators: tiles, arguments, shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pointsman.kernels.triton.flash import ATTENTION, MIXER, forward_kernel, keys_kernel, queries_kernel
from pointsman.kernels.triton.language import FUSED, major_capability, power_of_2, precision


class Given(NamedTuple):
    """What scores are made of, contiguous: q [N, T, D], k [N, S, D], v [N, S, E] or None, bias [N, S] or None,
    products P [N, T, W] or None, real [N, S] (of an attention [B, S]) bool or None, entropy [N, S] or None."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    bias: Tensor | None
    products: Tensor | None
    real: Tensor | None
    entropy: Tensor | None


class Tile(NamedTuple):
    """Blocks of queries and keys; `inner` columns of both at a time."""

    queries: int
    keys: int
    inner: int
    warps: int
    stages: int


def tile(width: int, values: int, dtype: torch.dtype, capability: int, backward: bool = False) -> Tile:
    """For scores and values of these widths (powers of 2); capability 0: the interpreter."""
    if capability == 0:
        return Tile(16, 16, 16, 4, 1)
    if dtype == torch.float32:  # sizes with which no kernel spills registers: tests/library/kernels/test_others.py
        return Tile(32, 16 if backward else 32, 32, 8, 2) if width + values <= 256 else Tile(16, 16, 32, 8, 2)
    if backward and width > 64:
        return Tile(32, 32, width, 8, 2)
    if backward:
        return Tile(64, 64 if capability >= 9 else 32, width, 8, 2)
    return Tile(128, 64, min(width, 64), 8, 3) if capability >= 9 else Tile(64, 64, width, 8, 2)


def _launch(
    given: Given, causal: bool, tolerance: float, heads: int, backward: bool
) -> tuple[list[Tensor], list[Any], Tile, dict[str, Any]]:
    """The pointers, the arguments from T on, the tile, and the options of a launch."""
    q, k, v, bias, products, real, entropy = given
    pointers = [k if one is None else one for one in given]
    if real is not None:
        pointers[5] = real.to(torch.int8)
    (count, length, wide), values = q.shape, 1 if v is None else v.shape[2]
    padded, narrow = power_of_2(wide, 16), power_of_2(values, 16)
    t = tile(padded, narrow, q.dtype, major_capability(q.device), backward)
    padding = 0 if real is None else ATTENTION.value if heads else MIXER.value
    rest = [
        length, k.shape[1], 0 if products is None else products.shape[2], wide, values, count // max(heads, 1),
        tolerance, bias is not None, products is not None, causal, padding, entropy is not None, v is not None,
        precision(q), t.queries, t.keys, padded, narrow, min(t.inner, padded), min(t.inner, narrow),
    ]  # fmt: skip
    return pointers, rest, t, {"num_warps": t.warps, "num_stages": t.stages, **FUSED}


@torch.library.custom_op("pointsman::triton_flash", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, products: Tensor | None, real: Tensor | None,
    entropy: Tensor | None, causal: bool, tolerance: float, heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out [N, T, E] ([N, T, 0] without values), m and l [N, T], float32.

    `heads`: of an attention, whose out is [B, T, heads, E]; 0: of a mixer.
    """
    given = Given(q, k, v, bias, products, real, entropy)
    with torch.cuda.device_of(q):
        pointers, rest, t, options = _launch(given, causal, tolerance, heads, backward=False)
        out, most, total = _results(given, heads)
        strides = (out.stride(2), out.stride(0), out.stride(1)) if heads else (0, out.stride(0), out.stride(1))
        blocks = triton.cdiv(q.shape[1], t.queries)
        forward_kernel[blocks * len(q),](*pointers, out, most, total, *strides, blocks, *rest, **options)
    return out, most, total


def _results(given: Given, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    count, length, _ = given.q.shape
    wide = 0 if given.v is None else given.v.shape[2]
    shape = (count // heads, length, heads, wide) if heads else (count, length, wide)
    most = given.q.new_empty(count, length, dtype=torch.float32)
    return given.q.new_empty(shape), most, torch.empty_like(most)


@forward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(Given(*given[:7]), given[-1])


@torch.library.custom_op("pointsman::triton_flash_backward", mutates_args=())
def backward(
    q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, products: Tensor | None, real: Tensor | None,
    entropy: Tensor | None, causal: bool, tolerance: float, heads: int, upper: Tensor | None, delta: Tensor,
    most: Tensor, total: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of those of q, k, v, bias and products that are there.

    `upper` [N, T, E] is that of out, `delta` [N, T] float32 as in `keys_kernel`. Without `upper` there must be no v:
    then scores have only the gradient of their sum.
    """
    given = Given(q, k, v, bias, products, real, entropy)
    with torch.cuda.device_of(q):
        pointers, rest, t, options = _launch(given, causal, tolerance, heads, backward=True)
        d_q, d_k = torch.empty_like(q), torch.empty_like(k)
        d_v, d_bias = (None if one is None else torch.empty_like(one) for one in (v, bias))
        d_products = None if products is None else torch.zeros_like(products)
        pointers += [q if upper is None else upper, delta, most, total]
        written = [d_k if one is None else one for one in (d_k, d_v, d_bias, d_products)]
        blocks = triton.cdiv(k.shape[1], t.keys)
        keys_kernel[blocks * len(q),](*pointers, *written, blocks, *rest, **options)
        blocks = triton.cdiv(q.shape[1], t.queries)
        queries_kernel[blocks * len(q),](*pointers, written[3], d_q, blocks, *rest, **options)
    return [one for one in (d_q, d_k, d_v, d_bias, d_products) if one is not None]


@backward.register_fake
def _(*given: Any) -> list[Tensor]:
    return [torch.empty_like(one) for one in given[:5] if one is not None]
