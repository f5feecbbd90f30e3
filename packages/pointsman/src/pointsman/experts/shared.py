"""What a layer has beside its routed experts.

Responses: a function of every expert's output, for routers that let experts compete (CompeteSMoE). Shared experts
(DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066): a feed-forward network that every token takes. What virtual experts
add to the output (AdaMoE, MoE++: `pointsman.routers.frame.steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman.ops.drawing import dropout
from pointsman.ops.feed_forward import ACTIVATIONS
from pointsman.ops.linear import linear
from pointsman.ranks import ALONE, Ranks

CHUNK = 512
"""Tokens whose experts' outputs are in memory at once; backward computes them again."""


def responses(experts: nn.Module, rows: Tensor, reduce: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`reduce` of all experts' outputs [n, E, dim], differentiable, for all rows [tokens, dim]: tensors [tokens, ...].

    It costs E / k times the chosen experts' work, and in training a second forward.
    """

    def one(chunk: Tensor) -> tuple[Tensor, ...]:
        return reduce(experts.every(chunk))  # type: ignore[operator]

    parts = [checkpoint(one, chunk, use_reentrant=False) for chunk in torch.split(rows, CHUNK)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class SharedExperts(nn.Module):
    """W_out act(W_in x + b_in) + b_out, for every token with weight 1; with `gate` times sigmoid(v . x) (Qwen2-MoE).

    n shared experts of width h equal one of width n h: this is that one. `gated` is as of `Experts`.

    Args:
        dim: width of input and output.
        hidden_dim: inner width of all shared experts together.
        activation, gated, bias, dropout: as of `Experts`.
        gate: whether the output is scaled by a sigmoid, whose v [1, dim] is `gate`.

    Shapes of the parameters: `w_in`, `w_gate` [hidden, dim], `b_in`, `b_gate` [hidden], `w_out` [dim, hidden],
    `b_out` [dim].
    """

    role = "shared-experts"
    ranks: Ranks = ALONE

    def __init__(
        self, dim: int, hidden_dim: int, *, activation: str = "relu", gated: bool = False, bias: bool = True,
        dropout: float = 0.0, gate: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.hidden_dim, self.activation, self.dropout = dim, hidden_dim, activation, dropout
        self.w_in = nn.Parameter(torch.empty(hidden_dim, dim))
        self.w_out = nn.Parameter(torch.empty(dim, hidden_dim))
        self.w_gate = nn.Parameter(torch.empty(hidden_dim, dim)) if gated else None
        self.b_in = nn.Parameter(torch.empty(hidden_dim)) if bias else None
        self.b_out = nn.Parameter(torch.empty(dim)) if bias else None
        self.b_gate = nn.Parameter(torch.empty(hidden_dim)) if bias and gated else None
        self.gate = nn.Parameter(torch.empty(1, dim)) if gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear starts: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
        for name, tensor in self.named_parameters(recurse=False):
            bound = 1 / math.sqrt(self.hidden_dim if name.endswith("out") else self.dim)
            nn.init.uniform_(tensor, -bound, bound)

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, dim] -> [tokens, dim]."""
        units = linear(hidden, self.w_in, self.b_in)
        activate = ACTIVATIONS[self.activation]
        if self.w_gate is None:
            units = activate(units)
        else:
            units = units * activate(linear(hidden, self.w_gate, self.b_gate))
        output = linear(dropout(units, self.dropout, self.training, self.ranks), self.w_out, self.b_out)
        return output if self.gate is None else output * torch.sigmoid(linear(hidden, self.gate))

    def extra_repr(self) -> str:
        gated = ", gated" if self.w_gate is not None else ""
        return f"{self.dim} -> {self.hidden_dim} -> {self.dim}, {self.activation}{gated}"


class VirtualExperts(nn.Module):
    """sum_v w_v E_v(x): zero experts give 0, copies x, constants a_1 x + a_2 v with [a_1, a_2] = softmax(W x).

    Args:
        dim: width of input and output.
        kinds: "zero", "copy" or "constant" for each of the V virtual experts.

    Shapes of the parameters of C constants: `weight` [C, 2, dim] (their W), `value` [C, dim] (their v, from N(0, 1) /
    sqrt(dim)).
    """

    role = "virtual-experts"
    no_decay = ("value",)

    def __init__(self, dim: int, kinds: Sequence[str]) -> None:
        super().__init__()
        self.dim, self.kinds = dim, tuple(kinds)
        self.copies, self.constants = (
            slice(self.kinds.index(kind), self.kinds.index(kind) + self.kinds.count(kind)) if kind in kinds else None
            for kind in ("copy", "constant")
        )
        count = self.kinds.count("constant")
        self.weight = nn.Parameter(torch.empty(count, 2, dim)) if count else None
        self.value = nn.Parameter(torch.empty(count, dim)) if count else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W as nn.Linear starts: U(-1/sqrt(dim), 1/sqrt(dim)); v ~ N(0, 1/dim)."""
        if self.weight is not None and self.value is not None:
            nn.init.uniform_(self.weight, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))
            nn.init.normal_(self.value, std=1 / math.sqrt(self.dim))

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, dim], weights [tokens, V] -> [tokens, dim]."""
        own = weights.new_zeros(weights.shape[0], 1) if self.copies is None else weights[:, self.copies].sum(-1, True)
        if self.constants is None or self.weight is None or self.value is None:
            return own.to(hidden.dtype) * hidden
        scores = linear(hidden, self.weight.flatten(0, 1)).view(hidden.shape[0], len(self.weight), 2)
        shares = torch.softmax(scores.to(weights.dtype), -1) * weights[:, self.constants, None]
        own = (own + shares[..., 0].sum(-1, True)).to(hidden.dtype)
        return own * hidden + shares[..., 1].to(hidden.dtype) @ self.value.to(hidden.dtype)

    def extra_repr(self) -> str:
        return ", ".join(f"{self.kinds.count(kind)} {kind}" for kind in dict.fromkeys(self.kinds))
