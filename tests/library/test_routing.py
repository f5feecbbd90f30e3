"""Routing: one decision, used more than once."""

import pytest
import torch
from torch import Tensor

from pointsman.experts.modules import BaseExperts, Experts
from pointsman.ops.kernels import PLAIN, using
from pointsman.routing import Routing


def routing(weights: Tensor) -> Routing:
    probs = torch.rand(6, 4)
    return Routing(torch.tensor([[0, 1], [2, 0], [3, -1], [1, 2], [0, 3], [-1, -1]]), weights, probs, probs)


@pytest.mark.parametrize("kind", [Experts, BaseExperts])
def test_each_use_has_a_backward_of_its_own(kind: type[Experts] | type[BaseExperts]) -> None:
    torch.manual_seed(0)
    experts = kind(8, 12, 4)
    for module in experts.modules():
        if isinstance(module, Experts):
            torch.nn.init.normal_(module.w_out)
    weights = torch.rand(6, 2, requires_grad=True)
    one = routing(weights)
    hidden = torch.randn(6, 8)
    with torch.no_grad():
        assert not one.pairs.weight.requires_grad  # looked at first without gradients
    gradients = []
    with using(PLAIN):
        for _ in range(2):
            (gradient,) = torch.autograd.grad(experts(hidden, one).square().sum(), weights)
            gradients.append(gradient)
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)


def test_pairs_are_sorted_once() -> None:
    one = routing(torch.rand(6, 2))
    first, second = one.pairs, one.pairs
    assert first.expert is second.expert
    assert first.offsets.tolist() == [0, 3, 5, 7, 9]
    assert first.token.tolist() == [0, 1, 4, 0, 3, 1, 3, 2, 4]
    torch.testing.assert_close(first.weight, one.weights.reshape(-1)[[0, 3, 8, 1, 6, 2, 7, 4, 9]])
