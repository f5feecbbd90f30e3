"""The stages of a router, score -> normalize -> mix -> select: what each takes and gives.

Shapes: B sequences, T tokens a sequence, N = B * T, E experts, k chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.linear import HALF
from pointsman.ops.selection import top_k
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores, Selection, Stage, Step, Tensors
from pointsman.routing import RouterState, RoutingContext

FLOOR = 1e-20
"""The least sum that weights are divided by: a token whose weights sum to less has next to none."""


def renormalized(weights: Tensor) -> Tensor:
    """Weights [..., k] divided by their sums, each at least `FLOOR`."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(FLOOR)


def of_chosen(probs: Tensor, experts: Tensor) -> Tensor:
    """The probabilities [N, width] of experts [N, width] among [N, E]; 0 for -1."""
    return probs.gather(-1, experts.clamp_min(0)).masked_fill(experts < 0, 0)


class Scorer(Stage):
    """hidden [B, T, dim] -> logits [B, T, E].

    Attributes:
        accepts_half: whether `forward` takes half precision and upcasts it itself (`linear`); otherwise it gets
            float32. A subclass with a `forward` of its own must set it again.
        may_need_responses: whether it may use `RoutingContext.responses`.
        needs_responses: whether its next forward does.
        tells_apart: whether its logits differ at all.
        frozen: whether `freeze` holds its router.
    """

    accepts_half = False
    may_need_responses = False
    needs_responses = False
    tells_apart = True
    frozen = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__ and "accepts_half" not in cls.__dict__:  # is of the same class' `forward`
            cls.accepts_half = False

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor | Scored:
        raise NotImplementedError

    @property
    def below(self) -> Mapping[str, int]:
        """Name and width of the tensors [B, T, width] that it reads of `RoutingContext.below` if they are there."""
        return {}

    def cost(self) -> int | None:
        """Multiply-adds of one token's scores; None: as many as its matrices, buffers too, have entries."""
        return None

    def plain_linear(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [E, dim] and bias [E] of the linear router with the same logits; None where there is none."""
        return None


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., dim] times weight [E, dim] transposed, plus bias [E]: [..., E], all upcast to at least float32."""
    dtype = torch.float32 if hidden.dtype in HALF else hidden.dtype
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return F.linear(hidden.to(dtype), weight, bias)


class Map(nn.Linear):
    """W x + b in the dtype of x, which routers compute in."""

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self.bias)


def extended(scorer: Scorer, extension: Any) -> Any:
    """The scorer, in place, with the methods of `extension` before those of its own class.

    So a choice adds noise, responses or thresholds to whatever scores it is given; the names of the scorer's parameters
    stay as they are.
    """
    for flag in ("needs_step_end", "training_stochastic"):  # where the scorer has its own of that name
        setattr(scorer, flag, getattr(scorer, flag) or getattr(extension, flag))
    own: Any = type(scorer)
    scorer.__class__ = _both(extension, own)
    return scorer


@cache
def _both(extension: Any, own: Any) -> type[Scorer]:
    def reduced(self: Scorer, protocol: int) -> tuple[Any, ...]:
        return _blank, (extension, own), self.__dict__  # pickle cannot look the class up by its name

    members = {
        "__module__": extension.__module__, "__doc__": extension.__doc__, "__reduce_ex__": reduced,
        "accepts_half": extension.accepts_half and own.accepts_half, "needs": extension.needs | own.needs,
    }  # fmt: skip
    if "plain_linear" not in extension.__dict__:  # the logits alone are not all that the choice needs
        members["plain_linear"] = Scorer.plain_linear
    return type(f"{extension.__name__}{own.__name__}", (extension, own), members)


def _blank(extension: Any, own: Any) -> Scorer:
    both: Any = _both(extension, own)
    return both.__new__(both)  # type: ignore[no-any-return]


class Normalizer(Stage):
    """logits [B, T, E] -> probabilities [B, T, E].

    Attributes:
        increasing: whether larger logits have larger probabilities, at every token: selection then ranks by the logits,
            which still differ where probabilities are rounded to 0 or 1.
        gives: what a choice may count on (`NEEDS`); words: the same for errors.
        reach: an upper bound of the probabilities, for histograms.
    """

    increasing = False
    gives: frozenset[str] = frozenset()
    words = "scores of its own, of which its normalizer does not say what it `gives`"
    reach = 1.0

    def forward(self, logits: Tensor) -> Tensor:
        raise NotImplementedError


NEEDS = {
    "nothing": "no scores at all",
    "positive": "scores above 0 (softmax, sigmoid or sqrtsoftplus)",
    "share": "scores from 0 to 1 (softmax or sigmoid)",
    "distribution": "probabilities that sum to 1 (softmax)",
    "softmax": "the softmax of its logits, without a temperature",
    "sigmoid": "the sigmoids of its logits, without a temperature",
    "relu": "relu(z)",
    "zeros": "weights of which most become 0 (relu, dselect)",
}
"""What a choice may need of its scores, in words."""


class Softmax(Normalizer):
    """p = softmax(z)."""

    increasing, words = True, "softmax(z)"
    gives = frozenset({"positive", "share", "distribution", "softmax"})

    def forward(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, -1)


class Sigmoid(Normalizer):
    """p_i = sigmoid(z_i), each expert on its own."""

    increasing, words = True, "sigmoid(z), which need not sum to 1"
    gives = frozenset({"positive", "share", "sigmoid"})

    def forward(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)


class SqrtSoftplus(Normalizer):
    """s_i = sqrt(softplus(z_i)) (DeepSeek-V4), each expert on its own."""

    increasing = True
    words, gives = "sqrt(softplus(z)), which has no upper bound", frozenset({"positive"})
    reach = 4.0  # sqrt(softplus(16))

    def forward(self, logits: Tensor) -> Tensor:
        return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


