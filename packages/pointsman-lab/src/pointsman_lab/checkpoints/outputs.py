"""What each expert of a layer gives out on a text, and the model without one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.hf.experts import SingleExpert
from pointsman.hf.gates import Gate

SETTINGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


def why_unreadable(gate: Gate) -> str | None:
    """Why single experts of this layer cannot be computed; None if they can."""
    experts: Any = gate.experts
    kind = type(experts).__name__
    if any(not hasattr(experts, name) for name in SETTINGS):
        return f"{kind} is not one of transformers' experts with stacked weights"
    if len(experts.down_proj) != gate.num_experts:
        return f"{kind} has {len(experts.down_proj)} experts, its gate {gate.num_experts}"
    return None


@dataclass
class ExpertSums:
    """Sums of one layer over the text's tokens that chose each expert, in float64; f = its output, g = its weight.

    Attributes:
        count [E], weighted [E] (g |f|), peak [E] (max |f_i|).
        output [E, dim] (f), square [E] (|f|^2).
        everywhere [E, dim]: f over all tokens, chosen or not, where that was asked for; tokens: their number.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            value, mine = value.double().cpu(), self.sums.get(name)
            self.sums[name] = value if mine is None else torch.maximum(mine, value) if name == "peak" else mine + value

    def __getattr__(self, name: str) -> Tensor:
        try:
            found: Tensor = self.__dict__["sums"][name]
        except KeyError:
            raise AttributeError(name) from None
        return found


class Observed:
    """The layers' sums; `mask` [B*T] bool says which tokens of the next forward count."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = {layer: ExpertSums() for layer in layers}
        self.mask: Tensor | None = None


@contextmanager
def expert_sums(gates: Sequence[Gate], everywhere: bool = False) -> Iterator[Observed]:
    """Inside, each forward adds to the sums. Experts are computed a second time, one by one.

    Args:
        everywhere: also each expert's output on all tokens, which costs E / k times the experts' work.
    """
    found = Observed([gate.layer for gate in gates])
    handles = [
        gate.experts.register_forward_pre_hook(_hook(gate, found, everywhere), with_kwargs=True) for gate in gates
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _hook(gate: Gate, found: Observed, everywhere: bool) -> Any:
    @torch.no_grad()
    def hook(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, indices, weights = (*args, *kwargs.values())[:3]
        hidden, indices = hidden.reshape(-1, hidden.shape[-1]), indices.reshape(-1, indices.shape[-1])
        weights = weights.reshape(indices.shape).double()
        real = torch.ones(len(hidden), dtype=torch.bool) if found.mask is None else found.mask
        real, compute, sums = real.to(hidden.device), SingleExpert(experts), found.layers[gate.layer]
        if (offloaded := getattr(experts, "_hf_hook", None)) is not None:
            offloaded.pre_forward(experts)  # accelerate reads the weights from the disk; the forward lets them go
            compute = SingleExpert(experts)
        rows = []
        for expert in range(gate.num_experts):
            token, place = torch.nonzero((indices == expert) & real[:, None], as_tuple=True)
            out = compute(hidden[token], expert).double()
            norm = out.norm(dim=-1)
            row = {
                "count": norm.new_tensor(float(len(token))), "weighted": (weights[token, place] * norm).sum(),
                "square": norm.square().sum(), "output": out.sum(0),
                "peak": out.abs().max() if len(token) else norm.new_zeros(()),
            }  # fmt: skip
            if everywhere:
                row["everywhere"] = compute(hidden[real], expert).double().sum(0)
            rows.append(row)
        sums.add(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        sums.tokens += int(real.sum())

    return hook


@contextmanager
def without_expert(gate: Gate, expert: int) -> Iterator[None]:
    """Inside, this expert's output is zero; the routing and the weights of the others stay."""

    def hook(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = [*args, *kwargs.values()]
        given[2] = given[2].reshape(given[1].shape).masked_fill(given[1] == expert, 0.0)
        return tuple(given), {}

    handle = gate.experts.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
