"""ReMoE (Wang et al. 2025, arXiv 2412.14711): ReLU gates, kept sparse by an L1 penalty that follows the sparsity."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scores, Selection
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext

FIRST_PENALTY = 1e-8
GROWTH = 1.2


class Positive(Selector):
    """The experts with R > 0, at most k of them, the largest first; and the penalty that keeps them few.

    After each step lambda grows by 1.2 if the sparsity S = 1 - |{R > 0}| / (N E) is below its target, and shrinks by
    1.2 if it is above. The sum over the step's micro-batches decides. S and the penalty are of R before any mixer.

    Args:
        num_experts: E.
        top_k: k of the sparsity to reach, 1 - k / E.
        balanced: whether R of an expert counts f_e = E / (k N) |{n: R_ne > 0}| times in the penalty.
    """

    ragged = True
    needs_step_end = True

    def __init__(self, num_experts: int, top_k: int, balanced: bool, renormalize: bool) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.balanced, self.renormalize = num_experts, top_k, balanced, renormalize
        self.penalty = nn.Buffer(torch.tensor(FIRST_PENALTY))

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        gates = scores.probs.flatten(0, 1)
        experts = top_k(gates, k)
        weights = gates.gather(-1, experts)
        experts = experts.masked_fill(weights <= 0, -1)
        statistics = {}
        if self.training:
            own = gates if scores.unmixed is None else scores.unmixed.flatten(0, 1)  # what the penalty moves
            active, mask = own.detach() > 0, context.padding_mask
            real = torch.ones_like(active[:, :1]) if mask is None else mask.reshape(-1, 1)
            statistics = {"active": (active & real).sum(), "tokens": real.sum()}
        return Selection(experts, self.renormalized(weights), statistics=statistics)

    def loss(self, given: LossInput) -> Tensor:
        """lambda (1/N) sum_n sum_e f_e R_ne; the gradient goes through R, not through f."""
        gates = given.unmixed
        mean = given.token_mean(gates)
        if self.balanced:
            mean = mean * given.token_mean((gates.detach() > 0).to(gates.dtype)) * self.num_experts / self.top_k
        return self.penalty * mean.sum()

    def step_end(self) -> None:
        if "tokens" in self.sums:
            surplus = self.sums["active"] - self.top_k * self.sums["tokens"]  # above 0: S is below 1 - k / E
            growth = GROWTH ** torch.sign(surplus).to(self.penalty.dtype)
            self.penalty.mul_(growth).clamp_(min=torch.finfo(growth.dtype).tiny)  # from less it would never grow again


@register_router(
    "relu", paper="Wang et al. 2025, ICLR, arXiv 2412.14711", scores=linear_scores,
    defaults={"bias": False, "gate": "relu"}, needs="relu", renormalize=False,
    starts_at=lambda layer: layer.num_experts,
)  # fmt: skip
def relu(layer: LayerSpec, stages: Stages, *, balanced: bool = True) -> Stages:
    """R = relu(W h): experts with R > 0, weight R. The layer's top_k is the mean number of experts that it trains to.

    balanced: whether the L1 penalty weighs experts by their load (the paper's); false: plain L1.
    """
    select = Positive(layer.num_experts, layer.top_k, balanced, layer.renormalize)
    return replace(stages, select=select, losses={"sparsity": Loss(select.loss, 1.0)})
