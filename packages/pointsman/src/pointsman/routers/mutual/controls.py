"""Controls for mixers: as much mixing, without what a mixer knows of the tokens.

Smoothing scores over tokens lowers entropy and routing fluctuation by itself. `+uniform` smooths and knows nothing of
the tokens; `+shuffled` mixes by the similarities of another sequence. What a mixer gains beyond both is its own.
"""

from typing import Literal

import torch
from torch import Tensor

from pointsman.routers.frame.entries import LayerSpec, Positive, Probability, register_mixer
from pointsman.routers.frame.stages import Mixer
from pointsman.routers.mutual.mixers import TAU, Similarity, SimilarityInform
from pointsman.routers.mutual.token_mixer import Given, Rows, TokenMixer


class UniformInform(TokenMixer):
    """S[i, j] = 1 / n_i for each of the n_i real tokens that token i may see (causal: j <= i), itself among them."""

    def __init__(self, strength: float) -> None:
        super().__init__(strength, "all")

    def mix(self, given: Given) -> Tensor:
        probs, past, visible = given.probs, given.past, given.visible
        everyone = probs if past is None else torch.cat([past["probs"].to(probs.dtype), probs], 1)
        counted = everyone.new_ones(everyone.shape[:2]) if visible.real is None else visible.real.to(probs.dtype)
        sums, counts = everyone * counted[..., None], counted
        if visible.causal:
            sums, counts = sums.cumsum(1)[:, visible.past :], counts.cumsum(1)[:, visible.past :]
        else:
            sums, counts = sums.sum(1, keepdim=True), counts.sum(1, keepdim=True)
        mixed = sums / counts.clamp_min(1)[..., None]
        if visible.real is None:
            return mixed.expand_as(probs)
        return torch.where(visible.real[:, visible.past :, None], mixed, probs)

    def rows(self, given: Given) -> Rows:
        probs, visible = given.probs, given.visible
        for group in visible.groups(len(probs), probs.device):
            for start, stop in visible.blocks(probs.device):
                scores = probs.new_zeros(len(probs[group]), stop - start, visible.seen(stop))
                yield group, start, stop, torch.softmax(visible.of(group).hide_(scores, start), -1)


class ShuffledInform(SimilarityInform):
    """Similarity-Inform whose S is that of the next sequence of the batch; the scores that it mixes are their own.

    With one sequence in the batch, S is its own: a control needs batches of at least two.
    """

    batch_invariant = False
    one_process = "the next sequence of the batch may be another rank's"

    def _tensors(self, given: Given) -> tuple[Similarity, tuple[Tensor, ...], tuple[Tensor, ...]]:
        prepare, batched, shared = super()._tensors(given)
        own, tokens, *before = batched
        tokens = _next(tokens, given.context.padding_mask)
        if before and given.past is not None:
            before[1] = _next(before[1], given.past.get("real"))
        return prepare, (own, tokens, *before), shared


def _next(tokens: Tensor, real: Tensor | None) -> Tensor:
    """Each sequence's tokens [B, T, dim] at the place of the one before it; padding is 0 and so like no token."""
    kept = tokens if real is None else tokens.masked_fill(~real[..., None], 0)
    return kept.roll(-1, 0)


CONTROL = "control: smoothing without what the tokens are"


@register_mixer("uniform", paper=CONTROL)
def uniform(layer: LayerSpec, *, strength: Probability = 1.0) -> Mixer:
    """A control for mixers: every token is informed by all tokens that it may see, equally.

    strength: p = (1 - strength) e + strength times the mixed scores; 0 is the bare router.
    """
    return UniformInform(strength)


@register_mixer("shuffled", paper=CONTROL)
def shuffled(
    layer: LayerSpec, *, source: Literal["unit", "input", "attention"] = "unit", tau: Positive | None = None,
    strength: Probability = 1.0,
) -> Mixer:  # fmt: skip
    """A control for `+similarity`: tokens are mixed by the similarities of another sequence of the batch.

    source: as of similarity.
    tau: as of similarity.
    strength: p = (1 - strength) e + strength times the mixed scores; 0 is the bare router.
    """
    tau = TAU[source] if tau is None else tau
    return ShuffledInform(layer.dim, source=source, tau=tau, learned=False, strength=strength, neighbours="all")
