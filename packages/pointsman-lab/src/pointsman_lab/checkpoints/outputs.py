"""What each expert of a layer gives out on a text, and the model without one of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.hf.experts import SingleExpert
from pointsman.hf.gates import Gate

SETTINGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def why_unreadable(gate: Gate) -> str | None:
    """Why single experts of this layer cannot be computed; None if they can."""
    experts: Any = gate.experts
    kind = type(experts).__name__
    if any(not hasattr(experts, name) for name in SETTINGS):
        return f"{kind} is not one of transformers' experts with stacked weights"
    if len(experts.down_proj) != gate.num_experts:
        return f"{kind} has {len(experts.down_proj)} experts, its gate {gate.num_experts}"
    return None


Sums = dict[str, Tensor]
"""Sums of one layer over the text's tokens that chose each expert, in float64; f = its output, g = its weight.

"count" [E]; "weighted" [E], g |f|; "peak" [E], max |f_i|; "output" [E, dim], f; "square" [E], |f|^2; "everywhere"
[E, dim], f over all tokens, chosen or not, where that was asked for.
"""


class Observed:
    """The layers' sums; `mask` [B*T] bool says which tokens of the next forward count."""

    mask: Tensor

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers: dict[str, Sums] = {layer: {} for layer in layers}

    def add(self, layer: str, values: Mapping[str, Tensor]) -> None:
        sums = self.layers[layer]
        for name, value in values.items():
            value, join = value.double().cpu(), torch.maximum if name == "peak" else torch.add
            sums[name] = join(sums[name], value) if name in sums else value


@contextmanager
def expert_sums(gates: Sequence[Gate], everywhere: bool = False) -> Iterator[Observed]:
    """Inside, each forward adds to the sums. Experts are computed a second time, one by one.

    Args:
        everywhere: also each expert's output on all tokens, which costs E / k times the experts' work.
    """
    found = Observed([gate.layer for gate in gates])
    with ExitStack() as inside:
        for gate in gates:
            hook = _hook(gate, found, everywhere)
            inside.enter_context(gate.experts.register_forward_pre_hook(hook, with_kwargs=True))
        yield found


def _hook(gate: Gate, found: Observed, everywhere: bool) -> Any:
    @torch.no_grad()
    def hook(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, indices, weights = (*args, *kwargs.values())[:3]
        hidden, indices = hidden.reshape(-1, hidden.shape[-1]), indices.reshape(-1, indices.shape[-1])
        weights = weights.reshape(indices.shape).double()
        real = found.mask.to(hidden.device)
        if (offloaded := getattr(experts, "_hf_hook", None)) is not None:
            offloaded.pre_forward(experts)  # accelerate reads the weights from the disk; the forward lets them go
        compute, rows = SingleExpert(experts), []
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
        found.add(gate.layer, {name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    return hook


@contextmanager
def without_expert(gate: Gate, expert: int) -> Iterator[None]:
    """Inside, this expert's output is zero; the routing and the weights of the others stay."""

    def hook(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = [*args, *kwargs.values()]
        given[2] = given[2].reshape(given[1].shape).masked_fill(given[1] == expert, 0.0)
        return tuple(given), {}

    with gate.experts.register_forward_pre_hook(hook, with_kwargs=True):
        yield