class Relu(Normalizer):
    """R = relu(z): weights that need not sum to 1, and may all be 0."""

    words, gives = "relu(z), which may be 0", frozenset({"relu", "zeros"})

    def forward(self, logits: Tensor) -> Tensor:
        return torch.relu(logits)


GATES: Mapping[str, type[Normalizer]] = {
    "softmax": Softmax, "sigmoid": Sigmoid, "sqrtsoftplus": SqrtSoftplus, "relu": Relu,
}  # fmt: skip


class Mixer(Stage):
    """Tokens inform each other: probabilities [B, T, E] -> probabilities [B, T, E], and what to carry on."""

    def forward(
        self, probs: Tensor, hidden: Tensor, context: RoutingContext
    ) -> tuple[Tensor, RouterState | None, Tensors]:
        """Returns the mixed probabilities, the carry (`Routing.carry`) or None, and statistics for `gather`."""
        raise NotImplementedError

    @staticmethod
    def checked(found: Any, probs: Tensor, spec: str) -> tuple[Tensor, RouterState | None, Tensors]:
        """What a mixer made of `probs`; ValueError where it is something else."""
        try:  # attributes are asked for: isinstance of a Mapping is a call of Python, in every forward
            mixed, carry, statistics = found
            shape, *_ = mixed.shape, carry is None or carry.items, statistics.items
        except (AttributeError, TypeError, ValueError):
            told = "the mixer must return (probabilities, carry or None, statistics): both are dicts"
            raise ValueError(f"{spec}: {told}") from None
        if shape != probs.shape:
            raise ValueError(f"{spec}: mixed probabilities {[*shape]} of {[*probs.shape]}: not [B, T, E]")
        return mixed, carry, statistics


class Selector(Stage):
    """Scores and k -> experts [N, k] (-1 = none) and weights [N, k].

    Attributes:
        ragged: whether a token may have fewer than k experts, also at k = E: k is then a cap.
        needs_moe: whether only `MoE` can apply what it returns (slots, means), not the experts of other libraries.
        overrides: options of every router (one value as "option=value"), and "mixer", that change nothing here and are
            refused.
        most: experts that a token may have at any k.
        renormalize: whether weights are divided by their sum; None: they have a rule of their own.
    """

    ragged: bool = False
    needs_moe: bool = False
    overrides: frozenset[str] = frozenset()
    most: int = 2**31
    renormalize: bool | None = None

    def __init__(self, renormalize: bool | None = None) -> None:
        super().__init__()
        if renormalize is not None:
            self.renormalize = renormalize

    def renormalized(self, weights: Tensor) -> Tensor:
        """Weights [N, k] divided by their sums, if `renormalize` asks for it."""
        return renormalized(weights) if self.renormalize else weights

    def cost(self, batch: int, tokens: int, k: int, dim: int) -> tuple[float, int]:
        """For `tokens` tokens in `batch` sequences: rows that the experts work on, and multiply-adds besides."""
        return tokens * min(k, self.most), 0

    def grouped(self, rows: Tensor, mask: Tensor | None, group: str) -> tuple[Tensor, Tensor | None, slice]:
        """Rows [B, T, E] and mask [B, T] as they are, or with `group` "batch" all ranks' as one group, [1, N, E] and
        [1, N], without gradients; and this rank's tokens among them."""
        if group != "batch":
            return rows, mask, slice(None)
        flat = rows.detach().flatten(0, 1)
        own = slice(self.ranks.rank * len(flat), (self.ranks.rank + 1) * len(flat))
        every = None if mask is None else self.ranks.gather_rows(mask.reshape(-1))[None]
        return self.ranks.gather_rows(flat)[None], every, own

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor] | Selection:
        raise NotImplementedError

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        """The given experts [N, width] (-1 = none) with the weights that they have here: `replay_routing`.

        Here: the probabilities, renormalised if `renormalize` is true.

        Raises:
            ValueError: weights are not a function of the experts.
        """
        return Selection(experts, self.renormalized(of_chosen(scores.probs.flatten(0, 1), experts)))


class TopK(Selector):
    """The k experts of the highest choice; weights are their probabilities, renormalised over the k or as they are.

    For a softmax, renormalised top-k equals a softmax over the top-k logits (HyperRouter's Appendix B, Mutual-Inform's
    Eq. 11); not renormalised it is TopK(softmax(z), k) (HyperRouter's Eq. 1).
    """

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs = scores.probs.flatten(0, 1)
        experts = top_k(scores.choice.flatten(0, 1), k)
        return experts, self.renormalized(probs.gather(-1, experts))


@dataclass
class Stages:
    """What a named router puts together: the scores, and what its choice adds.

    Attributes:
        balance_temperature: the balance loss takes P from softmax(logits / balance_temperature).
        losses: further losses by name. Their weights must be 0 or above.
        counted: the experts [N, j] that the balance loss counts; None: those that were chosen.
        eta: factor of the virtual experts' part of the balance loss.
        steps: what is done with a selection after the choice and after capacity.
        objective: None, or the name of a training objective that the router needs ("consistency").
        objective_weight: weight of that objective's extra term.
    """

    score: Scorer
    normalize: Normalizer = field(default_factory=Softmax)
    select: Selector | None = None
    balance_temperature: float = 1.0
    counted: Callable[[LossInput], Tensor] | None = None
    eta: float = 1.0
    losses: Mapping[str, Loss] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    objective: str | None = None
    objective_weight: float = 0.0

    @property
    def gives_softmax(self) -> bool:
        """Whether the balance loss' P are the router's own probabilities."""
        return isinstance(self.normalize, Softmax) and self.balance_temperature == 1.0
