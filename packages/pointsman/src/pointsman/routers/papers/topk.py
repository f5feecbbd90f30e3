"""Linear routers with top-k selection: SMoE (Shazeer et al. 2017), Switch (Fedus et al. 2022), and experts in turn.

`smoe` has the losses that keep experts apart (Guo et al. 2025, arXiv 2505.22323) as options.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from pointsman.ops.drawing import own_rows, randn_like
from pointsman.ops.linear import upcast
from pointsman.ops.selection import members
from pointsman.routers.frame.entries import LayerSpec, NotNegative, Positive, Probability, Whole, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores
from pointsman.routers.frame.stages import GATES, Scorer, Selector, Stages, extended, linear
from pointsman.routers.frame.steps import Kind
from pointsman.routing import RoutingContext

INIT_STD = 0.02
EPS = 1e-6


class LinearScorer(Scorer):
    """z = W h + b, W ~ N(0, 0.02^2), b = 0.

    Args:
        noise: standard deviation of Gaussian noise on the logits, in training only.
        residual: z_l = W h + b + R z_(l-1), the logits of the sparse layer below (MoE++); R starts as nn.Linear.
        jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter); experts see the clean one.
    """

    accepts_half = True

    def __init__(
        self, dim: int, num_experts: int, *, bias: bool = True, noise: float = 0.0, jitter: float = 0.0,
        residual: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.noise = noise
        self.jitter = jitter
        self.training_stochastic = noise > 0 or jitter > 0
        self.weight = nn.Parameter(torch.randn(num_experts, dim) * INIT_STD)
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        start = torch.empty(num_experts, num_experts).uniform_(-1, 1) / math.sqrt(num_experts) if residual else None
        self.name = f"logits-{num_experts}"
        self.residual = None if start is None else nn.Parameter(start)

    @property
    def below(self) -> Mapping[str, int]:
        return {} if self.residual is None else {self.name: len(self.residual)}

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor | Scored:
        if self.training and self.jitter:
            hidden = upcast(hidden)
            low, high, new = 1 - self.jitter, 1 + self.jitter, hidden.new_empty
            hidden = hidden * own_rows(lambda shape: new(shape).uniform_(low, high), hidden.shape, self.ranks)
        logits = linear(hidden, self.weight, self.bias)
        if self.training and self.noise:
            logits = logits + self.noise * randn_like(logits, self.ranks)
        if self.residual is None:
            return logits
        # below the lowest layer 0: under DDP every parameter needs a gradient
        before = (context.below or {}).get(self.name, torch.zeros_like(logits))
        if before.shape != logits.shape:
            raise ValueError(f"residual: the logits below must be {list(logits.shape)}, got {list(before.shape)}")
        logits = logits + linear(before, self.residual).to(logits.dtype)
        return Scored(logits, above={self.name: logits})

    def plain_linear(self) -> tuple[Tensor, Tensor | None] | None:
        return (self.weight, self.bias) if self.residual is None else None


def linear_scores(
    layer: LayerSpec, *, gate: Literal["softmax", "sigmoid", "sqrtsoftplus", "relu"] = "softmax", bias: bool = True,
    noise: NotNegative = 0.0, jitter: Probability = 0.0, residual: bool = False,
) -> Stages:  # fmt: skip
    """A trained linear map W h + b.

    gate: softmax over all experts; or of each expert a sigmoid, sqrt(softplus(z)) (DeepSeek-V4) or a ReLU.
    bias: whether the linear map has one.
    noise: standard deviation of Gaussian noise on the logits in training (V-MoE uses 1/E).
    jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter) (Switch: 0.01).
    residual: a trained map of the logits of the sparse layer below is added (MoE++).
    """
    score = LinearScorer(layer.dim, layer.columns, bias=bias, noise=noise, jitter=jitter, residual=residual)
    return Stages(score, GATES[gate]())


class Answering(Scorer):
    """The scores, and in training the products of all experts' outputs of each token [N, E, E]."""

    one_process = "with orthogonality each token runs all experts where it is"
    may_need_responses = True
    accepts_half = True

    @property
    def needs_responses(self) -> bool:  # type: ignore[override]
        return self.training

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor | Scored:
        found = super().forward(hidden, context)
        if not self.training:
            return found
        if context.responses is None:
            raise ValueError("orthogonality: it asks the experts of the MoE layer: the router is not in one")
        scored = Scored.of(found)
        (products,) = context.responses(_products)
        return replace(scored, extra={**scored.extra, "products": products})


