"""The weights of E feed-forward experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pointsman._errors import did_you_mean
from pointsman.ops.grouped import apply_experts
from pointsman.ops.kernels import Kernels
from pointsman.ops.reference import ACTIVATIONS, ExpertParameters
from pointsman.routing import Routing


class Experts(nn.Module):
    """E feed-forward experts: W_out act(W_in x + b_in) + b_out.

    With `gated`: W_out (act(W_gate x + b_gate) * (W_in x + b_in)) + b_out (SwiGLU for `activation="silu"`).

    Args:
        dim: width of input and output.
        hidden_dim: inner width of each expert.
        num_experts: E.
        activation: "relu", "gelu" or "silu".
        gated: whether experts have a gate.
        bias: whether the linear maps have biases.
        dropout: probability with which an expert's hidden units are dropped in training.

    Shapes of the parameters: `w_in`, `w_gate` [E, hidden, dim], `b_in`, `b_gate` [E, hidden], `w_out` [E, dim, hidden],
    `b_out` [E, dim].

    Attributes:
        kernels: which kernels compute; None: those that a timing at the first use chooses.
    """

    role = "experts"

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        activation: str = "relu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: {did_you_mean(activation, ACTIVATIONS)}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout!r}: allowed are numbers from 0 up to, not including, 1")
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.activation, self.dropout = activation, dropout
        self.kernels: Kernels | None = None
        self.w_in = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w_out = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w_gate = nn.Parameter(torch.empty(num_experts, hidden_dim, dim)) if gated else None
        self.b_in = nn.Parameter(torch.empty(num_experts, hidden_dim)) if bias else None
        self.b_out = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.b_gate = nn.Parameter(torch.empty(num_experts, hidden_dim)) if bias and gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every expert as nn.Linear starts: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
        for tensor, fan_in in (
            (self.w_in, self.dim),
            (self.b_in, self.dim),
            (self.w_gate, self.dim),
            (self.b_gate, self.dim),
            (self.w_out, self.hidden_dim),
            (self.b_out, self.hidden_dim),
        ):
            if tensor is not None:
                nn.init.uniform_(tensor, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    @property
    def expert_parameters(self) -> ExpertParameters:
        return ExpertParameters(self.w_in, self.w_out, self.b_in, self.b_out, self.w_gate, self.b_gate)

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """hidden [tokens, dim] -> [tokens, dim]: the weighted sum of each token's experts."""
        dropout = self.dropout if self.training else 0.0
        return apply_experts(hidden, routing, self.expert_parameters, self.activation, dropout, self.kernels)

    def extra_repr(self) -> str:
        gated = ", gated" if self.w_gate is not None else ""
        return f"{self.num_experts} x ({self.dim} -> {self.hidden_dim} -> {self.dim}), {self.activation}{gated}"
