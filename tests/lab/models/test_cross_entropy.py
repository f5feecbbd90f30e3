"""Cross entropy of a linear layer in parts of the tokens, against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from pointsman_lab.models import embedding as ops
from pointsman_lab.models.embedding import linear_cross_entropy


def draw(dtype=torch.float64, tokens=11, vocabulary=190, dim=6):
    hidden = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, dim, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(vocabulary, (tokens,))


@pytest.mark.parametrize("elements", [2**22, 4 * 190, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_torch(monkeypatch, elements, dtype, tolerance):
    monkeypatch.setattr(ops, "FEW_LOGITS", elements)
    hidden, weight, bias, targets = draw(dtype)
    inputs = (hidden, weight, bias)
    expected = F.cross_entropy(F.linear(*inputs), targets, reduction="none")
    upper = torch.randn_like(expected)
    got = linear_cross_entropy(*inputs, targets)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for mine, exact in zip(
        torch.autograd.grad(got, inputs, upper), torch.autograd.grad(expected, inputs, upper), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=tolerance, atol=tolerance)


def test_autocast_computes_in_bfloat16_and_sums_in_float32():
    hidden, weight, bias, targets = draw(torch.float32, dim=32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, bias, targets)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert weight.grad.dtype == torch.float32
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")
    assert 0 < (losses - expected).norm() < 0.02 * expected.norm()


def test_a_large_vocabulary_keeps_no_logits(monkeypatch):
    monkeypatch.setattr(ops, "FEW_LOGITS", 2**13)
    hidden, weight, bias, targets = draw(torch.float32, tokens=64, vocabulary=2000, dim=4)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Largest():
        linear_cross_entropy(hidden, weight, bias, targets).sum().backward()
    assert largest <= 2**13  # weight and its gradient are 8,000
