"""Causal attention with relative positions (Transformer-XL, Dai et al. 2019), in blocks of query rows.

    a_ij = scale * ((q_i + u) . k_j + (q_i + w) . r_(i + M - j)),   j <= i + M,   o_i = sum_j softmax_j(a_ij) v_j

with M memory positions before the T queries, and S = M + T keys. No [T, S] tensor is stored: forward and backward work
on one block of query rows at a time and skip later keys. Backward computes the probabilities again.

Shapes: H heads, B sequences, D head width. Heads come first, because r is the same for every sequence: its products
are then one matrix product a head, over the rows of all sequences of a block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops import relative
from pointsman.ops.linear import without_autocast
from pointsman.ops.relative import by_key
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.models.attention_blocks import Inputs, Products, Settings, blocks, part_of

Heads = tuple[Tensor, ...]
"""One tensor for each head."""


def traced_attention(
    query: Tensor,
    key_value: Tensor,
    positions: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    trace: bool = True,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, tuple[Heads, Heads, Heads] | None]:
    """Causal attention with relative positions, and its queries, keys and values head by head.

    Args:
        query: [H, B, T, D], in any strides.
        key_value: [2, H, B, S, D], keys and values, S >= T: the last T are the queries' own positions.
        positions: r, [H, S, D], by falling distance: row c belongs to the distance S - 1 - c.
        content_bias, position_bias: u and w, [H, D].
        scale: factor of the scores.
        key_mask: [B, S] bool, True for a real token; None where all are real. A query without any real key gets the
            mean of the values before it.
        dropout: probability with which attention probabilities are dropped.
        trace: whether queries, keys and values are wanted.
        ranks: who shares the batch: each drops of its rows what one process drops.

    Returns:
        [H, B, T, D] in the dtype of `query`, with the strides of a contiguous [B, T, H, D]; and, if wanted, queries,
        keys and values as H tensors [B, T or S, D] each. A gradient that flows back through one of these costs that
        head's share; through `query` it would cost a tensor of all heads.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else 0
    others = (tensor.to(query.dtype) for tensor in (key_value, positions, content_bias, position_bias))
    rank, count = (ranks.rank, ranks.count) if dropout else (0, 1)
    settings = Settings(scale, dropout, seed, trace, rank, count)
    output, *each = _RelativeAttention.apply(settings, key_mask, query, *others)  # type: ignore[no-untyped-call]
    heads = len(query)
    return output, (tuple(each[:heads]), tuple(each[heads : 2 * heads]), tuple(each[2 * heads :])) if trace else None


def _add(total: Tensor, part: Tensor, first: bool) -> None:
    """Adds to what blocks before this one have written; the first writes."""
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def _multiply(left: Tensor, right: Tensor | float, out: Tensor) -> None:
    """out = left * right, whatever its strides."""
    if torch.compiler.is_compiling():
        out.copy_(left * right)  # the compiler takes no such `out=`
    else:
        torch.mul(left, right, out=out)


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, key_mask: Tensor | None, query: Tensor, *others: Tensor) -> Heads:
        key_value, *rest = others
        inputs = Inputs(query, key_value.contiguous(), *rest)
        with without_autocast(query.device.type):
            output = _forward(inputs, settings, key_mask)
        ctx.save_for_backward(*inputs, key_mask, output)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        traced = (query, *inputs.key_value.unbind(0)) if settings.trace else ()
        return (output, *(part.detach()[head] for part in traced for head in range(len(query))))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *each: Tensor | None) -> tuple[Tensor | None, ...]:
        # once: activation checkpointing gives them away at the first look
        *given, key_mask, output = ctx.saved_tensors
        inputs, settings = Inputs(*given), ctx.settings
        gradient = torch.zeros_like(output) if gradient is None else gradient
        with without_autocast(output.device.type):
            found = _backward(gradient, output, inputs, settings, key_mask)
        for index, own in enumerate(each):
            if own is not None:
                part, head = divmod(index, len(output))
                (found.query, *found.key_value.unbind(0))[part][head] += own
        return None, None, *(one.to(output.dtype) for one in found)


