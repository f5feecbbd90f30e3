"""Tokens inform each other through flash kernels (`triton/flash.py`): on a GPU no block of scores is stored.

Shapes as in `ops/visible.py`. Products of float32 are three TF32 products each; those with positions are torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pointsman.ops.visible import ENTROPY_TOLERANCE, Prepared, Visible

if TYPE_CHECKING:
    from pointsman.kernels.triton.flash_ops import Given

WIDEST, MOST_VALUES = 512, 256
LONGEST = 4096  # queries with positions, whose products [N, T, W] are in memory for a moment


def suits(prepared: Prepared, visible: Visible) -> bool:
    """Whether the kernels take these: the same for every group of sequences of a batch."""
    narrow = prepared.query.shape[2] <= WIDEST and (prepared.value is None or prepared.value.shape[2] <= MOST_VALUES)
    short = prepared.positions is None or visible.length <= LONGEST
    return narrow and short and prepared.query.dtype == torch.float32


def forward(prepared: Prepared, visible: Visible) -> tuple[Tensor, Tensor]:
    """out [N, T, E] and the log-sum-exp [N, T]."""
    from pointsman.kernels.triton import flash_ops

    out, most, total = flash_ops.forward(*_given(prepared, visible), visible.causal, ENTROPY_TOLERANCE, 0)
    return out, most + total.log_()


def backward(
    prepared: Prepared, visible: Visible, out: Tensor, lse: Tensor, upper: Tensor | None, lse_gradient: Tensor | None
) -> Prepared:
    """Gradients of what was prepared, by the same names; `upper` is that of out."""
    from pointsman.kernels.triton import flash_ops

    given = _given(prepared, visible)
    if upper is None or given.v is None:
        upper, given, delta = None, given._replace(v=None), torch.zeros_like(lse)
    else:
        upper = upper.contiguous()
        delta = (upper * out).sum(-1)
    delta = delta if lse_gradient is None else delta - lse_gradient
    sums = lse.contiguous(), torch.ones_like(lse)  # exp(s - m) / l = exp(s - lse) / 1
    found = iter(flash_ops.backward(*given, visible.causal, ENTROPY_TOLERANCE, 0, upper, delta, *sums))
    d_query, d_key = next(found), next(found)
    d_value, d_bias, d_products = (None if one is None else next(found) for one in given[2:5])
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
    from pointsman.kernels.triton.flash_ops import Given

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
