"""Each kernel against the same in plain operations, with memory that was NaN before."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton import fused, language, products
from pointsman.kernels.triton.products import Sorted, combine, sort
from pointsman.ops.feed_forward import ACTIVATIONS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


pytestmark = pytest.mark.usefixtures("undefined_memory")


def plain_sort(expert: Tensor, num_experts: int) -> Sorted:
    """`sort` in plain operations, below `combine`."""
    flat = expert.reshape(-1)
    keys = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    of_rows, order = torch.sort(keys, stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    row = row.masked_fill(keys == num_experts, -1)
    ends = torch.searchsorted(of_rows, torch.arange(num_experts, device=keys.device), right=True)
    return Sorted(*(tensor.to(torch.int32) for tensor in (order, row, of_rows, ends)))


def plain_combine(rows: Tensor, where: Sorted, k: int, weight: Tensor | None = None) -> Tensor:
    row = where.row.view(-1, k).long()
    kept = rows.float()[row.clamp_min(0)].masked_fill((row < 0)[:, :, None], 0)
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
    monkeypatch.setattr(products, "BLOCK", block)
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
def test_combine(tokens: int, dim: int, k: int, dtype: torch.dtype) -> None:
    where = plain_sort(routed(tokens, k, 6), 6)
    kept = int(where.ends[-1])
    rows = torch.randn(tokens * k, dim).to(dtype)
    rows[kept:] = torch.nan
    weight = torch.rand(tokens, k).masked_fill(where.row.view(tokens, k) < 0, torch.nan)
    for given in (None, weight):
        got, expected = combine(rows, where, k, given), plain_combine(rows, where, k, given)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "inner", "columns", "favourite"), [(30, 24, 40, False), (19, 17, 33, True)])
def test_products(tokens: int, inner: int, columns: int, favourite: bool, dtype: torch.dtype) -> None:
    k, experts = 2, 5
    where = plain_sort(routed(tokens, k, experts, favourite=favourite), experts)
    kept, starts = int(where.ends[-1]), [0, *where.ends.tolist()]
    left, other = (torch.randn(tokens * k, width).to(dtype) for width in (inner, columns))
    left[kept:], other[kept:] = torch.nan, torch.nan
    by_token = torch.randn(tokens, inner).to(dtype)
    turned, more = (torch.randn(experts, columns, inner).to(dtype).transpose(1, 2) for _ in range(2))
    product, both = products.times(left, turned, where), products.times(left, turned, where, (left, more))
    assert product[kept:].isnan().all(), "not written"
    gathered = by_token[where.order.long() // k].double()
    outer, sums = products.outer(other, by_token, where, right_k=k, sums=True)
    (other_way,) = products.outer(by_token, other, where, left_k=k)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 10 * TOLERANCE[dtype]}
    for expert in range(experts):
        part = slice(starts[expert], starts[expert + 1])
        exact = left[part].double() @ turned[expert].double()
        torch.testing.assert_close(product[part].double(), exact, **tolerance)
        torch.testing.assert_close(
            both[part].double(), exact + left[part].double() @ more[expert].double(), **tolerance
        )
        exact = other[part].double().t() @ gathered[part]
        for found in (outer[expert], other_way[expert].t()):
            torch.testing.assert_close(found.double(), exact, **tolerance)
        torch.testing.assert_close(sums[expert].double(), other[part].double().sum(0), **tolerance)


def masks(where: Sorted, tokens: int, k: int, width: int, rate: float, seed: int) -> Tensor:
    """What dropout multiplies hidden units by, [S, width] by row: those of inputs of 0, a bias of 1 and ReLU."""
    experts = len(where.ends)
    setting = fused.Setting("relu", rate, torch.tensor([seed]), torch.ones(experts, width), None)
    return fused.up(torch.zeros(tokens, 16), torch.zeros(experts, width, 16), None, where, k, setting)[2]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("dropout", "dtype"), [(0.0, torch.float32), (0.3, torch.float32), (0.3, torch.bfloat16)])
def test_products_with_units(activation: str, gated: bool, dropout: float, dtype: torch.dtype) -> None:
    """u, g and h; in backward the weighted gradients of u and g, the weighted units, and the combine weight's."""
    tokens, k, experts, dim, width = 11, 2, 4, 24, 70
    bias, seed = dtype == torch.float32, 2**61 + 5
    where = plain_sort(routed(tokens, k, experts), experts)
    kept, slots = int(where.ends[-1]), tokens * k
    order, of_rows = where.order[:kept].long(), where.expert[:kept].long()
    hidden, gradient = (torch.randn(tokens, dim).to(dtype) for _ in range(2))
    w_in, w_gate = (torch.randn(2, experts, width, dim) * dim**-0.5).to(dtype)
    w_out = (torch.randn(experts, dim, width) * dim**-0.5).to(dtype)
    b_in, b_gate = torch.randn(2, experts, width).to(dtype)
    weight = torch.randn(tokens, k)
    setting = fused.Setting(activation, dropout, torch.tensor([seed]), *((b_in, b_gate) if bias else (None, None)))
    u, g, h = fused.up(hidden, w_in, w_gate if gated else None, where, k, setting)
    rows = hidden[order // k].double()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for found, weights, biases in ((u, w_in, b_in), (g, w_gate, b_gate)):
        if found is not None:
            exact = torch.einsum("rd,rhd->rh", rows, weights[of_rows].double()) + bias * biases[of_rows].double()
            torch.testing.assert_close(found[:kept].double(), exact, **tolerance)
    mask = masks(where, tokens, k, width, dropout, seed)[:kept].double()
    leaf = u[:kept].double().requires_grad_()
    leaf_gate = leaf if g is None else g[:kept].double().requires_grad_()
    act = ACTIVATIONS[activation]
    expected = mask * (act(leaf_gate) * leaf if gated else act(leaf))
    torch.testing.assert_close(h[:kept].double(), expected, **tolerance)
    d_up, d_gate, weighted, d_weight = fused.inner(gradient, w_out, u, g, weight, where, setting)
    q = torch.einsum("rd,rdh->rh", gradient[order // k].double(), w_out[of_rows].double())
    w = weight.view(-1)[order].double()[:, None]
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
    found = []
    for sorted_, seed in ((where, 1), (other, 1), (where, 2), (where, 2**40 + 1)):
        found.append(masks(sorted_, 40, 2, 200, 0.25, seed)[sorted_.row.long()])
    assert found[0].unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs(float((found[0] > 0).float().mean()) - 0.75) < 0.015
    assert float((found[0] > 0).float().mean(0).std()) < 0.07
    assert torch.equal(found[0], found[1])
    for one in found[2:]:
        agree = float((one == found[0]).float().mean())
        assert abs(agree - (0.75**2 + 0.25**2)) < 0.03


@triton.jit
def order_kernel(out_ptr, rows, columns):
    row, column = language.in_groups(tl.program_id(0), rows, columns)
    tl.store(out_ptr + 2 * tl.program_id(0), row)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, column)


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "experts"),
    [(64, 6, 2048, 4), (64, 32, 2048, 2), (61, 9, 512, 8)],  # tiles of rows and of columns, inner width, experts
)
def test_tiles_share_the_cache(rows: int, columns: int, inner: int, experts: int) -> None:
    """Bytes that miss a cache too small for all rows or all weights: rows once, weights at most once a group."""
    at = torch.empty(rows * columns, 2, dtype=torch.int32)
    order_kernel[rows * columns,](at, rows, columns)
    assert {tuple(pair) for pair in at.tolist()} == {(row, column) for row in range(rows) for column in range(columns)}
    operand = 128 * inner * 2  # bytes of a tile of rows, and of one of columns
    group = language.GROUP.value

    def missed(order: list[tuple[int, int]]) -> int:
        held: OrderedDict[Any, None] = OrderedDict()
        misses = 0
        for row, column in order:
            for what in (("row", row), ("weight", row * experts // rows, column)):
                misses += what not in held
                held[what] = None
                held.move_to_end(what)
                if len(held) > 3 * group:
                    held.popitem(last=False)
        return misses * operand

    found = missed([(row, column) for row, column in at.tolist()])
    groups = -(-rows // group)
    assert found <= (rows + (groups + experts) * columns) * operand
    column_by_column = missed([(row, column) for column in range(columns) for row in range(rows)])
    row_by_row = missed([(row, column) for row in range(rows) for column in range(columns)])
    assert found <= 0.5 * column_by_column
    assert columns < 3 * group or found < 0.5 * row_by_row, "where the weights of an expert do not fit"


def test_many_tokens_are_one_dimension_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device takes 65,535 programs in all dimensions but the first."""
    grids: list[tuple[int, ...]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: grids.append(grid)

    for module in (products, fused):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Noted())
    count = 1 << 21
    where = plain_sort(torch.zeros(count, 1, dtype=torch.int64), 1)
    sort(torch.zeros(count, 1, dtype=torch.int64), 1)
    rows = torch.empty(count, 1)
    combine(rows, where, 1)
    products.times(rows, torch.empty(1, 1, 16), where)
    products.outer(rows, torch.empty(count, 16), where)
    setting = fused.Setting("relu", 0.0, torch.zeros(1, dtype=torch.int64), None, None)
    u, _, _ = fused.up(rows, torch.empty(1, 16, 1), None, where, 1, setting)
    fused.inner(rows, torch.empty(1, 1, 16), u, None, rows, where, setting)
    assert len(grids) == 7
    assert max(grid[0] for grid in grids) > 65_535
    assert all(size <= 65_535 for grid in grids for size in grid[1:])


def test_nothing_to_do() -> None:
    none = sort(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert [len(tensor) for tensor in none] == [0, 0, 0, 3]
    assert none.ends.tolist() == [0, 0, 0]
    assert combine(torch.zeros(0, 5), none, 2).shape == (0, 5)
    assert not products.outer(torch.zeros(0, 4), torch.zeros(0, 5), none)[0].any()
