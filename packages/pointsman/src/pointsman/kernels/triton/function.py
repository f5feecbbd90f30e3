"""All experts at once on Triton kernels, forward and backward, as two custom operators.

Forward keeps u (and g) alone: W_in x with the bias, before the activation. Backward draws masks and computes hidden
units again inside its first product; the gradient of a combine weight is h . W_out' dy, so that outputs are not kept.
"""

from typing import Any

import torch
from torch import Tensor

from pointsman.kernels.grouped_mm import check_experts, output_bias_shares
from pointsman.kernels.triton import fused
from pointsman.kernels.triton.fused import Setting
from pointsman.kernels.triton.products import Sorted, combine, outer, sort, times
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.linear import refuse_second_derivatives


def apply(
    hidden: Tensor, weight: Tensor, expert: Tensor, parameters: ExpertParameters, activation: str, dropout: float
) -> Tensor:
    """The experts' combined output [tokens, dim], as `reference.apply_experts`.

    Args:
        hidden: [tokens, dim].
        weight, expert: [tokens, k]; an expert of -1 is none.
    """
    p = parameters
    tokens, experts = len(hidden), len(p.w_in)
    check_experts(expert, experts)
    factors = weight.masked_fill((expert < 0) | (expert >= experts), 0)
    seed = torch.randint(2**62, (1,), device=hidden.device) if dropout else expert.new_zeros(1, dtype=torch.int64)
    output: Tensor = forward(
        hidden, factors, expert, seed, p.w_in, p.w_out, p.b_in, p.w_gate, p.b_gate, activation, dropout
    )[0]
    if p.b_out is None:
        return output
    shares = output_bias_shares(factors.view(-1), expert.reshape(-1), expert.shape[1], tokens, experts)
    return torch.addmm(output, shares.to(hidden.dtype), p.b_out)


@torch.library.custom_op("pointsman::triton_experts", mutates_args=())
def forward(
    hidden: Tensor, weight: Tensor, expert: Tensor, seed: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None,
    w_gate: Tensor | None, b_gate: Tensor | None, activation: str, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output without b_out, then what backward needs: u, g (empty if there is none), and the four of `Sorted`."""
    with torch.cuda.device_of(hidden):  # where Triton launches
        hidden, weight, k = hidden.contiguous(), weight.contiguous(), expert.shape[1]
        where = sort(expert.contiguous(), len(w_in))
        up, gate, units = fused.up(hidden, w_in, w_gate, where, k, Setting(activation, dropout, seed, b_in, b_gate))
        output = combine(times(units, w_out.transpose(1, 2), where), where, k, weight)
        return output, up, up.new_empty(0) if gate is None else gate, *where


@forward.register_fake
def _(hidden: Tensor, weight: Tensor, expert: Tensor, seed: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None,
      w_gate: Tensor | None, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
    slots, (experts, width) = expert.numel(), w_in.shape[:2]
    up = hidden.new_empty(slots, width)
    where = (expert.new_empty(size, dtype=torch.int32) for size in (slots, slots, slots, experts))
    return hidden.new_empty(hidden.shape), up, up.new_empty(0) if w_gate is None else up.new_empty(slots, width), *where


@torch.library.custom_op("pointsman::triton_experts_backward", mutates_args=())
def backward(
    gradient: Tensor, hidden: Tensor, weight: Tensor, seed: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None,
    w_gate: Tensor | None, b_gate: Tensor | None, up: Tensor, gate: Tensor, order: Tensor, row: Tensor,
    row_expert: Tensor, ends: Tensor, activation: str, dropout: float, want: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight, w_in, w_out, b_in, w_gate and b_gate: of those that are wanted."""
    with torch.cuda.device_of(hidden):
        hidden, weight, gradient = hidden.contiguous(), weight.contiguous(), gradient.contiguous()
        where, k, gated = Sorted(order, row, row_expert, ends), weight.shape[1], gate if w_gate is not None else None
        setting = Setting(activation, dropout, seed)
        d_up, d_gate, weighted, d_weight = fused.inner(gradient, w_out, up, gated, weight, where, setting)
        found: list[Tensor | None] = [None, d_weight, None, None, None, None, None]
        if want[3]:
            found[3] = outer(gradient, weighted, where, left_k=k)[0]
        del weighted
        for left, of_weight, of_bias in ((d_up, 2, 4), (d_gate, 5, 6)):
            if left is not None and (want[of_weight] or want[of_bias]):
                found[of_weight], *rest = outer(left, hidden, where, right_k=k, sums=want[of_bias])
                found[of_bias] = rest[0] if rest else None
        if want[0]:
            second = None if d_gate is None or w_gate is None else (d_gate, w_gate)
            found[0] = combine(times(d_up, w_in, where, second), where, k)
        return [one for one, wanted in zip(found, want, strict=True) if one is not None and wanted]


@backward.register_fake
def _(gradient: Tensor, hidden: Tensor, weight: Tensor, seed: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None,
      w_gate: Tensor | None, b_gate: Tensor | None, *rest: Any) -> list[Tensor]:  # fmt: skip
    given = (hidden, weight, w_in, w_out, b_in, w_gate, b_gate)
    pairs = zip(given, rest[-1], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, wanted in pairs if tensor is not None and wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, seed, w_in, w_out, b_in, w_gate, b_gate, *ctx.settings = inputs
    ctx.save_for_backward(hidden, weight, seed, w_in, w_out, b_in, w_gate, b_gate, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives()
    if gradient is None:
        return (None,) * 11
    hidden, weight, _, _, *parameters = ctx.needs_input_grad[:9]
    want = [hidden, weight, *parameters]
    found = iter(backward(gradient, *ctx.saved_tensors, *ctx.settings, want))
    d_hidden, d_weight, *rest = (next(found) if wanted else None for wanted in want)
    return d_hidden, d_weight, None, None, *rest, None, None


forward.register_autograd(_backward, setup_context=_setup_context)
