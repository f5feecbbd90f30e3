"""Tokens inform each other: softmax(scores) values, in memory linear in the number of tokens, forward and backward.

    scores_ij = q_i . k_j + key_bias_j + p_i . r_(i - j),   s_i = softmax over the tokens j that inform i,
    out_i = sum_j s_ij v_j

Forward and backward work on one block of rows of a few sequences at a time. Backward computes the scores again.
No T x S tensor is stored.

Shapes: N sequences, T queries, S keys (the last T keys are the queries' own tokens, those before them the past), D
score width, E values' width.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pointsman.ops import relative
from pointsman.ops.kernels import exporting
from pointsman.ops.linear import refuse_second_derivatives, without_autocast
from pointsman.ops.relative import by_key
from pointsman.ops.visible import Prepared, Visible, Workspace, tiles

Bias = Callable[[int, int], Tensor]
"""(start, stop) of a block of rows -> what is added to its scores, [N, stop - start, S] or broadcastable to it."""


Prepare = Callable[..., Prepared]


def inform(
    prepare: Prepare, batched: tuple[Tensor, ...], shared: tuple[Tensor, ...], visible: Visible,
    normalization: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [N, T, E], and the log-sum-exp [N, T] of each row's scores if `normalization` is wanted (else [N, 0]).

    Without values, out is [N, T, 0]. Gradients flow from both.

    Args:
        prepare: a differentiable function of `batched`, for some of the sequences, and `shared`. Backward calls it
            again, so that nothing is kept but its arguments, which a model keeps anyway.
        batched: tensors [N, ...].
        shared: tensors that are the same for all sequences.
    """
    if exporting():  # all rows are one block, of plain operations
        out, lse = biased_block(prepare(*batched, *shared), None, visible, 0, visible.length)
        return out, lse if normalization else lse[:, :0]
    if torch.compiler.is_compiling():
        from pointsman.ops.tracing import untraced

        result: tuple[Tensor, Tensor] = untraced(inform, prepare, batched, shared, visible, normalization)
        return result
    options = _Options(prepare, visible, len(batched), normalization)
    out, lse = _Inform.apply(options, *batched, *shared)  # type: ignore[no-untyped-call]
    return out, lse


def inform_biased(prepared: Prepared, bias: Bias, visible: Visible) -> tuple[Tensor, Tensor]:
    """`inform` with any bias by blocks of rows. Gradients flow through whatever it is made of: backward calls it again,
    under a checkpoint for each block."""
    if exporting():
        return biased_block(prepared, bias, visible, 0, visible.length)
    if torch.compiler.is_compiling():
        from pointsman.ops.tracing import untraced

        result: tuple[Tensor, Tensor] = untraced(inform_biased, prepared, bias, visible)
        return result
    parts = []
    for start, stop in visible.blocks(prepared.query.device):
        if torch.is_grad_enabled():
            part = checkpoint(
                biased_block, prepared, bias, visible, start, stop, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = biased_block(prepared, bias, visible, start, stop)
        parts.append(part)
    return torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1)


def biased_block(
    prepared: Prepared, bias: Bias | None, visible: Visible, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """What `inform` returns, of the rows `start:stop`, in plain operations."""
    scores, value = block_scores(prepared, visible, start, stop, bias), prepared.value
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1) @ value[:, : scores.shape[-1]] if value is not None else lse[..., :0], lse


def block_scores(prepared: Prepared, visible: Visible, start: int, stop: int, bias: Bias | None = None) -> Tensor:
    """Scores of the rows `start:stop` and the keys that they see at most, -inf where a key does not inform a row."""
    scores = _scores(prepared, visible, start, stop)
    if bias is not None:
        scores = scores + bias(start, stop)[..., : scores.shape[-1]]
    return visible.hide_(scores, start)


