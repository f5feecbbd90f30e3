"""Which attended token explains a token's attention output, head by head (Mutual-Inform, Lemma 1).

    A'_h[i, j] ~ A_h[i, j] N(u_i | W_h v_j, sigma^2 I),   H'[i, h] ~ sum_j A_h[i, j] N(u_i | W_h v_j, sigma^2 I)

with W_h = c times the head's block of the output projection (the paper: c = H). In logarithms, without what is the same
for all j:

    a_ij + (W_h' u_i) . v_j / sigma^2 - v_j' (W_h' W_h) v_j / (2 sigma^2)

with a_ij the attention's own scores. This is again a softmax of inner products, with queries
[q_i | W_h' u_i / sigma^2], keys [k_j | v_j], and a bias for each key from a D x D Gram matrix.

Shapes: B sequences, H heads, T tokens, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops.linear import linear
from pointsman.ops.relative import RelativeBias, alignment
from pointsman.ops.visible import Prepared, Visible
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.mutual.streaming import Bias, Prepare, block_scores, inform, inform_biased
from pointsman.routing import AttentionTrace

SAMPLED_SEQUENCES = SAMPLED_BLOCKS = SAMPLED_ROWS = 4  # of longer sequences, for their heads' entropies
LEAST_LOG = -1e4  # of a probability: finite, and its exponential is 0
CELLS = 2**22  # attention scores of all heads in memory at once


@dataclass(frozen=True)
class _Prepare:
    """Makes one head's `Prepared` of tensors, in the order of `Posterior._tensors`."""

    scale: float
    relative: bool
    past: bool

    def __call__(self, *tensors: Tensor) -> Prepared:
        query, key, value, explained, probs, *rest = tensors
        dtype = probs.dtype
        if self.past:
            before, *rest = rest
            probs = torch.cat([before.to(dtype), probs], 1)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        gram, *relative = (tensor.to(dtype) for tensor in rest)
        relative_bias = _relative(query, key, self.scale, *relative) if self.relative else (None, None, None)
        lengths = ((value @ gram) * value).sum(-1)
        bias = lengths if relative_bias[0] is None else lengths + relative_bias[0]
        return Prepared(
            torch.cat([query * self.scale, explained], -1), torch.cat([key, value], -1), probs, bias, *relative_bias[1:]
        )


@dataclass(frozen=True)
class _PreparePrior:
    """The same without the Gaussians and without values: only the normalisation is wanted."""

    scale: float
    relative: bool

    def __call__(self, *tensors: Tensor) -> Prepared:
        query, key, *relative = (tensor.to(tensors[0].dtype) for tensor in tensors)
        relative_bias = _relative(query, key, self.scale, *relative) if self.relative else (None, None, None)
        return Prepared(query * self.scale, key, None, *relative_bias)


