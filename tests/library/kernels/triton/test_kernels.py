"""Each kernel against the same in plain operations, with memory that was NaN before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.kernels.triton import gemm, units
from pointsman.kernels.triton import sort as sorting
from pointsman.kernels.triton.rows import combine, gather
from pointsman.kernels.triton.sort import Sorted, sort
from pointsman.ops.feed_forward import ACTIVATIONS, DERIVATIVES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


pytestmark = pytest.mark.usefixtures("undefined_memory")


def plain_sort(expert: Tensor, num_experts: int) -> Sorted:
    """`sort` in plain operations; the two below are `gather` and `combine`."""
    flat = expert.reshape(-1)
    keys = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    of_rows, order = torch.sort(keys, stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    row = row.masked_fill(keys == num_experts, -1)
    ends = torch.searchsorted(of_rows, torch.arange(num_experts, device=keys.device), right=True)
    return Sorted(*(tensor.to(torch.int32) for tensor in (order, row, of_rows, ends)))


def plain_gather(hidden: Tensor, where: Sorted, k: int) -> Tensor:
    return hidden[where.order.long() // k]


def plain_combine(rows: Tensor, where: Sorted, tokens: int, dim: int, weight: Tensor | None = None) -> Tensor:
    row = where.row.view(tokens, -1).long()
    kept = rows.float()[row.clamp_min(0), :dim].masked_fill((row < 0)[:, :, None], 0)
    total = kept if weight is None else kept * weight.float().masked_fill(row < 0, 0)[:, :, None]
    return torch.sum(total, 1).to(rows.dtype)


def routed(tokens: int, k: int, experts: int, dropped: float = 0.2, favourite: bool = False) -> Tensor:
    chosen = torch.rand(tokens, experts)
    if favourite:  # most experts get nothing
        chosen[:, :k] += 1
    chosen = chosen.topk(k, -1).indices
    return chosen.masked_fill(torch.rand(tokens, k) < dropped, -1)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block"),
    [(1, 1, 1, 512), (37, 2, 5, 16), (50, 3, 16, 64), (9, 8, 255, 32), (20, 1, 300, 16)],
)
@pytest.mark.parametrize("dropped", [0.0, 0.3, 1.0])
def test_sort(tokens: int, k: int, experts: int, block: int, dropped: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "BLOCK", block)
    expert = routed(tokens, k, experts, dropped)
    for got, expected in zip(sort(expert, experts), plain_sort(expert, experts), strict=True):
        assert torch.equal(got, expected)


def test_an_expert_that_does_not_exist_is_dropped() -> None:
    expert = torch.tensor([[0, 7], [3, 1], [-5, 2]])
    found = sort(expert, 3)
    assert found.row.tolist() == [0, -1, -1, 1, -1, 2]
    assert found.ends.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim", "k"), [(21, 24, 2), (5, 1100, 3), (1, 7, 1)])
def test_gather_and_combine(tokens: int, dim: int, k: int, dtype: torch.dtype) -> None:
    where = plain_sort(routed(tokens, k, 6), 6)
    kept = int(where.ends[-1])
    hidden = torch.randn(tokens, dim).to(dtype)
    assert torch.equal(gather(hidden, where, k)[:kept], plain_gather(hidden, where, k)[:kept])
    rows = torch.randn(tokens * k, dim).to(dtype)
    rows[kept:] = torch.nan
    weight = torch.rand(tokens, k).masked_fill(where.row.view(tokens, k) < 0, torch.nan)
    for given in (None, weight):
        got, expected = combine(rows, where, tokens, dim, given), plain_combine(rows, where, tokens, dim, given)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("tokens", "inner", "columns", "favourite"), [(30, 24, 40, False), (19, 17, 33, True)])
def test_products(tokens: int, inner: int, columns: int, favourite: bool, gathered: bool, dtype: torch.dtype) -> None:
    k, experts = 2, 5
    where = plain_sort(routed(tokens, k, experts, favourite=favourite), experts)
    kept, starts = int(where.ends[-1]), [0, *where.ends.tolist()]
    left = torch.randn(tokens if gathered else tokens * k, inner).to(dtype)
    if not gathered:
        left[kept:] = torch.nan
    other = torch.randn(tokens * k, columns).to(dtype)
    other[kept:] = torch.nan
    turned = torch.randn(experts, columns, inner).to(dtype).transpose(1, 2)
    rows = left[where.order.long() // k] if gathered else left
    given = k if gathered else 0
    product = gemm.times(left, turned, where, given)
    assert product[kept:].isnan().all(), "not written"
    outer = gemm.outer(left, other, where, left_k=given)
    other_way, sums = gemm.outer_and_sums(other, left, where, right_k=given)
    for expert in range(experts):
        part = slice(starts[expert], starts[expert + 1])
        exact = rows[part].double() @ turned[expert].double()
        torch.testing.assert_close(product[part].double(), exact, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
        exact = rows[part].double().t() @ other[part].double()
        for found in (outer[expert], other_way[expert].t()):
            torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
        torch.testing.assert_close(
            sums[expert].double(), other[part].double().sum(0), rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("dropout", "dtype"), [(0.0, torch.float32), (0.3, torch.float32), (0.3, torch.bfloat16)])
def test_units(activation: str, gated: bool, dropout: float, dtype: torch.dtype) -> None:
    tokens, k, experts, width = 11, 2, 4, 70
    bias = dtype == torch.float32
    where = plain_sort(routed(tokens, k, experts), experts)
    kept, slots = int(where.ends[-1]), tokens * k
    order, of_rows = where.order[:kept].long(), where.expert[:kept].long()
    up, gate, inner = (torch.randn(slots, width).to(dtype) for _ in range(3))
    b_in, b_gate = torch.randn(2, experts, width).to(dtype)
    weight = torch.randn(tokens, k)
    given = gate if gated else None
    setting = units.Setting(
        activation, dropout, torch.tensor([2**61 + 5]), b_in if bias else None, b_gate if bias and gated else None
    )
    ones = units.units(
        torch.ones(slots, width), None, where, setting._replace(activation="relu", b_in=None, b_gate=None)
    )
    mask = ones[:kept].double()  # what dropout multiplies by
    leaf, leaf_gate = (tensor[:kept].double().requires_grad_() for tensor in (up, gate))
    biased, biased_gate = (
        (leaf + b_in[of_rows].double(), leaf_gate + b_gate[of_rows].double()) if bias else (leaf, leaf_gate)
    )
    act = ACTIVATIONS[activation]
    expected = mask * (act(biased_gate) * biased if gated else act(biased))
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    found = units.units(up, given, where, setting)[:kept]
    torch.testing.assert_close(found.double(), expected, **tolerance)
    d_up, d_gate, weighted, d_weight = units.units_backward(inner, up, given, weight, where, setting)
    w, q = weight.view(-1)[order].double()[:, None], inner[:kept].double()
    grads = torch.autograd.grad(expected, (leaf, leaf_gate) if gated else (leaf,), w * q)
    torch.testing.assert_close(d_up[:kept].double(), grads[0], **tolerance)
    if gated:
        assert d_gate is not None
        torch.testing.assert_close(d_gate[:kept].double(), grads[1], **tolerance)
    torch.testing.assert_close(weighted[:kept].double(), w * expected.detach(), **tolerance)
    by_slot = torch.zeros(slots, dtype=torch.float64).index_copy(0, order, (expected.detach() * q).sum(-1))
    tolerance["atol"] *= 10
    torch.testing.assert_close(d_weight.view(-1).double(), by_slot, **tolerance)


def test_masks() -> None:
    """Kept at the rate, independent of the routing, different by seed."""
    where = plain_sort(routed(40, 2, 4, dropped=0.0), 4)
    other = plain_sort(routed(40, 2, 4, dropped=0.0), 4)
    ones, masks = torch.ones(80, 200), []
    for sorted_, seed in ((where, 1), (other, 1), (where, 2), (where, 2**40 + 1)):
        setting = units.Setting("relu", 0.25, torch.tensor([seed]), None, None)
        masks.append(units.units(ones, None, sorted_, setting)[sorted_.row.long()])
    assert masks[0].unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs(float((masks[0] > 0).float().mean()) - 0.75) < 0.015
    assert float((masks[0] > 0).float().mean(0).std()) < 0.07
    assert torch.equal(masks[0], masks[1])
    for one in masks[2:]:
        agree = float((one == masks[0]).float().mean())
        assert abs(agree - (0.75**2 + 0.25**2)) < 0.03


@pytest.mark.parametrize("tokens", [3, 700])
def test_sums(tokens: int) -> None:
    where = plain_sort(routed(tokens, 2, 2), 2)
    rows = torch.randn(tokens * 2, 20)
    rows[int(where.ends[-1]) :] = torch.nan
    found, starts = units.sums(rows, where), [0, *where.ends.tolist()]
    for expert in range(2):
        expected = rows[starts[expert] : starts[expert + 1]].sum(0)
        torch.testing.assert_close(found[expert], expected, rtol=1e-5, atol=1e-4)


def test_derivatives() -> None:
    value, inner = torch.randn(1, 64), torch.randn(1, 64)
    where = plain_sort(torch.zeros(1, 1, dtype=torch.int64), 1)
    for name, derivative in DERIVATIVES.items():
        setting = units.Setting(name, 0.0, torch.zeros(1, dtype=torch.int64), None, None)
        d_up, *_ = units.units_backward(inner, value, None, torch.ones(1, 1), where, setting)
        torch.testing.assert_close(d_up, derivative(inner, value))
        torch.testing.assert_close(units.units(value, None, where, setting), getattr(F, name)(value))
