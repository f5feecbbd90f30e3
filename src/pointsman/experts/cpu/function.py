"""The experts on a CPU as one differentiable operation: layout, forward, backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pointsman.experts.cpu import decode, dense, sparse
from pointsman.experts.cpu.dispatch import Plan, Sharing, Slots, plan, slots_of_pairs, slots_of_tokens
from pointsman.experts.cpu.hidden_units import Gradients, HiddenUnits, Kept, refuse_second_derivatives
from pointsman.experts.cpu.memory import empty_gradient
from pointsman.experts.reference import ExpertParameters
from pointsman.ops.gemm import IN_CACHE, choose
from pointsman.ops.kernels import Kernels

DTYPES = {torch.float32, torch.bfloat16}
FEW_ROWS = 24  # in float32
PADDING = 20  # rows for every 100


@dataclass(frozen=True)
class Options:
    """How experts compute: activation, dropout probability and the seed of its mask, kernels."""

    activation: str
    dropout: float
    seed: int
    kernels: Kernels

    def hidden_units(self, dtype: torch.dtype) -> HiddenUnits:
        generator = torch.Generator().manual_seed(self.seed) if self.dropout else None
        gemm = choose(self.kernels.gemm, dtype)
        return HiddenUnits(self.activation, self.dropout, gemm, generator)


@dataclass(frozen=True)
class Assignments:
    """Which expert works on which token: `expert` [tokens, k] (-1: none); or, with `token` [P], pairs: `expert` [P]."""

    token: Tensor | None
    expert: Tensor


class Work:
    """One call's layout: every token at every expert (`dense`), or gathered by expert.

    `weight` is given as it came, one for each assignment and at least float32; the kernels' form of it is made here.
    """

    def __init__(
        self, hidden: Tensor, assignments: Assignments, parameters: ExpertParameters, options: Options
    ) -> None:
        num_experts = len(parameters.w_in)
        token, expert = assignments.token, assignments.expert
        self.options = options
        self.num_experts = num_experts
        slots = slots_of_tokens(expert) if token is None else slots_of_pairs(token, expert, hidden.shape[0])
        self.slots: Slots = slots
        self.plan: Plan | None = None
        if slots.per_token != num_experts:
            self.plan = plan(
                slots,
                num_experts,
                sharing(hidden.dtype, parameters.w_in[0].numel(), options.kernels, len(slots.expert)),
            )

    def forward(
        self, hidden: Tensor, weight: Tensor, parameters: ExpertParameters, keep: bool
    ) -> tuple[Tensor, list[Kept]]:
        first = self.options.hidden_units(hidden.dtype)
        factors = self._factors(weight, hidden.dtype)
        hidden = hidden.detach()  # embedding_bag does more for what requires gradients
        if self.plan is None:
            return dense.forward(hidden, factors, parameters, first, keep)
        return sparse.forward(hidden, factors, parameters, self.plan, first, keep)

    def backward(
        self,
        gradient: Tensor,
        hidden: Tensor,
        weight: Tensor,
        parameters: ExpertParameters,
        kept: Sequence[Kept],
        gradients: Gradients,
        hidden_wanted: bool,
        weight_wanted: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        first = self.options.hidden_units(hidden.dtype)
        factors = self._factors(weight, hidden.dtype)
        gradient, hidden = gradient.contiguous(), hidden.detach()
        wanted = hidden_wanted, weight_wanted
        if self.plan is None:
            dx, dw = dense.backward(gradient, hidden, factors, parameters, first, kept, gradients, *wanted)
        else:
            dx, dw = sparse.backward(gradient, hidden, factors, parameters, self.plan, first, kept, gradients, *wanted)
        return dx, None if dw is None else self._weight_gradient(dw, weight)

    def kept_rows(self, tokens: int, parameters: ExpertParameters) -> list[int]:
        """How many rows each item of what `forward` keeps has, in its order."""
        if self.plan is None:
            return dense.kept_rows(tokens, parameters)
        return [len(part.starts) for part in self.plan.parts if part.size]

    def _by_expert(self) -> Tensor:
        return self.slots.expert.view(-1, self.num_experts)

    def _factors(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if self.plan is None:
            full = weight.new_zeros(weight.shape)
            return full.scatter_add_(1, self._by_expert(), weight).to(dtype)
        flat = weight.reshape(-1)
        chosen = self.slots.chosen
        return (flat if chosen is None else flat.index_select(0, chosen)).to(dtype)

    def _weight_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        gradient = gradient.to(weight.dtype)
        if self.plan is None:
            return gradient.gather(1, self._by_expert())
        chosen = self.slots.chosen
        if chosen is None:
            return gradient.view(weight.shape)
        return gradient.new_zeros(weight.numel()).index_copy_(0, chosen, gradient).view(weight.shape)


def sharing(dtype: torch.dtype, size: int, kernels: Kernels | None = None, slots: int = 0) -> Sharing | None:
    """Which experts whose weights have so many elements are computed together: through torch.bmm.

    In bfloat16 that is oneDNN's, and the better product for all but large experts; in float32 it is BLAS's, which pays
    for small experts, or of so few rows, that calls take the time.

    Args:
        kernels: None for a bound on what any would do.
        slots: of the whole call. A part's gathered rows and gradients are there at once: they stay a share of it.
    """
    if dtype == torch.bfloat16:
        if size > IN_CACHE:
            return None
        spare = min(128, (1 << 23) // size)
        padded = kernels is None or kernels.batched_bf16 == "padded"
        rows = 2048  # more would leave the cache, and gain little
        if padded:
            rows = max(rows, min(4096, (1 << 29) // size, slots // 2))
        return Sharing(spare, rows, rows, PADDING if padded else 0)
    most = (1 << 22) // size if size <= 1 << 16 else FEW_ROWS
    return Sharing(min(128, (1 << 21) // size), most, 2048) if size <= 1 << 17 else None


def apply(
    hidden: Tensor, weight: Tensor, assignments: Assignments, parameters: ExpertParameters, options: Options
) -> Tensor:
    """The experts' combined output [tokens, dim], for contiguous tensors of one dtype of `DTYPES`."""
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, *parameters)
    ):
        output: Tensor = _Experts.apply(hidden, weight, assignments, options, *parameters)  # type: ignore[no-untyped-call]
        return output
    return evaluate(hidden, weight, assignments, parameters, options)


