"""Rows to the ranks that hold their experts, and back: expert parallelism in plain torch.

A token goes once to each rank that holds at least one of its experts, with the ids and weights of these. The weighted
sum of their outputs comes back, once from each rank. So D rows a token travel, D the ranks that its experts lie on, not
k. Every collective is called by every rank, also by one without rows, and those of rows and weights differentiate.

Shapes: N tokens here, R rows received, E experts, E' = E / ranks of them here, k chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pointsman.routing import Routing

Run = Callable[[Tensor, Routing], Tensor]


@dataclass
class Exchange:
    """The exchange of one layer.

    Args:
        group: the process group of the ranks that the experts are divided over, in the order of their experts.
        num_experts: E, divisible by their number.

    Attributes:
        sent: rows that the last call sent to other ranks, and to this one.
    """

    group: Any
    num_experts: int
    sent: int = 0

    @property
    def local(self) -> int:
        """E', the experts of each rank."""
        return self.num_experts // int(self.group.size())

    def __call__(self, run: Run, hidden: Tensor, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
        """The weighted sums of the experts' outputs, [N, dim].

        Args:
            run: (rows [R, dim], a routing among this rank's experts) -> [R, dim], the weighted sums.
            hidden: [N, dim].
            routing: of these tokens, among all experts.
            dtype: that rows travel in, there and, as their gradients, back; None: that of `hidden`.
        """
        weight, token, expert = routing.assignments
        if token is None:
            return self._exchange(run, hidden, expert, weight, dtype)
        each = self._exchange(run, hidden.index_select(0, token), expert[:, None], weight[:, None], dtype)
        return each.new_zeros(hidden.shape).index_add(0, token, each)

    def _exchange(
        self, run: Run, hidden: Tensor, experts: Tensor, weights: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        from torch.distributed import all_to_all_single
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        ranks, local = int(self.group.size()), self.local
        home = torch.where(experts >= 0, experts // local, ranks)
        goes = torch.zeros(len(hidden), ranks + 1, dtype=torch.bool, device=hidden.device).scatter_(1, home, True)
        counts = goes[:, :ranks].sum(0)
        expected = torch.empty_like(counts)
        all_to_all_single(expected, counts, group=self.group)
        send, receive = torch.stack([counts, expected]).tolist()  # the one wait for a GPU
        self.sent = sum(send)
        places = torch.nonzero_static(goes[:, :ranks].t(), size=self.sent)  # [sent, 2], by rank, then by token
        rank, token = places.unbind(1)
        here = home.index_select(0, token) == rank[:, None]
        ids = torch.where(here, experts.index_select(0, token) - rank[:, None] * local, -1)
        shares = torch.where(here, weights.index_select(0, token), 0)
        taken = ids.new_empty(sum(receive), ids.shape[1])
        all_to_all_single(taken, ids.contiguous(), receive, send, group=self.group)

        def there(rows: Tensor) -> Tensor:
            arrived: Tensor = all_to_all_single_autograd(rows.contiguous(), receive, send, self.group)
            return arrived

        taken_rows: Tensor = _Take.apply(hidden, token, send)  # type: ignore[no-untyped-call]
        rows, weight = there(taken_rows.to(dtype or hidden.dtype)), there(shares)
        one = weight.new_zeros(1, 1).expand(len(taken), local)
        result = run(rows, Routing(taken, weight, one, one))
        back: Tensor = all_to_all_single_autograd(result.contiguous(), send, receive, self.group)
        output: Tensor = _Sum.apply(back, token, send, len(hidden))  # type: ignore[no-untyped-call]
        return output


class _Take(torch.autograd.Function):
    """hidden[token], of tokens that are distinct in each of the parts of these sizes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(token)
        ctx.sizes, ctx.count = sizes, len(hidden)
        return hidden.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(gradient, *ctx.saved_tensors, ctx.sizes, ctx.count), None, None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """[count, dim]: the rows of each token, added up part by part. In one call a GPU would add them in any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, sizes: list[int], count: int) -> Tensor:
        ctx.save_for_backward(token)
        ctx.sizes = sizes
        total = rows.new_zeros(count, rows.shape[1])
        for part, of in zip(torch.split(rows, sizes), torch.split(token, sizes), strict=True):
            total.index_add_(0, of, part)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Take.apply(gradient, *ctx.saved_tensors, ctx.sizes), None, None, None  # type: ignore[no-untyped-call]


def local_part(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a tensor that is divided over ranks; others as they are."""
    if tensor is None or type(tensor).__name__ != "DTensor":
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
