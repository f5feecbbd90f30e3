"""The weights of E feed-forward experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman._errors import did_you_mean
from pointsman._values import check_whole
from pointsman.experts.apply import apply_experts
from pointsman.ops.exchange import Exchange, local_part
from pointsman.ops.feed_forward import ACTIVATIONS, ExpertParameters
from pointsman.ops.linear import autocast_dtype
from pointsman.routing import Pairs, Routing, one_expert_each


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
        starts_at_zero: whether W_out starts at 0, also where a model draws the initial weights.
        exchange: how rows get to the experts of other ranks; None: all experts are here.
    """

    starts_at_zero = False
    exchange: Exchange | None = None
    role = "experts"

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, *, activation: str = "relu", gated: bool = False,
        bias: bool = True, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: {did_you_mean(activation, ACTIVATIONS)}")
        for name, size in (("dim", dim), ("hidden_dim", hidden_dim), ("num_experts", num_experts)):
            check_whole(name, size)
        if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout!r}: allowed are numbers from 0 up to, not including, 1")
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.activation, self.dropout = activation, dropout
        self.w_in = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w_out = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w_gate = nn.Parameter(torch.empty(num_experts, hidden_dim, dim)) if gated else None
        self.b_in = nn.Parameter(torch.empty(num_experts, hidden_dim)) if bias else None
        self.b_out = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.b_gate = nn.Parameter(torch.empty(num_experts, hidden_dim)) if bias and gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every expert as nn.Linear starts: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), or W_out and b_out at 0."""
        for name in ("w_in", "b_in", "w_gate", "b_gate", "w_out", "b_out"):
            if (tensor := getattr(self, name)) is not None:
                last = name.endswith("out")
                bound = 0.0 if last and self.starts_at_zero else 1 / math.sqrt(self.hidden_dim if last else self.dim)
                nn.init.uniform_(tensor, -bound, bound)

    @property
    def expert_parameters(self) -> ExpertParameters:
        return ExpertParameters(self.w_in, self.w_out, self.b_in, self.b_out, self.w_gate, self.b_gate)

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """hidden [tokens, dim] -> [tokens, dim]: the weighted sum of each token's experts."""
        if self.exchange is None:
            return self.run(hidden, routing)
        # in the dtype that the experts compute in: what they would round on arrival travels rounded
        return self.exchange(self.run, hidden, routing, autocast_dtype(hidden, self.w_in)).to(hidden.dtype)

    def run(self, hidden: Tensor, routing: Routing) -> Tensor:
        """The same with the experts that lie on this rank."""
        dropout = self.dropout if self.training else 0.0
        here = ExpertParameters(*map(local_part, self.expert_parameters))  # type: ignore[arg-type]
        return apply_experts(hidden, routing, here, self.activation, dropout)

    def every(self, hidden: Tensor) -> Tensor:
        """hidden [tokens, dim] -> [tokens, E, dim]: the output of each expert, without dropout."""
        hidden = hidden.to(self.w_in.dtype)
        units = torch.einsum("td,ehd->teh", hidden, self.w_in)
        units = units if self.b_in is None else units + self.b_in
        activate = ACTIVATIONS[self.activation]
        if self.w_gate is None:
            units = activate(units)
        else:
            gate = torch.einsum("td,ehd->teh", hidden, self.w_gate)
            units = units * activate(gate if self.b_gate is None else gate + self.b_gate)
        output = torch.einsum("teh,edh->ted", units, self.w_out)
        return output if self.b_out is None else output + self.b_out

    def extra_repr(self) -> str:
        gated = ", gated" if self.w_gate is not None else ""
        return f"{self.num_experts} x ({self.dim} -> {self.hidden_dim} -> {self.dim}), {self.activation}{gated}"


class ExpertNorm(nn.Module):
    """Layer norm with a weight and a bias for each expert, [E, dim]."""

    no_decay = ("weight", "bias")

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_experts, dim))
        self.bias = nn.Parameter(torch.zeros(num_experts, dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        """rows [P, dim] of the experts `expert` [P]."""
        normed = F.layer_norm(rows, rows.shape[-1:])
        here = (local_part(self.weight), local_part(self.bias))
        weight, bias = (tensor.to(rows.dtype).index_select(0, expert) for tensor in here if tensor is not None)
        return torch.addcmul(bias, normed, weight)


class BaseExperts(nn.Module):
    """BASE layers' experts (Lewis et al. 2021), X-MoE's: three residual feed-forward sublayers as one expert.

    Sublayer: x + W_out act(W_in LN(x) + b_in) + b_out, each with its own LN. The output is h + sum over the chosen
    experts of weight * (E(h) - h): it contains its input, and needs neither a residual nor a norm around it. W_out and
    b_out start at 0, so that every expert starts as the identity. Arguments as of `Experts`.
    """

    role = "experts"
    sublayers_each = 3
    exchange: Exchange | None = None

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, *, activation: str = "relu", gated: bool = False,
        bias: bool = True, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.norms = nn.ModuleList(ExpertNorm(dim, num_experts) for _ in range(self.sublayers_each))
        self.sublayers = nn.ModuleList(
            Experts(dim, hidden_dim, num_experts, activation=activation, gated=gated, bias=bias, dropout=dropout)
            for _ in range(self.sublayers_each)
        )
        for sublayer in self.sublayers:
            sublayer.starts_at_zero = True  # type: ignore[assignment]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear starts, but for the last map of each sublayer, which is 0."""
        for part in (*self.norms, *self.sublayers):
            part.reset_parameters()

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """hidden [tokens, dim] -> [tokens, dim], the input contained."""
        if self.exchange is None:
            pairs, change = self.changes(hidden, routing)
            return hidden.index_add(0, pairs.token, change.to(hidden.dtype))

        def run(rows: Tensor, among: Routing) -> Tensor:
            pairs, change = self.changes(rows, among)
            return change.new_zeros(rows.shape).index_add(0, pairs.token, change)

        return hidden + self.exchange(run, hidden, routing).to(hidden.dtype)

    def changes(self, hidden: Tensor, routing: Routing) -> tuple[Pairs, Tensor]:
        """The pairs of the experts that lie on this rank, and weight * (E(h) - h) of each."""
        pairs = routing.pairs
        each = one_expert_each(pairs.expert, routing.num_experts, pairs.weight.dtype)
        given = hidden.index_select(0, pairs.token)
        rows = given
        for norm, sublayer in zip(self.norms, self.sublayers, strict=True):
            rows = rows + sublayer(norm(rows, pairs.expert), each)
        return pairs, (rows - given) * pairs.weight.to(rows.dtype)[:, None]

    def extra_repr(self) -> str:
        return f"{self.num_experts} x {self.sublayers_each} sublayers"


EXPERTS: dict[str, type[Experts] | type[BaseExperts]] = {"ffn": Experts, "base": BaseExperts}
