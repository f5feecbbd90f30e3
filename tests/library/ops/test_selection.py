"""top_k: one rule for ties, whichever way it is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.ops import selection
from pointsman.ops.selection import top_k


def slowly(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_largest_first_and_lowest_index_of_equals(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 12))
    k = data.draw(st.integers(1, experts))
    level = st.sampled_from([-float("inf"), -1.5, 0.0, 1.0, float("inf")])  # many ties
    rows = data.draw(st.lists(st.lists(level, min_size=experts, max_size=experts), min_size=1, max_size=20))
    values = torch.tensor(rows)
    expected = [slowly(row, k) for row in rows]
    assert selection._repeated_maxima(values, k).tolist() == expected
    assert top_k(values, k).tolist() == expected
    assert top_k(values.repeat(600, 1), k)[: len(rows)].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "k"), [((3000, 16), 2), ((3000, 16), 9), ((4, 700, 32), 11), ((2, 5, 7), 7)])
def test_agrees_with_torch_where_nothing_ties(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    experts = shape[-1]
    values = torch.rand(shape).argsort(-1).to(dtype) / experts
    assert torch.equal(top_k(values, k), values.topk(k, -1).indices)
    assert torch.equal(values, values.clone())


def test_both_ways_are_taken_and_agree_on_nan() -> None:
    values = torch.randn(3000, 16)
    values[::7, 3] = torch.nan
    assert selection._maxima_are_faster(values, 2)
    assert not selection._maxima_are_faster(values, 16)
    assert not selection._maxima_are_faster(values[:4], 2)
    assert torch.equal(selection._repeated_maxima(values, 4), top_k(values, 16)[:, :4])
    assert (top_k(values, 1)[::7] == 3).all()


def test_needs_no_gradient_and_changes_nothing() -> None:
    values = torch.randn(3000, 16, requires_grad=True)
    before = values.detach().clone()
    assert not top_k(values, 2).requires_grad
    assert torch.equal(values.detach(), before)