def _forward(inputs: Inputs, settings: Settings, key_mask: Tensor | None) -> Tensor:
    query, key_value, positions, content_bias, position_bias = inputs
    heads, batch, length, width = query.shape
    key, value = key_value.unbind(0)
    output = query.new_empty(batch, length, heads, width).permute(2, 0, 1, 3)
    shared = Products(query, positions, settings, key_mask)
    for block in blocks(query, key.shape[2], settings.rank, settings.ranks):
        content, position = shared.queries(block, content_bias), shared.queries(block, position_bias)
        probabilities = shared.probabilities(block, content, position, part_of(block, key))
        kept = shared.kept(block, probabilities)
        if kept is not None:
            probabilities = probabilities.mul_(kept)
        rows = torch.bmm(probabilities, part_of(block, value))
        output[block.heads, block.batch, block.start : block.stop] = rows.view(content.shape)
    return output


def _backward(gradient: Tensor, output: Tensor, inputs: Inputs, settings: Settings, key_mask: Tensor | None) -> Inputs:
    query, key_value, positions, content_bias, position_bias = inputs
    key, value = key_value.unbind(0)
    all_heads, all_batch, length, width = query.shape
    keys = key.shape[2]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32  # sums over blocks: at least float32
    d_query = query.new_empty(all_batch, length, all_heads, width).permute(2, 0, 1, 3)
    d_key_value = query.new_empty(all_batch, keys, 2, all_heads, width, dtype=exact).permute(2, 3, 0, 1, 4)
    more = relative.alignment(query.device)
    aligned = more > 1
    d_positions = torch.zeros(all_heads, keys + more, width, dtype=exact, device=query.device)
    d_content, d_position = torch.zeros(2, all_heads, width, dtype=exact, device=query.device).unbind(0)
    # softmax's backward is p * (dp - delta), delta = sum_j p_j dp_j = o . do
    delta = None if aligned else torch.einsum("hbtd,hbtd->hbt", gradient, output).neg_()
    shared = Products(query, positions, settings, key_mask)
    for block in blocks(query, keys, settings.rank, settings.ranks):
        last = block.stop == length
        content, position = shared.queries(block, content_bias), shared.queries(block, position_bias)
        heads, batch, rows, _ = content.shape
        count = heads * batch
        block_keys, block_values = part_of(block, key), part_of(block, value)
        probabilities = shared.probabilities(block, content, position, block_keys)
        region = (block.heads, block.batch, slice(block.start, block.stop))
        upper = gradient[region].reshape(count, rows, width)
        d_probabilities = shared.by_transpose(upper, block_values, "through")
        kept = shared.kept(block, probabilities)
        if kept is not None:
            d_probabilities = d_probabilities.mul_(kept)
        # two views of the same memory: by key for the content term, by distance for the position term
        by_distance = shared.memory("products", count, rows, relative.distances(block.seen, query.device))
        by_distance.view(count, -1)[:, : rows - 1].zero_()
        by_distance[:, -1, -1].zero_()
        d_scores = by_key(by_distance)[..., : block.seen]
        if delta is not None:
            _multiply(d_probabilities.add_(delta[region].reshape(count, rows, 1)), probabilities, d_scores)
            shared.mask_padding(block, d_scores, 0)
        else:  # by key in memory of its own: rows of the view are not aligned
            turned = d_scores
            d_scores = torch._softmax_backward_data(d_probabilities, probabilities, -1, query.dtype)
            shared.mask_padding(block, d_scores, 0)
            turned.copy_(d_scores)
            by_key(by_distance)[..., block.seen :].zero_()
        if kept is not None:
            probabilities = probabilities.mul_(kept)
        of_keys, of_values = (part[block.heads, block.batch, : block.seen] for part in d_key_value.unbind(0))
        _add(of_values, torch.bmm(probabilities.mT, upper).view(of_values.shape), last)
        flat = content.view(count, rows, width)
        _add(of_keys, torch.bmm(d_scores.mT, flat).view(of_keys.shape), last)
        by_head = by_distance.view(heads, batch * rows, -1)
        of_positions = d_positions[block.heads, shared.distances(block)]
        of_positions.add_(torch.bmm(by_head.mT, position.view(heads, batch * rows, width)))
        from_content = torch.bmm(d_scores, block_keys).view(content.shape)
        from_position = torch.bmm(by_head, shared.block_positions(block)).view(content.shape)
        d_content[block.heads] += from_content.sum((1, 2), dtype=exact)
        d_position[block.heads] += from_position.sum((1, 2), dtype=exact)
        _multiply(from_content.add_(from_position), settings.scale, d_query[region])
    of_positions = d_positions[:, :keys]
    return Inputs(d_query, d_key_value, of_positions, d_content * settings.scale, d_position * settings.scale)
