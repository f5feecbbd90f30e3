"""CompeteSMoE (Pham et al. 2024, arXiv 2402.02526; version 2: Nguyen et al. 2025, arXiv 2505.13380).

On some training steps all experts process every token, and those that respond most win; the router learns to foretell
the winners. On other steps, and in evaluation, it routes as `smoe` does.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import LayerSpec, NotNegative, Probability, Whole, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores, Selection
from pointsman.routers.frame.stages import Scorer, Stages, TopK, extended, renormalized
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext

WINNERS = 0.1  # theta: the share of the router's loss on the winners alone (version 2)


class Competing(Scorer):
    """z of the scores; on competition steps also responses a_e: |E_e(h)| (version 1), mean_d softplus(E_e(h)_d) (2).

    A step is one with the probability `rate` once `warmup` steps have passed: drawn from this layer's seed and the
    number of the step, so that micro-batches, processes and a resumed run agree.
    """

    one_process = "in a competition each token runs all experts where it is"
    may_need_responses = True
    needs_step_end = True
    accepts_half = True

    def compete(self, version: int, rate: float, warmup: int, cosines: bool) -> None:
        """Sets the competition up."""
        self.version, self.rate, self.warmup, self.cosines = version, rate, warmup, cosines
        self.steps: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.seed = nn.Buffer(torch.randint(2**31, ()))
        self.competes = self._drawn()

    def _drawn(self) -> bool:
        if self.steps.is_meta:
            return False
        draw = torch.Generator().manual_seed(int(self.seed) * 1_000_003 + int(self.steps))
        return int(self.steps) >= self.warmup and float(torch.rand((), generator=draw, device="cpu")) < self.rate

    @property
    def needs_responses(self) -> bool:  # type: ignore[override]
        own = self.parameters()
        return self.training and self.competes and not (self.frozen and all(not one.requires_grad for one in own))

    def step_end(self) -> None:
        super().step_end()
        self.steps += 1
        self.competes = self._drawn()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.competes = self._drawn()

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor | Scored:
        found = super().forward(hidden, context)
        if not self.needs_responses:
            return found
        if context.responses is None:
            raise ValueError("compete: a competition step asks the experts of the MoE layer: the router is not in one")
        scored = Scored.of(found)
        answers = dict(zip(("responses", "cosines"), context.responses(self._reduce), strict=False))
        return replace(scored, extra={**scored.extra, **answers})

    def _reduce(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs [n, E, dim] -> responses [n, E] and, if wanted, the outputs' cosines [n, E, E]."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        response = outputs.norm(dim=-1) if self.version == 1 else F.softplus(outputs).mean(-1)
        if not self.cosines:
            return (response,)
        units = F.normalize(outputs, dim=-1)
        return response, units @ units.mT

    def router_loss(self, given: LossInput) -> Tensor:
        """The mean squared difference of p = softmax(z) and its target, which gets no gradient.

        Version 1: the softmax of the k largest responses, 0 elsewhere. Version 2: softmax(a), and 0.1 times the same
        over the winners alone.
        """
        if "responses" not in given.extra:
            return given.logits.new_zeros(())
        a = given.extra["responses"].detach()
        winners = top_k(a, given.experts.shape[-1])
        if self.version == 1:
            target = torch.zeros_like(a).scatter(-1, winners, torch.softmax(a.gather(-1, winners), -1))
            return given.token_mean((given.unmixed - target).square()).mean()
        squares = (given.unmixed - torch.softmax(a, -1)).square()
        both = squares.mean(-1) + WINNERS * squares.gather(-1, winners).mean(-1)
        return given.token_mean(both[:, None]).sum()

    def diversity(self, given: LossInput) -> Tensor:
        """The mean cosine of the outputs of every two winners."""
        k = given.experts.shape[-1]
        if "cosines" not in given.extra or k == 1:
            return given.logits.new_zeros(())
        winners = top_k(given.extra["responses"], k)
        rows = given.extra["cosines"].gather(1, winners[..., None].expand(-1, -1, given.logits.shape[-1]))
        pairs = rows.gather(2, winners[:, None].expand(-1, k, -1))
        others = pairs.sum((1, 2)) - pairs.diagonal(dim1=1, dim2=2).sum(-1)
        return given.token_mean(others[:, None] / (k * (k - 1))).sum()


class Winners(TopK):
    """On competition steps the k largest responses, weighed by softmax(a) (version 1) or a; otherwise as `TopK`."""

    def __init__(self, renormalize: bool, version: int) -> None:
        super().__init__(renormalize)
        self.version = version

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        if "responses" not in scores.extra:
            return super().forward(scores, k, context)
        experts = top_k(scores.extra["responses"], k)
        return experts, self.renormalized(self._shares(scores).gather(-1, experts))

    def _shares(self, scores: Scores) -> Tensor:
        """[N, E]: what the responses' weights are, before they are renormalised."""
        a = scores.extra["responses"].to(scores.probs.dtype)
        return torch.softmax(a, -1) if self.version == 1 else renormalized(a)

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        if "responses" in scores.extra:
            scores = replace(scores, probs=self._shares(scores).view_as(scores.probs))
        return super().replay(scores, experts)


@register_router(
    "compete", paper="Pham et al. 2024, arXiv 2402.02526; Nguyen et al. 2025, arXiv 2505.13380", scores=linear_scores,
    defaults={"bias": False}, needs="distribution",
)  # fmt: skip
def compete(
    layer: LayerSpec, stages: Stages, *, version: Literal["1", "2"] = "2", rate: Probability = 0.07, warmup: Whole = 0,
    router: NotNegative = 0.01, diversity: NotNegative = 0.0,
) -> Stages:  # fmt: skip
    """On some steps all experts run and the strongest responses win; the router learns to foretell the winners.

    version: of the paper: responses are norms (1), or means of softplus (2).
    rate: the share of steps with a competition, drawn for each layer.
    warmup: steps without one at the start (the released code: 5 % of the run).
    router: weight of the router's loss on these steps.
    diversity: weight of the mean cosine of the winners' outputs.
    """
    score = extended(stages.score, Competing)
    score.compete(int(version), rate, warmup, diversity > 0)
    losses = {"router": Loss(score.router_loss, router), "diversity": Loss(score.diversity, diversity)}
    return replace(stages, score=score, select=Winners(layer.renormalize, int(version)), losses=losses)