def evaluate(
    hidden: Tensor, weight: Tensor, assignments: Assignments, parameters: ExpertParameters, options: Options
) -> Tensor:
    """`apply` where no backward follows."""
    token, expert = assignments.token, assignments.expert
    if token is None and expert.numel() <= decode.MOST and not options.dropout:
        first, row = options.hidden_units(hidden.dtype), options.kernels.row_of(hidden.dtype)
        return decode.forward(hidden, weight, expert, parameters, first, row)
    return Work(hidden, assignments, parameters, options).forward(hidden, weight, parameters, keep=False)[0]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, assignments: Assignments, options: Options, *tensors: Tensor | None
    ) -> Tensor:
        parameters = ExpertParameters(*tensors)  # type: ignore[arg-type]
        work = Work(hidden, assignments, parameters, options)
        output, kept = work.forward(hidden, weight, parameters, keep=True)
        ctx.work = work
        ctx.width = len(kept[0]) if kept else 1
        ctx.save_for_backward(hidden, weight, *tensors, *(tensor for item in kept for tensor in item))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        hidden, weight, *rest = ctx.saved_tensors
        parameters, flat = ExpertParameters(*rest[:6]), rest[6:]
        kept = [tuple(flat[start : start + ctx.width]) for start in range(0, len(flat), ctx.width)]
        hidden_wanted, weight_wanted, _, _, *wanted = ctx.needs_input_grad
        gradients = Gradients(
            *(
                empty_gradient(tensor) if needed and tensor is not None else None
                for tensor, needed in zip(parameters, wanted, strict=True)
            )
        )
        pair = ctx.work.backward(gradient, hidden, weight, parameters, kept, gradients, hidden_wanted, weight_wanted)
        return *pair, None, None, *gradients