def _relative(
    query: Tensor, key: Tensor, scale: float, positions: Tensor, content_bias: Tensor, position_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A bias for each key, queries for positions, and the positions."""
    content = (key @ content_bias[:, :, None]).squeeze(-1) * scale
    return content, (query + position_bias[:, None]) * scale, F.pad(positions, (0, 0, 0, alignment(positions.device)))


SHAPES = {"query": "BHTD", "key": "BHSD", "value": "BHSV", "out_weight": "HVW", "output": "BTW"}


def check_trace(trace: AttentionTrace, probs: Tensor) -> None:
    """ValueError unless the tensors of a trace fit one another and the scores [B, T, E]; V and W: any widths."""
    sizes: dict[str, int] = dict(zip("BT", probs.shape, strict=False))
    for name, letters in SHAPES.items():
        shape, wanted = list(getattr(trace, name).shape), [sizes.get(letter, letter) for letter in letters]
        sizes = dict(zip(letters, shape, strict=False)) | sizes
        if shape != [sizes.get(letter) for letter in letters] or sizes.get("S", sizes["T"]) < sizes["T"]:
            least = f" with S from {sizes['T']}" if "S" in wanted else ""
            raise ValueError(f"AttentionTrace.{name} must be [{', '.join(map(str, wanted))}]{least}, got {shape}")


class Posterior:
    """The posteriors of one forward.

    Args:
        trace: the attention. Of its S keys, the last `visible.keys` have expert scores; the others are left out.
        probs: [B, T, E], the expert scores of the queries' own tokens.
        past: [B, S - T, E] of the tokens before them, or None.
        sigma: standard deviation of the Gaussians, 0-dim.
        factor: c; None: H.
    """

    def __init__(
        self, trace: AttentionTrace, probs: Tensor, past: Tensor | None, sigma: Tensor, visible: Visible,
        factor: float | None = None,
    ) -> None:  # fmt: skip
        check_trace(trace, probs)
        self.factor = trace.query.shape[1] if factor is None else factor
        self.trace, self.probs, self.past, self.sigma, self.visible = trace, probs, past, sigma, visible
        relative = isinstance(trace.bias, RelativeBias) and visible.causal
        self.opaque = trace.bias is not None and not relative

    def inform(self, head: Tensor, normalization: bool = False, prior: bool = False) -> tuple[Tensor, Tensor]:
        """sum_j A'_h[i, j] e_j [B, T, E], and the log of the normalisation [B, T] if wanted.

        Args:
            head: [1], or [B]: one for each sequence.
            prior: take A_h instead; only the normalisation is returned.
        """
        prepare, batched, shared = self._tensors(head, prior)
        if self.opaque:
            return inform_biased(prepare(*batched, *shared), self._bias(head), self.visible)
        return inform(prepare, batched, shared, self.visible, normalization)

    def all_heads(self) -> Tensor:
        """sum_h H'[i, h] sum_j A'_h[i, j] e_j: Lemma 1."""
        outs, evidence = [], []
        for head in self._each_head():
            out, joint = self.inform(head, normalization=True)
            outs.append(out)
            evidence.append(joint - self.inform(head, normalization=True, prior=True)[1])
        return (torch.softmax(torch.stack(evidence), 0)[..., None] * torch.stack(outs)).sum(0)

    def weights(self, head: Tensor | None) -> Iterator[tuple[slice, int, int, Tensor]]:
        """(sequences, start, stop, A' [n, stop - start, keys seen]) by blocks, without gradients; None = all heads."""
        count, device = len(self.probs), self.probs.device
        heads = self._each_head() if head is None else [head]
        for group in [slice(0, count)] if self.opaque else self.visible.groups(count, device):
            for start, stop in self.visible.blocks(device):
                with torch.no_grad():
                    scores = torch.stack([self._block(one, group, start, stop, False) for one in heads])
                    total = torch.softmax(scores, -1)
                    if head is None:
                        prior = torch.stack([self._block(one, group, start, stop, True) for one in heads])
                        evidence = torch.logsumexp(scores, -1) - torch.logsumexp(prior, -1)
                        total = total * torch.softmax(evidence, 0)[..., None]
                yield group, start, stop, total.sum(0)

    def _block(self, head: Tensor, group: slice, start: int, stop: int, prior: bool) -> Tensor:
        prepare, batched, shared = self._tensors(head, prior)
        prepared = prepare(*(tensor[group] for tensor in batched), *shared)
        bias = self._bias(head) if self.opaque else None
        return block_scores(prepared, self.visible.of(group), start, stop, bias)

    def _each_head(self) -> list[Tensor]:
        return list(torch.arange(self.trace.query.shape[1], device=self.probs.device)[:, None].unbind(0))

    def _tensors(self, head: Tensor, prior: bool) -> tuple[Prepare, tuple[Tensor, ...], tuple[Tensor, ...]]:
        trace, keys = self.trace, self.visible.keys
        if trace.each_head is not None and len(head) == 1 and _nothing_to_wait_for(head):
            query, key, value = (part[int(head)] for part in trace.each_head)
        else:
            query, key, value = (_pick(part, head) for part in (trace.query, trace.key, trace.value))
        key, value = key[:, -keys:], value[:, -keys:]
        relative: list[Tensor] = []
        prepare: Prepare
        if isinstance(trace.bias, RelativeBias) and not self.opaque:
            bias = trace.bias
            relative = [
                part.index_select(0, head)
                for part in (bias.positions[:, -keys:], bias.content_bias, bias.position_bias)
            ]
        if prior:
            query, key = query.to(self.probs.dtype), key.to(self.probs.dtype)
            batched, rest, prepare = [query, key], relative, _PreparePrior(trace.scale, bool(relative))
        else:
            weight = trace.out_weight.to(self.probs.dtype)
            own = weight.index_select(0, head) * self.factor  # W_h', [1 or B, D, dim]
            precision = self.sigma.to(self.probs.dtype).square().reciprocal()
            output, explain = trace.output, own
            if trace.side_by_side is not None:  # through the heads' outputs, so that u itself is not stored
                output, explain = trace.side_by_side, own @ weight.flatten(0, 1).t()
            output, explain = output.to(self.probs.dtype), explain * precision
            if len(head) == 1:
                explained = linear(output, explain[0])
            else:
                explained = output @ explain.transpose(1, 2)
            batched = [query, key, value, explained, self.probs, *(() if self.past is None else (self.past,))]
            rest = [own @ own.transpose(1, 2) * (-0.5 * precision), *relative]
            prepare = _Prepare(trace.scale, bool(relative), self.past is not None)
        if len(head) > 1:  # each sequence has its own
            return prepare, (*batched, *rest), ()
        return prepare, tuple(batched), tuple(rest)

    def _bias(self, head: Tensor) -> Bias:
        """The trace's bias for one head of each sequence: [B, rows, keys]."""
        bias = self.trace.bias
        assert bias is not None
        batch, heads = self.trace.query.shape[:2]

        def rows(start: int, stop: int) -> Tensor:
            block = bias(start, stop).expand(batch, heads, stop - start, self.trace.key.shape[2])
            return _pick(block[..., -self.visible.keys :], head).to(self.probs.dtype)

        return rows


def _nothing_to_wait_for(number: Tensor) -> bool:
    """Whether Python can read a number without waiting for a device, and torch.compile is not tracing."""
    return number.device.type == "cpu" and not torch.compiler.is_compiling()


def _pick(tensor: Tensor, head: Tensor) -> Tensor:
    """tensor [B, H, ...], head [1] or [B] -> [B, ...]."""
    if len(head) == 1:
        if _nothing_to_wait_for(head):
            return tensor[:, int(head)]  # a view: no copy
        return tensor.index_select(1, head).squeeze(1)
    index = head.view(-1, *(1,) * (tensor.dim() - 1)).expand(-1, 1, *tensor.shape[2:])
    return tensor.gather(1, index).squeeze(1)


def _one(trace: AttentionTrace, index: int) -> AttentionTrace:
    """The trace of one sequence."""
    few = slice(index, index + 1)
    query, key, bias = trace.query[few], trace.key[few], trace.bias
    if isinstance(bias, RelativeBias):
        bias = replace(bias, query=bias.query[few], key=bias.key[few])
    elif bias is not None:
        whole = bias

        def bias(start: int, stop: int) -> Tensor:
            block = whole(start, stop)
            return block[few] if block.dim() == 4 and len(block) > 1 else block

    return replace(trace, query=query, key=key, bias=bias)


def head_entropies(
    trace: AttentionTrace, visible: Visible, sample: bool, ranks: Ranks = ALONE
) -> tuple[Tensor, Tensor]:
    """Entropy of each head's attention in nats, summed over real tokens, [B, H], and their number, [B].

    Without gradients, by blocks of rows. Of `visible` all but the entropies counts: these are the attention's own.

    Args:
        sample: of more than 16 tokens a sequence take four blocks of four, evenly spread; of many sequences about four.
        ranks: who shares the batch: the sample is one of all its sequences.
    """
    visible = visible._replace(entropy=None)
    batch, heads, length, _ = trace.query.shape
    exact = torch.float64 if trace.query.dtype == torch.float64 else torch.float32
    if sample and (step := batch * ranks.count // SAMPLED_SEQUENCES) > 1:
        found = [
            head_entropies(_one(trace, index), visible.of(slice(index, index + 1)), sample)
            for index in range(-ranks.rank * batch % step, batch, step)
        ]
        if not found:  # all of the sample are other ranks' sequences
            return trace.query.new_zeros(0, heads, dtype=exact), trace.query.new_zeros(0, dtype=exact)
        return torch.cat([entropies for entropies, _ in found]), torch.cat([tokens for _, tokens in found])
    if sample and length > SAMPLED_BLOCKS * SAMPLED_ROWS:
        ends = [length * (block + 1) // SAMPLED_BLOCKS for block in range(SAMPLED_BLOCKS)]
        blocks = [(end - SAMPLED_ROWS, end) for end in ends]
    else:
        rows = max(1, min(length, CELLS // max(1, batch * heads * visible.keys)))
        blocks = [(start, min(start + rows, length)) for start in range(0, length, rows)]
    sums = torch.zeros(batch, heads, dtype=exact, device=trace.query.device)
    counts = torch.zeros(batch, dtype=exact, device=trace.query.device)
    first = trace.key.shape[2] - visible.keys
    bias, content = trace.bias, trace.query.new_zeros(())
    with torch.no_grad():
        if isinstance(bias, RelativeBias) and visible.causal:
            content, bias = bias.content_bias[:, None], bias.position
        for start, stop in blocks:
            seen = visible.seen(stop)
            key = trace.key[:, :, first : first + seen].to(exact)
            scores = ((trace.query[:, :, start:stop] + content).to(exact) * trace.scale) @ key.transpose(2, 3)
            if bias is not None:
                scores = scores + bias(start, stop)[..., first : first + seen].to(exact)
            logs = torch.log_softmax(visible.hide_(scores, start), -1).clamp_min_(LEAST_LOG)
            entropies = -(logs.exp() * logs).sum(-1)
            if visible.real is not None:
                real = visible.real[:, visible.past + start : visible.past + stop]
                entropies = entropies * real[:, None]
                counts += real.sum(1)
            else:
                counts += stop - start
            sums += entropies.sum(-1)
    return sums, counts
