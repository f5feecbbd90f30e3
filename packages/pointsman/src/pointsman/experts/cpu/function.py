"""The experts on a CPU as one differentiable operation: layout, forward, backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pointsman.experts.cpu import decode, dense, grouped, sparse
from pointsman.experts.cpu.groups import grouping
from pointsman.experts.cpu.hidden_units import (
    Gradients,
    HiddenUnits,
    Saved,
    empty_gradients,
)
from pointsman.experts.cpu.memory import empty_gradient
from pointsman.experts.cpu.permute import Permutation, assignments_of_pairs, assignments_of_tokens, permutation
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.gemm import choose
from pointsman.ops.kernels import Kernels
from pointsman.ops.linear import refuse_second_derivatives

DTYPES = {torch.float32, torch.bfloat16}


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
class Chosen:
    """The experts of each token: `expert` [tokens, k] (-1: none); or, with `token` [A], pairs: `expert` [A]."""

    token: Tensor | None
    expert: Tensor


class Layout:
    """How one call is computed: every token at every expert (`dense`), or permuted by expert (`grouped`, `sparse`).

    Combine weights are given as the routing holds them, in at least float32. The paths get them in their own order, in
    the dtype of the hidden states.
    """

    def __init__(self, hidden: Tensor, chosen: Chosen, parameters: ExpertParameters, options: Options) -> None:
        self.options, self.num_experts = options, len(parameters.w_in)
        if chosen.token is None:
            self.assignments = assignments_of_tokens(chosen.expert)
        else:
            self.assignments = assignments_of_pairs(chosen.token, chosen.expert, hidden.shape[0])
        self.permutation: Permutation | None = None
        self.sorted: grouped.Sorted | None = None
        if self.assignments.per_token == self.num_experts:
            return
        size, count = parameters.w_in[0].numel(), len(self.assignments.expert)
        if grouped.suits(parameters, count, choose(options.kernels.gemm, hidden.dtype)):
            self.sorted = grouped.sort(self.assignments, self.num_experts)
        else:
            limits = grouping(hidden.dtype, size, options.kernels, count)
            self.permutation = permutation(self.assignments, self.num_experts, limits)

    def forward(
        self, hidden: Tensor, weight: Tensor, parameters: ExpertParameters, save: bool
    ) -> tuple[Tensor, list[Saved]]:
        """The combined output [tokens, dim], and what backward needs."""
        first = self.options.hidden_units(hidden.dtype)
        factors = self._factors(weight, hidden.dtype)
        hidden = hidden.detach()  # embedding_bag does more for what requires gradients
        if self.sorted is not None:
            return grouped.forward(hidden, factors, parameters, self.sorted, first, save)
        if self.permutation is None:
            return dense.forward(hidden, factors, parameters, first, save)
        return sparse.forward(hidden, factors, parameters, self.permutation, first, save)

    def backward(
        self,
        gradient: Tensor,
        hidden: Tensor,
        weight: Tensor,
        parameters: ExpertParameters,
        saved: Sequence[Saved],
        wanted: Sequence[bool],
        empty: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> tuple[Tensor | None, Tensor | None, Gradients]:
        """Gradients of `hidden`, `weight` and the parameters, those of the eight that are `wanted`.

        Args:
            empty: makes room for a large gradient of a parameter.
        """
        first = self.options.hidden_units(hidden.dtype)
        factors = self._factors(weight, hidden.dtype)
        gradient, hidden = gradient.contiguous(), hidden.detach()
        hidden_wanted, weight_wanted, *of_parameters = wanted
        if self.sorted is not None:
            dx, dw, gradients = grouped.backward(
                gradient, hidden, factors, parameters, self.sorted, first, saved, wanted
            )
        else:
            gradients = empty_gradients(parameters, of_parameters, empty)
            rest = first, saved, gradients, hidden_wanted, weight_wanted
            if self.permutation is not None:
                dx, dw = sparse.backward(gradient, hidden, factors, parameters, self.permutation, *rest)
            else:
                dx, dw = dense.backward(gradient, hidden, factors, parameters, *rest)
        return dx, None if dw is None else self._weight_gradient(dw, weight), gradients

    def saved_rows(self, tokens: int, parameters: ExpertParameters) -> list[int]:
        """How many rows each item of what `forward` saves has, in its order."""
        if self.sorted is not None:
            return [len(self.sorted.order)]
        if self.permutation is None:
            return dense.saved_rows(tokens, parameters)
        return [len(group.row_starts) for group in self.permutation.groups if group.size]

    @property
    def _dense(self) -> bool:
        return self.permutation is None and self.sorted is None

    def _by_expert(self) -> Tensor:
        return self.assignments.expert.view(-1, self.num_experts)

    def _factors(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if self._dense:
            full = weight.new_zeros(weight.shape)
            return full.scatter_add_(1, self._by_expert(), weight).to(dtype)
        flat, source = weight.reshape(-1), self.assignments.source
        return (flat if source is None else flat.index_select(0, source)).to(dtype)

    def _weight_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        gradient = gradient.to(weight.dtype)
        if self._dense:
            return gradient.gather(1, self._by_expert())
        source = self.assignments.source
        if source is None:
            return gradient.view(weight.shape)
        return gradient.new_zeros(weight.numel()).index_copy_(0, source, gradient).view(weight.shape)


def apply(hidden: Tensor, weight: Tensor, chosen: Chosen, parameters: ExpertParameters, options: Options) -> Tensor:
    """The experts' combined output [tokens, dim], for contiguous tensors of one dtype of `DTYPES`."""
    given = (hidden, weight, *parameters)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        output: Tensor = _Experts.apply(hidden, weight, chosen, options, *parameters)  # type: ignore[no-untyped-call]
        return output
    return evaluate(hidden, weight, chosen, parameters, options)


def evaluate(hidden: Tensor, weight: Tensor, chosen: Chosen, parameters: ExpertParameters, options: Options) -> Tensor:
    """`apply` where no backward follows."""
    token, expert = chosen.token, chosen.expert
    if token is None and expert.numel() <= decode.MOST and not options.dropout:
        first, row = options.hidden_units(hidden.dtype), options.kernels.row_of(hidden.dtype)
        return decode.forward(hidden, weight, expert, parameters, first, row)
    return Layout(hidden, chosen, parameters, options).forward(hidden, weight, parameters, save=False)[0]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, chosen: Chosen, options: Options, *tensors: Tensor | None
    ) -> Tensor:
        parameters = ExpertParameters(*tensors)  # type: ignore[arg-type]
        layout = Layout(hidden, chosen, parameters, options)
        output, saved = layout.forward(hidden, weight, parameters, save=True)
        ctx.layout = layout
        ctx.width = len(saved[0]) if saved else 1
        ctx.save_for_backward(hidden, weight, *tensors, *(tensor for item in saved for tensor in item))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        hidden, weight, *rest = ctx.saved_tensors
        parameters, flat = ExpertParameters(*rest[:6]), rest[6:]
        saved = [tuple(flat[start : start + ctx.width]) for start in range(0, len(flat), ctx.width)]
        hidden_wanted, weight_wanted, _, _, *of_parameters = ctx.needs_input_grad
        wanted = [hidden_wanted, weight_wanted, *of_parameters]
        dx, dw, gradients = ctx.layout.backward(gradient, hidden, weight, parameters, saved, wanted, empty_gradient)
        return dx, dw, None, None, *gradients
