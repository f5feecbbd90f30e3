"""Shared experts (DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066): a feed-forward network that every token takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pointsman.ops.drawing import dropout
from pointsman.ops.feed_forward import ACTIVATIONS
from pointsman.ops.linear import linear
from pointsman.ranks import ALONE, Ranks


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
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str = "relu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        gate: bool = False,
    ) -> None:
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
