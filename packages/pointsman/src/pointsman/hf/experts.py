"""`experts_implementation="pointsman"`: experts of Hugging Face models on our kernels.

Hugging Face's layout: `gate_up_proj` [E, 2 * hidden, dim] (gate first) and `down_proj` [E, dim, hidden]. Some classes
transpose both, interleave gate and up, add biases, use their own gating function, or have no gate. Experts of the form
act(gate) * up in the plain layout use `pointsman.experts`; all others run one expert at a time on sorted tokens, with
the class's own gating function. On a GPU the plain layout uses `pointsman.experts`, too; a few tokens, as in decoding,
transformers' `batched_mm`, and other forms of experts its `grouped_mm`.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation, SiLUActivation
from transformers.integrations import moe as huggingface

from pointsman.experts.apply import apply_experts
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import exporting
from pointsman.routing import Routing

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    GELUActivation: "gelu",
}
NAME = "pointsman"
FEW = 16  # assignments on a GPU up to which `batched_mm` is taken; measured: faster with 8, slower with 64


def register() -> None:
    """Registers `experts_implementation="pointsman"` with transformers."""
    huggingface.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def activation_of(experts: Any) -> str | None:
    """The name of the activation; None if the experts are not act(gate) * up in the plain layout."""
    plain = experts.has_gate and experts.is_concatenated and not experts.is_transposed and not experts.has_bias
    plain = plain and not getattr(experts, "has_post_expert_norm", False)  # transformers 5.17 has none
    if not plain or type(experts)._apply_gate is not huggingface._default_apply_gate:
        return None
    name = ACTIVATIONS.get(type(experts.act_fn))
    if name == "gelu" and getattr(experts.act_fn, "approximate", "none") != "none":
        return None
    return name


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [tokens, dim], top_k_index and top_k_weights [tokens, k] -> [tokens, dim]."""
    activation, on_cpu = activation_of(self), hidden_states.device.type == "cpu"
    parameters = None
    if activation is not None:
        gate, up = self.gate_up_proj.unflatten(1, (2, -1)).unbind(1)
        parameters = ExpertParameters(up, self.down_proj, w_gate=gate)
    if not on_cpu and top_k_index.numel() <= FEW and not exporting():
        few: Tensor = huggingface.batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return few
    # our way through experts of another form reads the routing: torch.export cannot, a GPU would wait
    if activation is None and (not on_cpu or exporting()):
        output: Tensor = huggingface.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return output
    if getattr(self, "_is_expert_parallel", True):  # an index from num_experts on means an expert of another process
        top_k_index = top_k_index.masked_fill(top_k_index >= self.num_experts, -1)
    weights = top_k_weights.reshape(top_k_index.shape)
    if activation is None and len(hidden_states) == 1:
        return _one_token(self, hidden_states, top_k_index[0].tolist(), weights)
    scores = weights.new_empty(0, self.num_experts)
    routing = Routing(top_k_index, weights, scores, scores)
    if activation is None or parameters is None:
        return _expert_by_expert(self, hidden_states, routing)
    return apply_experts(hidden_states, routing, parameters, activation).to(hidden_states.dtype)


def _one_token(self: Any, hidden: Tensor, chosen: list[int], weights: Tensor) -> Tensor:
    compute = SingleExpert(self)
    results = [compute(hidden, expert) for expert in chosen if expert >= 0]
    if not results:
        return torch.zeros_like(hidden)
    if len(results) < len(chosen):
        weights = weights[:, [column for column, expert in enumerate(chosen) if expert >= 0]]
    return (torch.cat(results) * weights.t()).sum(0, keepdim=True).to(hidden.dtype)


def _expert_by_expert(self: Any, hidden: Tensor, routing: Routing) -> Tensor:
    pairs, compute = routing.pairs, SingleExpert(self)
    rows = hidden.index_select(0, pairs.token)
    ends = enumerate(itertools.pairwise(pairs.offsets.tolist()))
    results = [compute(rows[start:stop], expert) for expert, (start, stop) in ends if start < stop]
    if not results:
        return torch.zeros_like(hidden)
    weighted = torch.cat(results) * pairs.weight[:, None]
    output = weighted.new_zeros(hidden.shape).index_add(0, pairs.token, weighted)
    return output.to(hidden.dtype)


class SingleExpert:
    """Computes one expert with the class's own gating, biases and layout: rows [n, dim] -> [n, dim]."""

    def __init__(self, experts: Any) -> None:
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        self.experts = experts
        self.first, self.second = getattr(experts, name).unbind(0), experts.down_proj.unbind(0)
        self.biases: list[tuple[Tensor, ...] | None] = [None, None]
        if experts.has_bias:
            self.biases = [getattr(experts, f"{name}_bias").unbind(0), experts.down_proj_bias.unbind(0)]

    def __call__(self, rows: Tensor, expert: int) -> Tensor:
        experts = self.experts
        up = _linear(rows, self.first[expert], self.biases[0], expert, experts.is_transposed)
        units = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
        result = _linear(units, self.second[expert], self.biases[1], expert, experts.is_transposed)
        return experts.post_expert_norm(result) if getattr(experts, "has_post_expert_norm", False) else result


def _linear(rows: Tensor, weight: Tensor, biases: tuple[Tensor, ...] | None, expert: int, transposed: bool) -> Tensor:
    return F.linear(rows, weight.t() if transposed else weight, None if biases is None else biases[expert])
