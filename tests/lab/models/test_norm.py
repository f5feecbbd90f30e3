"""RMSNorm against torch's, forward and backward, and where torch's is taken."""

import pytest
import torch
import torch.nn.functional as F

from pointsman_lab.models.norm import rms_norm


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 4, 6), (1, 1), (0, 4)])
def test_it_is_torchs_forward_and_backward(shape: tuple[int, ...]) -> None:
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    expected = F.rms_norm(hidden, weight.shape, weight, 1e-3)
    got = rms_norm(hidden, weight, 1e-3)
    torch.testing.assert_close(got, expected)
    seed = torch.randn(shape, dtype=torch.float64)
    for one, two in zip(torch.autograd.grad(got, (hidden, weight), seed),
                        torch.autograd.grad(expected, (hidden, weight), seed), strict=True):  # fmt: skip
        torch.testing.assert_close(one, two)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(hidden, weight, 1e-3), expected)


def test_transposed_input_other_dtypes_and_transforms() -> None:
    hidden, weight = torch.randn(3, 4, 5, requires_grad=True), torch.randn(5)
    swapped = hidden.transpose(0, 1)
    got = rms_norm(swapped, weight, 1e-5)
    got.sum().backward()
    torch.testing.assert_close(got, F.rms_norm(swapped, (5,), weight, 1e-5))
    half = hidden.detach().bfloat16()
    torch.testing.assert_close(rms_norm(half, weight.bfloat16(), 1e-5), F.rms_norm(half, (5,), weight.bfloat16(), 1e-5))
    jacobian = torch.func.jacrev(lambda one: rms_norm(one, weight, 1e-5))(hidden.detach())
    assert jacobian.shape == (3, 4, 5, 3, 4, 5)
