"""Mixers take memory linear in the number of tokens: the bytes of all tensors.

Not the resident memory of the process: oneDNN keeps a kernel for each shape that it meets, which is no tensor of ours.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pointsman import AttentionTrace, Routing, RoutingContext, build_router
from tools.bench.peak import peak_bytes


def mixed(mixer: str) -> Callable[[int], Tensor]:
    router = build_router("smoe" + mixer, dim=64, num_experts=8)

    def weights(tokens: int) -> Tensor:
        hidden, trace = torch.randn(1, tokens, 64, requires_grad=True), None
        if mixer == "+attention":
            query, key, value = torch.randn(3, 1, 4, tokens, 16)
            trace = AttentionTrace(query, key, value, torch.randn(4, 16, 64), torch.randn(1, tokens, 64), 0.25)
        chosen: Routing = router(hidden, RoutingContext(attention=trace))
        return chosen.weights

    return weights


def peak(forward: Callable[[int], Tensor], tokens: int) -> float:
    """KiB a token that one forward and backward hold at the most."""
    return peak_bytes(lambda: torch.autograd.backward(forward(tokens).square().sum())) / 1024 / tokens


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "most"), [(mixed("+similarity"), 3), (mixed("+attention"), 4)])
def test_memory_grows_linearly(forward: Callable[[int], Tensor], most: float) -> None:
    forward(300)  # kernels are chosen
    half, whole = peak(forward, 4096), peak(forward, 8192)
    assert whole < most
    assert whole < 1.1 * half