def _products(query: Tensor, key: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """query [n, rows, D], key [1 or n, keys, D], bias [n, keys]: [n, rows, keys], in `out` if it is given."""
    turned = key.transpose(1, 2)
    product = query @ turned if out is None else torch.bmm(query, turned.expand(len(query), -1, -1), out=out)
    return product if bias is None else product.add_(bias[:, None])


def _add_inner(total: Tensor, rows: Tensor, weights: Tensor) -> None:
    """total [1 or n, D, keys] += the sum over rows of rows [n, rows, D] times weights [n, rows, keys]."""
    if len(total) == 1:
        rows, weights = rows.flatten(0, 1)[None], weights.flatten(0, 1)[None]
    for index in range(len(rows)):
        one = rows[index].t().contiguous()
        for part in tiles(weights.shape[-1]):
            total[index, :, part] += one @ weights[index, :, part]


def _workspace(prepared: Prepared, visible: Visible) -> Workspace:
    """Memory of blocks of scores [n, rows, keys]. Under causality each block is larger than the one before."""
    query, blocks = prepared.query, visible.blocks(prepared.query.device)
    rows = max((stop - start for start, stop in blocks), default=0)
    return Workspace(query, len(query) * rows * relative.distances(visible.keys, query.device))


def _scores(prepared: Prepared, visible: Visible, start: int, stop: int, work: Workspace | None = None) -> Tensor:
    """Scores of a block [n, rows, keys seen], nothing hidden yet; in the workspace if there is one."""
    seen = visible.seen(stop)
    bias = None if prepared.key_bias is None else prepared.key_bias[:, :seen]
    own = None if work is None else work("scores", len(prepared.query), stop - start, seen)
    scores = _products(prepared.query[:, start:stop], prepared.key[:, :seen], bias, own)
    if prepared.position_query is not None:
        rows = prepared.position_query[:, start:stop]
        assert prepared.positions is not None
        positions = prepared.positions[:, _distances(prepared.positions, seen)]
        other = None if work is None else work("positions", len(prepared.query), stop - start, positions.shape[1])
        scores += by_key(_products(rows, positions, out=other))[..., :seen]
    return scores


def _distances(positions: Tensor, seen: int) -> slice:
    """The places among `positions` of the distances from seen - 1 down to negative ones."""
    start = positions.shape[1] - relative.alignment(positions.device) - seen
    return slice(start, start + relative.distances(seen, positions.device))


def _sliced(inputs: tuple[Tensor, ...], count: int, group: slice) -> Iterator[Tensor]:
    return (tensor[group] if index < count else tensor for index, tensor in enumerate(inputs))


class _Options(NamedTuple):
    prepare: Prepare
    visible: Visible
    batched: int
    normalization: bool


class _Inform(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _Options, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        outs, sums = [], []
        for group in options.visible.groups(len(inputs[0]), inputs[0].device):
            visible = options.visible.of(group)
            prepared = options.prepare(*_sliced(inputs, options.batched, group))
            work = _workspace(prepared, visible)
            out, lse = [], []
            for start, stop in visible.blocks(prepared.query.device):
                scores = visible.hide_(_scores(prepared, visible, start, stop, work), start)
                largest = scores.amax(-1) if options.normalization else None
                weights = torch.softmax(scores, -1, out=scores)
                if largest is not None:
                    # the largest weight is 1 / the sum of exp(score - largest)
                    lse.append(largest - weights.amax(-1).log())
                if prepared.value is not None:
                    out.append(weights @ prepared.value[:, : scores.shape[-1]])
            del work
            sums.append(torch.cat(lse, 1) if lse else prepared.query.new_empty(len(prepared.query), 0))
            outs.append(torch.cat(out, 1) if out else prepared.query[:, :, :0])
        ctx.options = options
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return _together(outs), _together(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("a mixer", plain=False)
        options: _Options = ctx.options
        wanted = ctx.needs_input_grad[1:]
        inputs = ctx.saved_tensors  # once: activation checkpointing gives them away at the first look
        found: list[list[Tensor]] = [[] for _ in inputs]
        for group in options.visible.groups(len(inputs[0]), inputs[0].device):
            with torch.enable_grad(), without_autocast(inputs[0].device.type):
                sliced = zip(_sliced(inputs, options.batched, group), wanted, strict=True)
                parts = [tensor.detach().requires_grad_(want) for tensor, want in sliced]
                prepared = options.prepare(*parts)
            here = [None if gradient is None else gradient[group] for gradient in gradients]
            results = _backward(prepared.detach(), options.visible.of(group), *here)
            made = [(t, g) for t, g in zip(prepared, results, strict=True) if t is not None and t.requires_grad]
            leaves = [part for part in parts if part.requires_grad]
            grads = iter(torch.autograd.grad([t for t, _ in made], leaves, [g for _, g in made], allow_unused=True))
            for index, part in enumerate(parts):
                if part.requires_grad and (grad := next(grads)) is not None:
                    if index >= options.batched and found[index]:
                        found[index][0] += grad
                    else:
                        found[index].append(grad)
        return (
            None,
            *(
                None if not grads else _together(grads) if index < options.batched else grads[0]
                for index, grads in enumerate(found)
            ),
        )


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _backward(
    prepared: Prepared, visible: Visible, out_gradient: Tensor | None, lse_gradient: Tensor | None
) -> Prepared:
    """Gradients of what was prepared, by the same names."""
    query, key, value, key_bias, position_query, positions = prepared
    work = _workspace(prepared, visible)
    dquery = torch.empty_like(query)
    dposition_query = None if position_query is None else torch.empty_like(position_query)
    dkey, dvalue, dpositions = (_turned_zeros(tensor) for tensor in (key, value, positions))
    dkey_bias = None if key_bias is None else torch.zeros_like(key_bias)
    assert dkey is not None
    for start, stop in visible.blocks(query.device):
        seen, rows = visible.seen(stop), query[:, start:stop]
        scores = visible.hide_(_scores(prepared, visible, start, stop, work), start)
        weights = torch.softmax(scores, -1, out=scores)
        through: Tensor | None = None
        if value is not None and dvalue is not None and out_gradient is not None:
            upper = out_gradient[:, start:stop]
            through = _products(upper, value[:, :seen], out=work("through", len(query), stop - start, seen))
            torch.ops.aten._softmax_backward_data.out(through, weights, -1, weights.dtype, grad_input=through)
            _add_inner(dvalue[:, :, :seen], upper, weights)
        if lse_gradient is not None:
            direct = weights.mul_(lse_gradient[:, start:stop, None])
            through = direct if through is None else through.add_(direct)
        if through is None:
            through = weights.zero_()
        dquery[:, start:stop] = through @ key[:, :seen]
        _add_inner(dkey[:, :, :seen], rows, through)
        if dkey_bias is not None:
            dkey_bias[:, :seen] += through.sum(1)
        if position_query is not None and positions is not None:
            assert dposition_query is not None
            assert dpositions is not None
            places = _distances(positions, seen)
            by_distance = work("positions", len(query), stop - start, places.stop - places.start).zero_()
            by_key(by_distance)[..., :seen].copy_(through)
            dposition_query[:, start:stop] = by_distance @ positions[:, places]
            _add_inner(dpositions[:, :, places], position_query[:, start:stop], by_distance)
    return Prepared(dquery, dkey.mT, None if dvalue is None else dvalue.mT, dkey_bias, dposition_query,
                    None if dpositions is None else dpositions.mT)  # fmt: skip


def _turned_zeros(tensor: Tensor | None) -> Tensor | None:
    """Zeros [n, D, keys] for the gradient of a tensor [n, keys, D]: sums over rows add up fastest so."""
    return None if tensor is None else tensor.new_zeros(len(tensor), tensor.shape[2], tensor.shape[1])