def _products(outputs: Tensor) -> tuple[Tensor]:
    outputs = upcast(outputs)
    return (outputs @ outputs.mT,)


def projections(given: LossInput) -> Tensor:
    """Mean over tokens of sum_(i, j chosen, i != j) |<E_i, E_j> / (<E_j, E_j> + eps) E_j|; virtual experts left out."""
    if "products" not in given.extra:
        return given.logits.new_zeros(())
    products = given.extra["products"].to(given.logits.dtype)
    squares = products.diagonal(dim1=1, dim2=2)  # [N, E]
    each = products.abs() * (squares.clamp_min(EPS**2).sqrt() / (squares + EPS))[:, None]
    chosen = members(given.experts, given.logits.shape[-1])[:, : given.num_experts].to(each.dtype)
    others = 1 - torch.eye(given.num_experts, dtype=each.dtype, device=each.device)
    return given.token_mean((each * others * chosen[:, :, None] * chosen[:, None]).sum((1, 2))[:, None]).sum()


def score_variance(given: LossInput) -> Tensor:
    """Minus the sum over experts of the variance of their scores over the real tokens."""
    mean = given.token_mean(given.unmixed).detach()  # its gradient is 0 over all tokens, but not over one rank's
    return -given.token_mean((given.unmixed - mean).square()).sum()


@register_router(
    "smoe", paper="Shazeer et al. 2017, arXiv 1701.06538; the baseline of all three papers", scores=linear_scores
)
def smoe(
    layer: LayerSpec, stages: Stages, *, nulls: Whole = 0, kind: Kind = "zero", eta: Positive = 1.0,
    variance: NotNegative = 0.0, orthogonality: NotNegative = 0.0,
) -> Stages:  # fmt: skip
    """A trainable linear router: p = softmax(W h + b), top-k, weights renormalised over the k.

    nulls: virtual experts that may be chosen besides the E experts.
    kind: what they give: nothing (zero: AdaMoE), the input (copy), a mix of it and a trained vector (constant), or
        one zero, one copy and the rest constants (mixed: MoE++).
    eta: factor of the virtual experts' part of the balance loss (MoE++: 0.75).
    variance: weight of a loss, minus the variance of each expert's scores over the tokens (Guo et al. 2025).
    orthogonality: weight of a loss, the projections of the chosen experts' outputs on each other (Guo et al. 2025); in
        training all experts run.
    """
    if eta != 1 and not nulls:
        raise ValueError("smoe: eta needs nulls, the number of virtual experts")
    losses = {} if not variance else {"variance": Loss(score_variance, variance)}
    if orthogonality:
        if layer.columns == 1 or layer.top_k == 1:
            raise ValueError("smoe: orthogonality needs two experts a token: top_k=1")
        stages = replace(stages, score=extended(stages.score, Answering))
        losses["orthogonality"] = Loss(projections, orthogonality)
    return replace(stages, losses=losses, eta=eta)


@register_router(
    "switch", paper="Fedus et al. 2022, arXiv 2101.03961", scores=linear_scores, balance=0.01, renormalize=False,
    starts_at=lambda layer: 1,
)  # fmt: skip
def switch(layer: LayerSpec, stages: Stages) -> Stages:
    """Switch Transformer: top-1, the weight is the expert's probability, balance loss 0.01."""
    return stages


class InTurn(Selector):
    """Token n of the batch takes the experts (n k + j) mod E, j < k; weights are their probabilities."""

    batch_invariant = False  # the place in the batch decides

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs = scores.probs.flatten(0, 1)
        tokens, num_experts = probs.shape
        first = self.ranks.rank * tokens * k
        experts = torch.arange(first, first + tokens * k, device=probs.device).remainder(num_experts).view(tokens, k)
        return experts, self.renormalized(probs.gather(-1, experts))


@register_router("forced", paper="for speed tests", scores=linear_scores, defaults={"bias": False})
def forced(layer: LayerSpec, stages: Stages) -> Stages:
    """Forced balance, for speed tests: token n takes the experts (n k + j) mod E, with weights softmax(W h)."""
    return replace(stages, select=InTurn(layer.renormalize))
