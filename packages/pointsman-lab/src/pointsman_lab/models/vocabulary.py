"""The two ends of a language model, tied: token embedding and softmax, full or adaptive."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.cross_entropy import linear_cross_entropy
from pointsman.ops.linear import linear

DIVISOR = 4  # each cluster of an adaptive embedding is this much narrower than the one before (Baevski & Auli 2019)


class TiedEmbedding(nn.Module):
    """One matrix E for input and output: sqrt(dim) E[token] going in, softmax(E h + b) coming out."""

    role = "embedding"

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.scale = math.sqrt(dim)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, dim]."""
        return F.embedding(tokens, self.weight) * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., V]."""
        return linear(hidden, self.weight, self.bias)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Nats for each token: hidden [tokens, dim], targets [tokens] -> [tokens]."""
        return linear_cross_entropy(hidden, self.weight, self.bias, targets)


class AdaptiveEmbedding(nn.Module):
    """Clusters of falling frequency and width, tied (Grave et al. 2017; Baevski & Auli 2019).

    Token numbers must fall in frequency. Tokens below the first cutoff are as in `TiedEmbedding`; cluster i has
    vectors dim / 4^i wide and a projection P_i [dim, dim / 4^i] to the model's width. Coming out, the head chooses
    among the first tokens and the clusters, and within cluster i: softmax(E_i P_i' h + b_i).
    """

    role = "embedding"

    def __init__(self, vocab_size: int, dim: int, cutoffs: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = math.sqrt(dim)
        self.cutoffs = cutoffs
        self.ends = [*cutoffs[1:], vocab_size]
        widths = [max(1, dim // DIVISOR**rank) for rank in range(1, len(cutoffs) + 1)]
        sizes = [end - start for start, end in zip(cutoffs, self.ends, strict=True)]
        self.weight = nn.Parameter(torch.empty(cutoffs[0], dim))
        self.bias = nn.Parameter(torch.zeros(cutoffs[0]))
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), dim))
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))
        self.tail_weights = nn.ParameterList(torch.empty(*shape) for shape in zip(sizes, widths, strict=True))
        self.tail_biases = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.projections = nn.ParameterList(torch.empty(dim, width) for width in widths)

    def _tails(self) -> list[tuple[int, int, Tensor, Tensor, Tensor]]:
        return list(
            zip(self.cutoffs, self.ends, self.tail_weights, self.tail_biases, self.projections, strict=True)
        )  # fmt: skip

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, dim]."""
        flat = tokens.reshape(-1)
        # tokens of the clusters take any row here; beyond all of them they keep a number that F.embedding refuses
        first = flat.where(flat >= self.ends[-1], flat.clamp_max(self.cutoffs[0] - 1))
        embedded = F.embedding(first, self.weight)
        for start, end, weight, _, projection in self._tails():
            place = ((flat >= start) & (flat < end)).nonzero()[:, 0]
            rows = F.linear(F.embedding(flat.index_select(0, place) - start, weight), projection)
            embedded = embedded.index_copy(0, place, rows.to(embedded.dtype))
        return embedded.view(*tokens.shape, -1) * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., V]: log-probabilities."""
        head = F.linear(hidden, *self._head()).log_softmax(-1)
        parts = [head[..., : self.cutoffs[0]]]
        for rank, (_, _, weight, bias, projection) in enumerate(self._tails()):
            within = F.linear(F.linear(hidden, projection.t()), weight, bias).log_softmax(-1)
            parts.append(within + head[..., self.cutoffs[0] + rank, None])
        return torch.cat(parts, -1)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Nats for each token: hidden [tokens, dim], targets [tokens] -> [tokens]."""
        first = targets.clone()
        members = []
        for rank, (start, end, *_) in enumerate(self._tails()):
            inside = (targets >= start) & (targets < end)
            first = first.masked_fill(inside, self.cutoffs[0] + rank)
            members.append(inside.nonzero()[:, 0])
        losses = linear_cross_entropy(hidden, *self._head(), first)
        for place, (start, _, weight, bias, projection) in zip(members, self._tails(), strict=True):
            if not len(place):
                continue
            rows = F.linear(hidden.index_select(0, place), projection.t())
            within = targets.index_select(0, place) - start
            losses = losses.index_add(0, place, linear_cross_entropy(rows, weight, bias, within))
        return losses

    def _head(self) -> tuple[Tensor, Tensor]:
        return torch.cat([self.weight, self.cluster_weight]), torch.cat([self.bias, self.cluster_bias])
