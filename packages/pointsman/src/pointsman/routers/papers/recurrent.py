"""RMoE (Qiu et al. 2024, arXiv 2408.06793) and ZAYA1's depth average: a router's state goes up from layer to layer."""

from collections.abc import Mapping
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.routers.frame.entries import Count, LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scored
from pointsman.routers.frame.stages import Map, Scorer, Stages
from pointsman.routing import RoutingContext

NORM_EPS = 1e-5


class Cell(nn.Module):
    """A gated recurrent unit (torch.nn.GRUCell's equations): s' = (1 - z) n + z s; without s, s = 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.given, self.state = Map(width, 3 * width), Map(width, 3 * width)

    def forward(self, given: Tensor, state: Tensor | None) -> Tensor:
        before = self.state.bias if state is None else self.state(state)
        assert before is not None
        reset, keep, new = self.given(given).chunk(3, -1)
        reset_before, keep_before, new_before = before.to(given.dtype).chunk(3, -1)
        gate = torch.sigmoid(keep + keep_before)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_before) * new_before)
        return torch.lerp(candidate, torch.zeros_like(candidate) if state is None else state, gate)


class DepthScorer(Scorer):
    """State s_l [r] of each token over the sparse layers, s_0 = 0; logits from s_l. Tokens do not see each other.

    Args:
        cell: the recurrent unit that all layers share: s_l = GRU(W_1 h, s_(l-1)), z = W_2 s_l. None (ZAYA1):
            s_l = W_1 h + b + gamma * s_(l-1), z = MLP(RMSNorm(s_l)), with gamma [r] starting at 1 and an MLP of two
            hidden layers with GELU.
    """

    accepts_half = True

    def __init__(self, dim: int, num_experts: int, width: int, cell: Cell | None) -> None:
        super().__init__()
        self.width, self.cell = width, cell
        self.name = f"{'average' if cell is None else 'gru'}-{width}"
        self.into = Map(dim, width, bias=cell is None)
        if cell is None:
            self.gamma = nn.Parameter(torch.ones(width))
            self.norm = nn.Parameter(torch.ones(width))
            self.hidden = nn.ModuleList([Map(width, width), Map(width, width)])
        self.out = Map(width, num_experts, bias=False)

    @property
    def below(self) -> Mapping[str, int]:
        return {self.name: self.width}

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        given, state = self.into(hidden), (context.below or {}).get(self.name)
        if state is not None:
            if state.shape != given.shape:
                raise ValueError(f"recurrent: the state below must be {list(given.shape)}, got {list(state.shape)}")
            state = state.to(given.dtype)
        if self.cell is not None:
            state = self.cell(given, state)
            return Scored(self.out(state), above={self.name: state})
        state = given if state is None else given + self.gamma.to(given.dtype) * state
        units = F.rms_norm(state, (self.width,), self.norm.to(state.dtype), NORM_EPS)
        for layer in self.hidden:
            units = F.gelu(layer(units))
        return Scored(self.out(units), above={self.name: state})


@register_router("recurrent", paper="Qiu et al. 2024, arXiv 2408.06793; ZAYA1, arXiv 2511.17127")
def recurrent(layer: LayerSpec, *, width: Count | None = None, depth: Literal["gru", "average"] = "gru") -> Stages:
    """A state for each token, handed from sparse layer to sparse layer, from which each layer takes its logits.

    width: of the state (none = an eighth of the hidden states', from 8 to 256; the paper's 256 costs as much as the
        experts where those are small).
    depth: one recurrent unit for all layers (RMoE), or a weighted sum and a small network (ZAYA1).
    """
    width = min(256, max(8, layer.dim // 8)) if width is None else width
    cell: Cell | None = None
    if depth == "gru":
        key = f"recurrent-{width}"
        cell = cast(Cell, layer.shared[key] if key in layer.shared else layer.shared.setdefault(key, Cell(width)))
    return Stages(DepthScorer(layer.dim, layer.columns, width, cell))
