"""Mutual-Inform (Nguyen et al. 2025, arXiv 2505.00792): tokens inform each other's choice of experts.

A mixer turns each token's expert scores e_j into p_i = sum_j S[i, j] e_j, the rows of S summing to 1. It works on any
router: `smoe+similarity`, `xmoe+attention`. In a causal context j <= i; j runs over the segment and the tokens carried
over from earlier segments.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pointsman.ops.linear import refuse_second_derivatives
from pointsman.ops.visible import Prepared, Visible
from pointsman.routers.frame.entries import LayerSpec, Positive, Probability, register_mixer
from pointsman.routers.frame.stages import Mixer
from pointsman.routers.mutual.posterior import Posterior, head_entropies
from pointsman.routers.mutual.streaming import block_scores, inform
from pointsman.routers.mutual.token_mixer import Given, Rows, TokenMixer
from pointsman.routing import AttentionTrace, RoutingContext

UNIT_FLOOR = 1e-6  # of a token's norm
RUNNING_SHARE = 0.01  # weight of one step in the running mean of the heads' entropies, from step 100 on


@dataclass(frozen=True)
class Similarity:
    """Makes scores of tokens.

    Attributes:
        unit: u is the token over its norm; otherwise the token itself.
        learned: there is a W; otherwise it is the identity.
        past: there are earlier tokens.
    """

    unit: bool
    learned: bool
    past: bool

    def __call__(self, *tensors: Tensor) -> Prepared:
        """Of probs [N, T, E], tokens [N, T, dim], (past probs and tokens,) tau, (W [dim, dim])."""
        probs, tokens, *rest = tensors
        length = tokens.shape[1]
        if self.past:
            before_probs, before_tokens, *rest = rest
            probs = torch.cat([before_probs.to(probs.dtype), probs], 1)
            tokens = torch.cat([before_tokens.to(tokens.dtype), tokens], 1)
        scale = rest[0].to(probs.dtype).rsqrt()  # on both sides of the product
        tokens = unit(tokens, scale) if self.unit else tokens * scale
        query = tokens[:, tokens.shape[1] - length :]
        return Prepared(query @ rest[1].to(probs.dtype) if self.learned else query, tokens, probs)


def unit(rows: Tensor, scale: Tensor) -> Tensor:
    """scale * rows / |rows|, each row's norm at least 1e-6, with fewer passes over memory than autograd.

    `scale` gets no gradient.
    """
    units: Tensor = _Unit.apply(rows, scale)  # type: ignore[no-untyped-call]
    return units


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: Tensor) -> Tensor:
        factor = scale / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(UNIT_FLOOR)
        units: Tensor = rows * factor
        ctx.save_for_backward(units, factor, scale)
        return units

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives("a mixer", plain=False)
        units, factor, scale = ctx.saved_tensors
        along = torch.linalg.vecdot(units, gradient).unsqueeze(-1).div_(scale * scale)
        return torch.addcmul(gradient, units, along, value=-1).mul_(factor), None


class SimilarityInform(TokenMixer):
    """S[i, :] = softmax_j(u_i' W_s u_j / tau) (Definition 1).

    Args:
        source: what u is: "unit" = hidden / |hidden|, "input" = the router's hidden states as they are,
            "attention" = the raw attention output.
        learned: W_s trains, from the identity; otherwise it is the identity.
    """

    def __init__(self, dim: int, *, source: str, tau: float, learned: bool, strength: float, neighbours: str) -> None:
        super().__init__(strength, neighbours)
        self.source = source
        self.needs = frozenset({"attention"} if source == "attention" else ())
        self.tau = nn.Buffer(torch.tensor(float(tau)))
        self.weight = nn.Parameter(torch.eye(dim)) if learned else None

    def mix(self, given: Given) -> Tensor:
        return inform(*self._tensors(given), given.visible)[0]

    def rows(self, given: Given) -> Rows:
        prepare, batched, shared = self._tensors(given)
        visible, device = given.visible, given.probs.device
        for group in visible.groups(len(given.probs), device):
            prepared = prepare(*(tensor[group] for tensor in batched), *shared)
            for start, stop in visible.blocks(device):
                yield group, start, stop, torch.softmax(block_scores(prepared, visible.of(group), start, stop), -1)

    def carried(self, probs: Tensor, hidden: Tensor, context: RoutingContext) -> dict[str, Tensor]:
        return {"probs": probs.detach(), "tokens": self._tokens(hidden, context).detach()}

    def _tokens(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        if self.source != "attention":
            return hidden
        assert context.attention is not None
        return context.attention.output.to(hidden.dtype)

    def _tensors(self, given: Given) -> tuple[Similarity, tuple[Tensor, ...], tuple[Tensor, ...]]:
        past = given.past
        prepare = Similarity(self.source == "unit", self.weight is not None, past is not None)
        before = () if past is None else (past["probs"], past["tokens"])
        shared = (self.tau,) if self.weight is None else (self.tau, self.weight)
        return prepare, (given.probs, self._tokens(given.hidden, given.context), *before), shared


class AttentionInform(TokenMixer):
    """S = A'_h, the posterior of which attended token explains a token's attention output (Definition 2), of one head
    or of all.

    Args:
        sigma: standard deviation of the Gaussians.
        factor: "heads" = W_h is H times the head's block of the output projection, as the paper's definition of
            attention has it; "one" = the block itself.
        heads: "lowest-entropy" = the head whose attention has the lowest mean entropy so far: a running mean per head,
            updated in `step_end` (head 0 before the first), so that no token looks ahead; "lowest-entropy-sequence" =
            the lowest mean entropy in this segment of this sequence, which looks ahead; "all" = every head by its
            posterior H' (Lemma 1).
    """

    needs = frozenset({"attention"})

    def __init__(self, *, sigma: float, heads: str, strength: float, neighbours: str, factor: str = "heads") -> None:
        super().__init__(strength, neighbours)
        self.heads, self.factor = heads, factor
        self.causal = heads != "lowest-entropy-sequence"
        self.needs_step_end = heads == "lowest-entropy"
        self.sigma = nn.Buffer(torch.tensor(float(sigma)))
        if heads == "lowest-entropy":
            self.head_entropy: Tensor = nn.Buffer(torch.zeros(0))  # [H], or [0] before the first step
            self.head_steps: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def sees_earlier(self, context: RoutingContext) -> bool:
        return context.causal or _trace(context).causal

    def keys(self, context: RoutingContext, past: int) -> int:
        trace = _trace(context)
        return min(past, trace.key.shape[2] - trace.query.shape[2])

    def mix(self, given: Given) -> Tensor:
        posterior, head = self._posterior(given), self._head(given.context, given.visible)
        return posterior.all_heads() if head is None else posterior.inform(head)[0]

    def rows(self, given: Given) -> Rows:
        yield from self._posterior(given).weights(self._head(given.context, given.visible))

    def _posterior(self, given: Given) -> Posterior:
        before = None if given.past is None else given.past["probs"]
        factor = 1.0 if self.factor == "one" else None
        return Posterior(_trace(given.context), given.probs, before, self.sigma, given.visible, factor)

    def _head(self, context: RoutingContext, visible: Visible) -> Tensor | None:
        """Heads [1] or [B]; None: all heads."""
        if self.heads == "all":
            return None
        if self.heads == "lowest-entropy":
            entropies = self.head_entropy if len(self.head_entropy) else self.head_entropy.new_zeros(1)
            return entropies.argmin(keepdim=True)
        sums, _ = head_entropies(_trace(context), visible, sample=False)
        return sums.argmin(1)

    def statistics(self, context: RoutingContext, visible: Visible) -> Mapping[str, Tensor]:
        if self.heads != "lowest-entropy" or not self.training or not torch.is_grad_enabled():
            return {}
        sums, counts = head_entropies(_trace(context), visible, sample=True, ranks=self.ranks)
        return {"head_entropy": sums.sum(0), "head_tokens": counts.sum()}

    @torch.no_grad()
    def step_end(self) -> None:
        """Updates the running mean from the sums since the last step."""
        if not self.sums:
            return
        sums, tokens = self.sums["head_entropy"], self.sums["head_tokens"]
        mean = (sums / tokens).to(self.sigma.dtype)
        if len(self.head_entropy) != len(mean):
            self.head_entropy = torch.zeros_like(mean)
        known = mean.isfinite().all()  # not in a step of padding alone, nor in one that overflowed
        self.head_steps += known
        share = (1 / self.head_steps.clamp_min(1)).clamp_min(RUNNING_SHARE).to(mean.dtype)
        self.head_entropy.lerp_(torch.where(known, mean, self.head_entropy), share)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.get(f"{prefix}head_entropy")
        if saved is not None and self.heads == "lowest-entropy":  # the number of heads is only known from a forward
            self.head_entropy = self.head_entropy.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _trace(context: RoutingContext) -> AttentionTrace:
    assert context.attention is not None  # the router has checked
    return context.attention


TAU = {"unit": 0.1, "input": 1.0, "attention": 1.0}
PAPER = "Nguyen et al. 2025, arXiv 2505.00792"


@register_mixer("similarity", paper=PAPER)
def similarity(
    layer: LayerSpec, *, source: Literal["unit", "input", "attention"] = "unit", tau: Positive | None = None,
    learned: bool = False, strength: Probability = 1.0, neighbours: Literal["all", "lower-entropy"] = "all",
) -> Mixer:  # fmt: skip
    """Similarity-Inform: p_i = sum_j softmax_j(u_i' W_s u_j / tau) e_j.

    source: u = the router's input scaled to norm 1 (unit), as it is (input), or the raw attention output (attention).
    tau: temperature (none = 0.1 for unit, else 1); on layer-normed inputs tau 1 makes the mixing the identity.
    learned: W_s trains, from the identity.
    strength: p = (1 - strength) e + strength times the mixed scores; 0 is the bare router.
    neighbours: all tokens, or only those whose scores have at most the entropy of their own (lower-entropy).
    """
    tau = TAU[source] if tau is None else tau
    return SimilarityInform(
        layer.dim, source=source, tau=tau, learned=learned, strength=strength, neighbours=neighbours
    )


@register_mixer("attention", paper=PAPER)
def attention(
    layer: LayerSpec, *, sigma: Positive | None = None, relative: bool = False,
    factor: Literal["heads", "one"] = "heads",
    heads: Literal["lowest-entropy", "lowest-entropy-sequence", "all"] = "lowest-entropy", strength: Probability = 1.0,
    neighbours: Literal["all", "lower-entropy"] = "all",
) -> Mixer:  # fmt: skip
    """Attention-Inform: p_i = sum_j A'[i, j] e_j, A'[i, j] ~ A[i, j] N(u_i | c W_O v_j, sigma^2 I), u its output.

    sigma: standard deviation of the Gaussians (none = sqrt(dim), the length of a vector whose coordinates are 1). The
        paper has 1, with which the Gaussians outweigh the attention and one to three others decide a token's experts.
    relative: sigma counts in units of sqrt(dim).
    factor: c is the number of heads, as the paper defines it (heads), or 1 (one).
    heads: the head of lowest mean attention entropy over training so far (lowest-entropy) or in this sequence, which
        looks ahead (lowest-entropy-sequence); or every head, by its posterior (all).
    strength: p = (1 - strength) e + strength times the mixed scores; 0 is the bare router.
    neighbours: all tokens, or only those whose scores have at most the entropy of their own (lower-entropy).
    """
    if sigma is None:
        sigma, relative = 1.0, True
    if relative:
        sigma *= math.sqrt(layer.dim)
    return AttentionInform(sigma=sigma, heads=heads, strength=strength, neighbours=neighbours, factor=factor)
