"""Relative attention against a float64 transcription of Transformer-XL's equations, position by position."""

import pytest
import torch
from torch import Tensor

from pointsman.ops.relative import RelativeBias
from pointsman_lab.models import attention_blocks as ops
from pointsman_lab.models.traced_attention import traced_attention
from tests.lab.models.relative import draw, padding, reference
from tools.bench.peak import peak_bytes


def relative_attention(query, key, value, *others, **settings):
    return traced_attention(query, torch.stack([key, value]), *others, **settings, trace=False)[0]


SHAPES = {
    "one block": {},
    "one sequence a block": {"SINGLE": 1},
    "rows of a few sequences": {"ROWS": 3, "CPU_ELEMENTS": 60},
    "odd rows": {"ROWS": 5},
    "a row at a time": {"ROWS": 1, "CPU_ELEMENTS": 1},
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def blocks(request, monkeypatch):
    for name, value in request.param.items():
        monkeypatch.setattr(ops, name, value)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(("length", "memory"), [(7, 4), (1, 9), (19, 0), (1, 0), (17, 8)])
def test_forward_and_gradients_equal_the_equations(length, memory, side):
    inputs = draw(length=length, memory=memory)
    mask = None if side == "none" or length + memory < 6 else padding(2, length + memory, side)
    expected = reference(*inputs, 0.37, mask)
    upper = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected_gradients = torch.autograd.grad(expected, inputs, upper)
    got = relative_attention(*inputs, scale=0.37, key_mask=mask)
    gradients = torch.autograd.grad(got, inputs, upper)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, exact in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("with_output", [True, False])
def test_gradients_through_single_heads_are_those_through_the_whole(with_output):
    inputs = draw(length=6, memory=3)
    query, key, value, *others = inputs
    output, each = traced_attention(query, torch.stack([key, value]), *others, scale=0.37)
    expected = reference(*inputs, 0.37)
    weights = torch.randn(3, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours = sum((each[i][head].sin() * weights[i, -each[i][head].shape[1] :]).sum() for i, head in enumerate((2, 0, 2)))
    theirs = sum(
        (part[head].sin() * weights[i, -part.shape[2] :]).sum()
        for i, (part, head) in enumerate(zip(inputs, (2, 0, 2), strict=False))
    )
    if with_output:
        ours, theirs = ours + output.square().sum(), theirs + expected.square().sum()
    for part, whole in zip(each, (query, key, value), strict=True):
        assert torch.equal(torch.stack(part), whole)
        assert part[1].untyped_storage().data_ptr() == part[0].untyped_storage().data_ptr()  # nothing is copied
    got, exact = (torch.autograd.grad(side, inputs, materialize_grads=True) for side in (ours, theirs))
    for mine, reference_gradient in zip(got, exact, strict=True):
        torch.testing.assert_close(mine, reference_gradient, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_gradcheck(monkeypatch):
    monkeypatch.setattr(ops, "ROWS", 2)
    inputs = draw(heads=2, batch=2, length=9, memory=2, width=3)
    mask = padding(2, 11, "right")
    assert torch.autograd.gradcheck(lambda *args: relative_attention(*args, scale=0.5, key_mask=mask), inputs)


def test_inputs_of_any_strides():
    plain = draw(length=20, memory=3)
    strided = [tensor.detach().transpose(0, -2).contiguous().transpose(0, -2).requires_grad_() for tensor in plain]
    expected = relative_attention(*plain, scale=0.5)
    upper = torch.randn(20, 2, 3, 5, dtype=torch.float64).permute(2, 1, 0, 3)
    torch.testing.assert_close(relative_attention(*strided, scale=0.5), expected)
    got = torch.autograd.grad(relative_attention(*strided, scale=0.5), strided, upper)
    for mine, exact in zip(got, torch.autograd.grad(expected, plain, upper), strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.slow
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_lower_precision(dtype, tolerance):
    inputs = draw(length=70, memory=30, width=16, dtype=dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = reference(*exact, 0.25)
    got = relative_attention(*inputs, scale=0.25)
    assert got.dtype == dtype
    upper = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(got, inputs, upper.to(dtype))
    for mine, true in zip([got, *gradients], [expected, *torch.autograd.grad(expected, exact, upper)], strict=True):
        assert (mine.double() - true).norm() <= tolerance * true.norm()


def test_a_query_without_real_keys_is_finite():
    inputs = draw(length=6, memory=0)
    mask = padding(2, 6, "left")
    output = relative_attention(*inputs, scale=1.0, key_mask=mask)
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(tensor.grad).all() for tensor in inputs)


def test_dropout_keeps_the_mean_and_repeats_in_backward(monkeypatch):
    monkeypatch.setattr(ops, "ROWS", 8)
    inputs = draw(length=9, memory=3)
    torch.manual_seed(3)

    def run(*args):
        torch.manual_seed(3)
        return relative_attention(*args, scale=0.5, dropout=0.4)

    assert torch.autograd.gradcheck(run, inputs)
    torch.manual_seed(0)
    mean = sum(relative_attention(*inputs, scale=0.5, dropout=0.4).detach() for _ in range(1500)) / 1500
    plain = relative_attention(*inputs, scale=0.5)
    assert not torch.equal(relative_attention(*inputs, scale=0.5, dropout=0.4), plain)
    torch.testing.assert_close(mean, plain.detach(), rtol=0, atol=0.2)


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (2, 5), (6, 7)])
def test_relative_bias_is_what_is_added_to_the_products_of_queries_and_keys(start, stop):
    query, key, _, positions, content_bias, position_bias = draw()
    bias = RelativeBias(query.transpose(0, 1), key.transpose(0, 1), positions, content_bias, position_bias, 0.3)
    got = bias(start, stop).transpose(0, 1)
    distance = torch.arange(7)[:, None] + 4 - torch.arange(11)[None]
    table = positions.flip(1)[:, distance.clamp_min(0)]
    expected = torch.einsum("hbtd,htsd->hbts", query + position_bias[:, None, None], table)
    expected = 0.3 * (expected + torch.einsum("hd,hbsd->hbs", content_bias, key)[:, :, None])
    before = (distance >= 0)[start:stop]
    torch.testing.assert_close(got[:, :, before], expected[:, :, start:stop][:, :, before])
    got[:, :, before].sum().backward()
    assert positions.grad is not None


def test_nothing_is_kept_but_the_inputs_and_no_score_matrix_is_made(monkeypatch):
    monkeypatch.setattr(ops, "CPU_ELEMENTS", 2**12)
    monkeypatch.setattr(ops, "ROWS", 32)
    length, memory, width = 96, 96, 4
    inputs = draw(heads=2, batch=2, length=length, memory=memory, width=width, dtype=torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        output = relative_attention(*inputs, scale=0.5)
    assert max(kept) == 2 * 2 * 2 * (length + memory) * width

    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Largest():
        relative_attention(*inputs, scale=0.5).sum().backward()
    assert largest < length * (length + memory)
    assert output.shape == (2, 2, length, width)


def own_attention(tokens):
    query = torch.randn(4, 1, tokens, 16, requires_grad=True)
    key_value, positions = torch.randn(2, 4, 1, tokens, 16), torch.randn(4, tokens, 16)
    return traced_attention(query, key_value, positions, *torch.randn(2, 4, 16), scale=0.25)[0]


@pytest.mark.slow
def test_memory_grows_linearly():
    """KiB a token that one forward and backward hold at the most."""
    own_attention(300).square().sum().backward()  # kernels are chosen
    half, whole = (
        peak_bytes(lambda tokens=tokens: own_attention(tokens).square().sum().backward()) / 1024 / tokens
        for tokens in (4096, 8192)
    )
    assert whole < 8
    assert whole < 1.1 * half
