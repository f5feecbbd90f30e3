"""S-BASE (Clark et al. 2022, arXiv 2202.01169): training routes by a balanced transport plan, evaluation greedily."""

import math
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import Allowed, LayerSpec, Positive, register_router
from pointsman.routers.frame.stage_values import Scores
from pointsman.routers.frame.stages import GATES, Selector, Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext


def column_potentials(scores: Tensor, mask: Tensor | None, iterations: int) -> Tensor:
    """log v [G, 1, E] of the plan diag(u) exp(scores) diag(v), rows summing to 1/N and columns to 1/E.

    u scales a row as a whole and is left out: it changes no choice. On a CPU by products, as long as the scores of no
    row are so far apart that these could overflow; otherwise in logarithms.

    Args:
        scores: [G, N, E], divided by the temperature.
        mask: [G, N] bool, True for a real token; the others take no part.
        iterations: updates of rows and columns.
    """
    groups, tokens, num_experts = scores.shape
    real = scores.new_full((groups, 1), tokens) if mask is None else mask.sum(1, keepdim=True).to(scores.dtype)
    potential = scores.new_zeros(groups, 1, num_experts)
    if not scores.numel():
        return potential
    if scores.device.type == "cpu" and not torch.compiler.is_compiling():
        from_best = scores - scores.amax(-1, keepdim=True)
        if float(from_best.min()) > -math.log(torch.finfo(scores.dtype).max) / 4:
            plan = from_best.exp() if mask is None else from_best.exp() * mask[..., None]
            return _by_products(plan, real.clamp_min(1)[..., None], iterations)
    for _ in range(iterations):
        rows = -torch.logsumexp(scores + potential, -1, keepdim=True) - real.clamp_min(1).log()[..., None]
        if mask is not None:
            rows = rows.masked_fill(~mask[..., None], -math.inf)
        columns = torch.logsumexp(scores + rows, 1, keepdim=True)
        potential = torch.where(columns.isfinite(), -columns - math.log(num_experts), 0)
    return potential


def _by_products(plan: Tensor, real: Tensor, iterations: int) -> Tensor:
    """`column_potentials` of exp(scores) = plan [G, N, E], each row's largest 1, or 0 for padding."""
    turned = plan.transpose(1, 2).contiguous()
    columns = plan.new_ones(len(plan), plan.shape[2], 1)
    shift = math.log(plan.shape[2])
    for _ in range(iterations):
        rows = 1 / (real * (plan @ columns)).clamp_min(torch.finfo(plan.dtype).tiny)
        columns = torch.exp(-torch.log(turned @ rows) - shift)
        columns = torch.where(columns.isfinite(), columns, 1)
    return columns.log().transpose(1, 2)


class Sinkhorn(Selector):
    """Training: the k largest entries of each row of the balanced plan. Evaluation: the k largest scores.

    Weights are the probabilities of the chosen experts; no gradient goes through the choice.
    """

    training_causal = False

    def __init__(self, temperature: float, iterations: int, group: str, renormalize: bool) -> None:
        super().__init__()
        self.temperature, self.iterations, self.group, self.renormalize = temperature, iterations, group, renormalize
        self.training_batch_invariant = group == "sequence"

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        choice = scores.choice
        if self.training:
            with torch.no_grad():
                # a mixer hands on probabilities; their logarithms are what it made of the logits
                logits = choice if choice is scores.logits else choice.clamp_min(torch.finfo(choice.dtype).tiny).log()
                logits, mask, own = self.grouped(logits, context.padding_mask, self.group)
                logits = logits / self.temperature
                choice = (logits + column_potentials(logits, mask, self.iterations)).flatten(0, 1)[own]
        experts = top_k(choice.reshape(-1, choice.shape[-1]), k)
        return experts, self.renormalized(scores.probs.flatten(0, 1).gather(-1, experts))


def sigmoid_at_top_1(layer: LayerSpec, *, gate: Literal["softmax", "sigmoid"] | None = None) -> Stages:
    """A trained linear map W h.

    gate: of the weights; none = sigmoid where the layer starts with k = 1, else softmax.
    """
    chosen = gate or ("sigmoid" if layer.top_k == 1 else "softmax")
    return Stages(LinearScorer(layer.dim, layer.columns, bias=False), GATES[chosen]())


@register_router("sinkhorn", paper="Clark et al. 2022, arXiv 2202.01169", scores=sigmoid_at_top_1, renormalize=False)
def sinkhorn(
    layer: LayerSpec, stages: Stages, *, temperature: Positive = 1.0,
    iterations: Annotated[int, Allowed("whole numbers from 1 to 10000", lambda value: 1 <= value <= 10_000)] = 30,
    group: Literal["batch", "sequence"] = "batch",
) -> Stages:  # fmt: skip
    """z = W h. Training: top-k of the Sinkhorn plan over the group's tokens. Evaluation: top-k of z.

    temperature: of the plan, exp(z / temperature).
    iterations: Sinkhorn updates; a fixed number, without early stop.
    group: whose tokens are balanced: the batch's, or each sequence's.
    """
    return replace(stages, select=Sinkhorn(temperature, iterations, group, layer.renormalize))
