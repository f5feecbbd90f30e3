"""Products of single rows, against float64."""

import pytest
import torch
from torch import Tensor

from pointsman.ops import dots


def expected(rows: Tensor, source: Tensor, weight: Tensor, expert: Tensor, bias: Tensor | None) -> Tensor:
    output = torch.einsum("sd,sod->so", rows.double()[source], weight.double()[expert])
    return output if bias is None else output + bias.double()[expert]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("assignments", [1, 2, 9])
def test_against_float64(dtype: torch.dtype, biased: bool, assignments: int) -> None:
    rows, weight = torch.randn(5, 33).to(dtype), torch.randn(4, 17, 33).to(dtype)
    bias = torch.randn(4, 17).to(dtype) if biased else None
    source, expert = torch.randint(5, (assignments,)), torch.randint(4, (assignments,))
    output = dots.linear(rows, source, weight, expert, bias)
    exact = expected(rows, source, weight, expert, bias)
    assert output.dtype == dtype
    assert (output.double() - exact).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * exact.norm()


def test_halves_of_fused_weights() -> None:
    fused = torch.randn(3, 2 * 10, 8)
    rows, source, expert = torch.randn(4, 8), torch.tensor([3, 0, 1, 1]), torch.tensor([2, 0, 1, 2])
    for half in fused.unflatten(1, (2, -1)).unbind(1):
        assert dots.suits(half)
        exact = expected(rows, source, half, expert, None)
        torch.testing.assert_close(dots.linear(rows, source, half, expert).double(), exact, rtol=1e-5, atol=1e-5)


def test_what_does_not_suit() -> None:
    assert dots.suits(torch.randn(3, 4, 5))
    assert not dots.suits(torch.randn(3, 5, 4).mT)
    assert not dots.suits(torch.randn(3, 4, 6)[:, :, :5])
    assert not dots.suits(torch.randn(3 * 23)[: 3 * 23].as_strided((3, 4, 5), (23, 5, 1)))
    assert not dots.suits(torch.randn(3, 4, 5, dtype=torch.float64))


def test_another_torch_may_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: object) -> Tensor:
        raise AttributeError

    def other(left: Tensor, right: Tensor, line: Tensor, bag: Tensor) -> Tensor:
        return (left[bag] * right[line]).sum(-1) + 1

    assert dots.works()
    for operation in (missing, other):
        monkeypatch.setattr(dots, "_dots", operation)
        dots.works.cache_clear()
        assert not dots.works()
    dots.works.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("works", [True, False])
def test_rows_with_rows(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, works: bool) -> None:
    left, right = torch.randn(2, 7, 33, dtype=torch.float64).to(dtype)
    taken: list[bool] = []
    genuine = dots._dots
    monkeypatch.setattr(dots, "works", lambda: works)
    monkeypatch.setattr(dots, "_dots", lambda *given: taken.append(True) or genuine(*given))
    exact = (left.double() * right.double()).sum(-1)
    output = dots.each(left, right)
    assert bool(taken) == (works and dtype != torch.float64)
    assert output.dtype == dtype
    assert (output.double() - exact).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-6) * exact.norm()
