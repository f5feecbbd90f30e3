"""X-MoE (Chi et al., NeurIPS 2022): tokens and experts meet by their cosine on a low-dimensional sphere."""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.linear import orthogonal_, upcast
from pointsman.routers.frame.entries import Allowed, LayerSpec, Positive, register_router
from pointsman.routers.frame.stages import Map, Normalizer, Scorer, Stages, linear
from pointsman.routing import RoutingContext

NORM_FLOOR = 1e-4  # norms are clamped from below, so that a zero token has cosine 0
TEMPERATURE_FLOOR = 1e-4
LEAST = -1e30  # in place of the -inf of `mask`, which makes tau's gradient nan; finite over tau squared
TAU0 = {"softmax": 0.3, "sigmoid": 0.07}  # the paper's, section 4.1


class CosineScorer(Scorer):
    """s_i = (W h) . e_i / (|W h| |e_i|) (Eq. 7), each norm at least 1e-4.

    W is initialised as in nn.Linear, the rows e_i in random directions with norm `expert_norm`. `step_end` restores
    that norm. The smaller the norm, the more an optimizer's step of a given size changes the direction.

    Args:
        routing_dim: width of the sphere's space; None = no projection, W is the identity.
        normalize_tokens, normalize_experts: False leaves that side's norm in the score.
        orthogonal: the rows start as those of an orthogonal matrix.
    """

    accepts_half = True

    def __init__(
        self, dim: int, num_experts: int, routing_dim: int | None, *, expert_norm: float, normalize_tokens: bool = True,
        normalize_experts: bool = True, orthogonal: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.expert_norm = expert_norm
        self.normalize_tokens, self.normalize_experts = normalize_tokens, normalize_experts
        self.needs_step_end = normalize_experts
        self.projection = None if routing_dim is None else Map(dim, routing_dim, bias=False)
        directions = torch.randn(num_experts, dim if routing_dim is None else routing_dim)
        if orthogonal:
            orthogonal_(directions)
        self.expert_embeddings = nn.Parameter(F.normalize(directions, dim=-1) * expert_norm)

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        tokens = upcast(hidden) if self.projection is None else self.projection(hidden)
        experts = self.expert_embeddings.to(tokens.dtype)
        if self.normalize_tokens:
            tokens = F.normalize(tokens, dim=-1, eps=NORM_FLOOR)
        return linear(tokens, F.normalize(experts, dim=-1, eps=NORM_FLOOR) if self.normalize_experts else experts)

    @torch.no_grad()
    def step_end(self) -> None:
        """|e_i| = expert_norm again; a frozen router stays bit for bit as it is."""
        if self.normalize_experts and self.expert_embeddings.requires_grad:
            self.expert_embeddings.copy_(F.normalize(upcast(self.expert_embeddings), dim=-1) * self.expert_norm)


class TemperatureGate(Normalizer):
    """p = softmax(s / tau) or sigmoid(s_i / tau) (Eq. 8), tau a learnable scalar that never falls below 1e-4."""

    increasing = True

    def __init__(self, gate: str, temperature: float) -> None:
        super().__init__()
        self.gate, self.words = gate, f"{gate}(s / tau)"
        self.gives = frozenset({"positive", "share"} | ({"distribution"} if gate == "softmax" else set()))
        self.temperature = nn.Parameter(torch.tensor(temperature))

    def forward(self, logits: Tensor, squash: bool = True) -> Tensor:
        scaled = logits.clamp_min(LEAST) / self.temperature.to(logits.dtype).clamp_min(TEMPERATURE_FLOOR)
        if not squash:
            return scaled
        return torch.sigmoid(scaled) if self.gate == "sigmoid" else torch.softmax(scaled, -1)

    @torch.no_grad()
    def step_end(self) -> None:
        """Clamps tau to its floor: below it there would be no gradient."""
        if self.temperature.requires_grad:
            self.temperature.clamp_(min=TEMPERATURE_FLOOR)


Width = Annotated[
    int | Literal["full"], Allowed("whole numbers from 1, or full", lambda value: value == "full" or value >= 1)
]

FromTwo = Annotated[int, Allowed("whole numbers from 2", lambda value: value >= 2)]


@register_router(
    "xmoe", paper="Chi et al. 2022, arXiv 2204.09179", balance=0.01, renormalize=lambda layer: layer.top_k > 1
)
def xmoe(
    layer: LayerSpec, *, routing_dim: Width | None = None, normalize: bool = True, expert_norm: Positive = 0.1,
    gate: Literal["softmax", "sigmoid"] = "softmax", tau0: Positive | None = None,
) -> Stages:  # fmt: skip
    """X-MoE: cosines in a low-dimensional space, a learnable temperature, balance loss 0.01 on softmax(cosines / tau0).

    Built with top_k=1 the combine weight is the gate's value; with a larger k it is renormalised over the k.

    routing_dim: width of the space (none = half the experts, at least 2; full = the hidden states' own, no projection).
    normalize: cosines; false = dot products, and the embeddings' norms are free.
    expert_norm: the norm that the expert embeddings start with and are kept at.
    gate: softmax over all experts, or a sigmoid for each.
    tau0: temperature of the balance loss, and the first value of the gate's (none = 0.3 for softmax, 0.07 for sigmoid).
    """
    routing_dim = max(2, layer.num_experts // 2) if routing_dim is None else routing_dim
    if routing_dim == 1 and normalize:
        raise ValueError("xmoe: option routing_dim=1: allowed are whole numbers from 2: on a line cosines are signs")
    tau0 = TAU0[gate] if tau0 is None else tau0
    width = None if routing_dim == "full" else routing_dim
    norms = {"normalize_tokens": normalize, "normalize_experts": normalize}
    scorer = CosineScorer(layer.dim, layer.columns, width, expert_norm=expert_norm, **norms)
    return Stages(scorer, TemperatureGate(gate, tau0), balance_temperature=tau0)


@register_router(
    "xmoe-torchscale", paper="X-MoE as the library torchscale has it", balance=0.01,
    renormalize=lambda layer: layer.top_k > 1,
)  # fmt: skip
def xmoe_torchscale(layer: LayerSpec, *, routing_dim: FromTwo = 16, expert_norm: Positive = 1.5) -> Stages:
    """X-MoE as in torchscale and its forks; nothing is dropped.

    Unlike the paper: the token's norm stays in the score, s_i = (W h) . e_i / |e_i|; 16 dimensions whatever the number
    of experts; embeddings start orthogonal and are kept at norm 1.5; no temperature, neither in the softmax nor in the
    balance loss.

    routing_dim: width of the space.
    expert_norm: the norm of the expert embeddings.
    """
    sizes = layer.dim, layer.columns, routing_dim
    return Stages(CosineScorer(*sizes, expert_norm=expert_norm, normalize_tokens=False, orthogonal=True))
