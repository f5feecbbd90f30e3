"""Tokens inform each other through flash kernels (`triton/inform.py`): on a GPU no block of scores is stored.

Shapes as in `ops/visible.py`. Products of float32 are three TF32 products each; those with positions are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pointsman.kernels.choice import TORCH, TRITON, capability, fastest_that_runs, with_triton, without_triton
from pointsman.ops.kernels import plain_wanted
from pointsman.ops.visible import ENTROPY_TOLERANCE, Prepared, Visible

if TYPE_CHECKING:
    from pointsman.kernels.triton.inform import Given

Inform = Callable[..., Any]
"""`routers.mutual.streaming.informed`: what a timing runs."""

WIDEST, MOST_VALUES = 512, 256
LONGEST = 4096  # queries with positions, whose products [N, T, W] are in memory for a moment
SHAPE = 16, 512, 256, 16  # of the timing: sequences, tokens, width, experts


def wanted(tensor: Tensor, inform: Inform) -> bool:
    """Whether the active choice is the kernels, on this device."""
    return with_triton("gpu_mixing", tensor, partial(measured, inform=inform)) and not plain_wanted()


def suits(prepared: Prepared, visible: Visible) -> bool:
    """Whether the kernels take these: the same for every group of sequences of a batch."""
    narrow = prepared.query.shape[2] <= WIDEST and (prepared.value is None or prepared.value.shape[2] <= MOST_VALUES)
    short = prepared.positions is None or visible.length <= LONGEST
    return narrow and short and prepared.query.dtype == torch.float32


def forward(prepared: Prepared, visible: Visible) -> tuple[Tensor, Tensor]:
    """out [N, T, E] and the log-sum-exp [N, T]."""
    from pointsman.kernels.triton import inform

    return inform.forward(_given(prepared, visible), visible.causal, ENTROPY_TOLERANCE)


def backward(
    prepared: Prepared, visible: Visible, out: Tensor, lse: Tensor, upper: Tensor | None, lse_gradient: Tensor | None
) -> Prepared:
    """Gradients of what was prepared, by the same names; `upper` is that of out."""
    from pointsman.kernels.triton import inform

    given = _given(prepared, visible)
    upper = None if upper is None or given.v is None else upper.contiguous()
    delta = torch.zeros_like(lse) if upper is None else (upper * out).sum(-1)
    delta = delta if lse_gradient is None else delta - lse_gradient
    d_query, d_key, d_value, d_bias, d_products = inform.backward(
        given, visible.causal, ENTROPY_TOLERANCE, upper, delta, lse.contiguous()
    )
    _, key, value, bias, position_query, positions = prepared
    if value is not None:
        d_value = torch.zeros_like(value) if d_value is None else _summed(d_value, value)
    if bias is not None and d_bias is not None:
        d_bias = _summed(d_bias, bias)
    d_position_query = d_positions = None
    if d_products is not None:
        assert position_query is not None
        assert positions is not None
        d_position_query = d_products @ _positions(prepared, visible)
        d_positions = torch.zeros_like(positions)
        part = d_products.mT @ position_query
        d_positions[:, : part.shape[1]] = _summed(part, positions)
    return Prepared(d_query, _summed(d_key, key), d_value, d_bias, d_position_query, d_positions)


def _positions(prepared: Prepared, visible: Visible) -> Tensor:
    """Those of distances from S - 1 down to negative ones, in rows of whole 16 bytes."""
    assert prepared.positions is not None
    return prepared.positions[:, : (visible.keys // 8 + 1) * 8]


def _given(prepared: Prepared, visible: Visible) -> Given:
    from pointsman.kernels.triton.inform import Given

    query, key, value, bias, position_query, _ = prepared
    products = None if position_query is None else position_query @ _positions(prepared, visible).mT

    def each(tensor: Tensor | None) -> Tensor | None:
        """For each sequence, also where all have the same."""
        return None if tensor is None else tensor.expand(len(query), *tensor.shape[1:]).contiguous()

    keys = each(key)
    assert keys is not None
    entropy = None if visible.entropy is None else visible.entropy.float()
    return Given(query.contiguous(), keys, each(value), each(bias), products, each(visible.real), each(entropy))


def _summed(gradient: Tensor, of: Tensor) -> Tensor:
    """The gradient of `of`, also where it is one for all sequences."""
    return gradient if len(of) == len(gradient) else gradient.sum(0, keepdim=True)


@cache
def measured(device: torch.device, inform: Inform) -> str:
    """The faster of "triton" and "torch" on a CUDA device: forward and backward of similarities."""
    if without_triton(capability(device)):
        return TORCH
    return fastest_that_runs(
        "mixing kernels", {name: candidate(name, device, inform) for name in (TRITON, TORCH)}, TORCH
    )


def candidate(
    name: str, device: torch.device, inform: Inform, shape: tuple[int, int, int, int] = SHAPE
) -> Callable[[], object]:
    """Forward and backward of this shape, until the device has finished."""
    count, length, width, experts = shape
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(count, length, width, device=device, generator=generator)
    unit = (hidden / hidden.norm(dim=-1, keepdim=True)).requires_grad_()
    probs = torch.randn(count, length, experts, device=device, generator=generator).softmax(-1).requires_grad_()
    visible = Visible(length, length)

    def prepare(*tensors: Tensor) -> Prepared:
        return Prepared(tensors[0] * 10, tensors[0], tensors[1])

    def run() -> object:
        with torch.enable_grad():
            out, _ = inform(prepare, (unit, probs), (), visible, triton=name == TRITON)
            found = torch.autograd.grad(out, [unit, probs], torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    return run
