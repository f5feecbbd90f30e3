"""Both mixers of Mutual-Inform (arXiv 2505.00792) in the fewest lines: read this first. Tests hold the mixers equal.

No past tokens, no padding, the whole matrix S in memory. Shapes: B sequences, T tokens, E experts, H heads, D head
width. `scores` e [B, T, E] are the router's probabilities; both give p_i = sum_j S[i, j] e_j [B, T, E].
"""

import math

import torch
from torch import Tensor

from pointsman.routing import AttentionTrace


def _visible(length: int, causal: bool, device: torch.device) -> Tensor:
    """[T, T], 0 where token j informs token i, and -inf elsewhere."""
    later = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return torch.zeros(length, length, device=device).masked_fill(later & causal, -math.inf)


def similarity_inform(scores: Tensor, tokens: Tensor, tau: float, *, causal: bool = True) -> Tensor:
    """Definition 1: S[i, :] = softmax_j(u_i . u_j / tau), of tokens u [B, T, dim]."""
    similarities = tokens @ tokens.mT / tau  # [B, T, T]
    return torch.softmax(similarities + _visible(tokens.shape[1], causal, tokens.device), -1) @ scores


def attention_inform(
    scores: Tensor, trace: AttentionTrace, sigma: float, head: int | None = None, *, causal: bool = True
) -> Tensor:
    """Definition 2 with one head, or Lemma 1 with all of them (None): which token's value explains the output?

    Head h draws a token j with probability A_h[i, j]; the output u_i is then drawn from N(H W_h v_j, sigma^2 I). S is
    the posterior of j, and of the head, given u_i.
    """
    heads, length = trace.query.shape[1], trace.query.shape[2]
    logits = trace.query @ trace.key.mT * trace.scale  # [B, H, T, T]
    if trace.bias is not None:
        logits = logits + trace.bias(0, length)
    attended = torch.log_softmax(logits + _visible(length, causal, logits.device), -1)
    means = heads * trace.value @ trace.out_weight  # [B, H, T, dim]
    distances = (trace.output[:, None, :, None] - means[:, :, None]).square().sum(-1)  # [B, H, T, T]
    joint = attended - distances / (2 * sigma**2)  # log of the joint probability, but for a constant
    if head is not None:
        return torch.softmax(joint[:, head], -1) @ scores
    posterior = torch.softmax(joint.transpose(1, 2).flatten(2), -1)  # [B, T, H * T]: of head and token together
    return posterior @ scores.repeat(1, heads, 1)
