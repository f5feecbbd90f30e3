"""Flash kernels in which tokens inform each other against explicit matrices in float64: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pointsman.ops.visible import Prepared
from pointsman.routers.mutual import streaming
from pointsman.routers.mutual.streaming import inform
from tests.library.routers.mutual.test_streaming import explicit, tensors, visibilities


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "with_triton", lambda tensor: tensor.dtype == torch.float32)


@pytest.mark.parametrize("kind", visibilities(1, 2, 3))
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("length", [19, 5])
def test_against_float64(kind: str, positions: bool, length: int) -> None:
    count, keys = 2, length + 4
    visible = visibilities(count, length, keys)[kind]
    if positions and not visible.causal:
        pytest.skip("positions are of causal attention")
    inputs = tensors(count, length, visible.keys, torch.float32)
    inputs = inputs if positions else inputs[:4]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, lse = inform(Prepared, tuple(inputs[:5]), tuple(inputs[5:]), visible, normalization=True)
    right = explicit(Prepared(*exact), visible)
    upper = [torch.randn_like(tensor) for tensor in right]
    for which in ((0, 1), (0,), (1,)):
        totals = [sum((pair[one] * upper[one]).sum() for one in which) for pair in ((out, lse), right)]
        found = [
            torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
            for total, leaves in zip(totals, (inputs, exact), strict=True)
        ]
        for mine, theirs in zip(*found, strict=True):
            close(mine, theirs)
    close(out, right[0])
    close(lse, right[1])


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_without_values() -> None:
    visible = visibilities(2, 7, 11)["padded"]
    query, key, _, bias, *_ = tensors(2, 7, visible.keys, torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, bias)]
    out, lse = inform(lambda q, k, b: Prepared(q, k, None, b), (query, key, bias), (), visible, normalization=True)
    assert out.shape == (2, 7, 0)
    ones = torch.ones(2, visible.keys, 1, dtype=torch.float64)
    right = explicit(Prepared(exact[0], exact[1], ones, exact[2]), visible)[1]
    close(lse, right)
    found = torch.autograd.grad(lse.sin().sum(), (query, key, bias))
    for mine, theirs in zip(found, torch.autograd.grad(right.sin().sum(), exact), strict=True):
        close(mine, theirs)


def test_the_same_twice_and_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = visibilities(3, 9, 12)["causal"]
    inputs = tensors(3, 9, visible.keys, torch.float32)
    results = []
    for groups in (1, 1, 2):
        split = [slice(0, 3)] if groups == 1 else [slice(0, 2), slice(2, 3)]
        monkeypatch.setattr(type(visible), "groups", lambda *_, split=split: split)
        out, lse = inform(Prepared, tuple(inputs[:5]), tuple(inputs[5:]), visible)
        assert lse.shape == (3, 0)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(*pair) for pair in zip(*results[:2], strict=True))
    for mine, theirs in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
