"""Mixing by blocks of rows against explicit matrices in float64, and what it allocates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman.ops.relative import RelativeBias, by_key
from pointsman.ops.visible import Prepared, Visible
from pointsman.routers.mutual.mixers import unit
from pointsman.routers.mutual.streaming import block_scores, inform, inform_biased


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def informs(visible: Visible, count: int) -> Tensor:
    """[N, T, S] bool, one pair at a time."""
    real = None if visible.real is None else visible.real.tolist()
    entropy = None if visible.entropy is None else visible.entropy.tolist()
    allowed = [[[False] * visible.keys for _ in range(visible.length)] for _ in range(count)]
    for n in range(count):
        for i in range(visible.length):
            own = visible.keys - visible.length + i
            for j in range(visible.keys):
                ok = not (visible.causal and j > own)
                if real is not None:
                    ok = ok and real[n][j] and real[n][own]
                if entropy is not None:
                    ok = ok and entropy[n][j] <= entropy[n][own]
                allowed[n][i][j] = ok or j == own
    return torch.tensor(allowed)


def explicit(prepared: Prepared, visible: Visible) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp with the whole [N, T, S] matrix."""
    query, key, value, key_bias, position_query, positions = prepared
    scores = torch.einsum("ntd,nsd->nts", query, key)
    if key_bias is not None:
        scores = scores + key_bias[:, None]
    if position_query is not None and positions is not None:
        length, keys = scores.shape[1:]
        past = keys - length
        positions = positions[:, :-1]
        rows = []
        for i in range(length):
            distance = past + i - torch.arange(keys)
            r = torch.where(distance[:, None] >= 0, positions[0, (keys - 1 - distance).clamp_max(keys - 1)], 0)
            rows.append(position_query[:, i] @ r.T)
        scores = scores + torch.stack(rows, 1)
    scores = scores.masked_fill(~informs(visible, len(query)), -torch.inf)
    assert value is not None
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def tensors(count: int, length: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = [
        (count, length, 6),
        (count, keys, 6),
        (count, keys, 5),
        (count, keys),
        (count, length, 4),
        (1, keys + 1, 4),
    ]
    drawn = [draw(*shape, dtype=dtype, seed=index) for index, shape in enumerate(shapes)]
    drawn[-1][:, -1] = 0  # the distance -1
    return [tensor.requires_grad_() for tensor in drawn]


def visibilities(count: int, length: int, keys: int) -> dict[str, Visible]:
    real = torch.ones(count, keys, dtype=torch.bool)
    real[0, : keys // 3] = False
    real[-1, keys - length // 2 :] = False
    entropy = draw(count, keys).abs()
    return {
        "causal": Visible(length, keys),
        "everyone": Visible(length, keys, causal=False),
        "padded": Visible(length, keys, real=real),
        "entropy": Visible(length, keys, entropy=entropy),
        "everyone entropy padded": Visible(length, keys, False, real, entropy),
    }


@pytest.mark.parametrize("kind", visibilities(1, 2, 3))
@pytest.mark.parametrize(("count", "length", "keys"), [(1, 1, 1), (3, 7, 7), (2, 5, 9), (2, 1, 6), (2, 130, 140)])
@pytest.mark.parametrize("positions", [False, True])
def test_equals_the_explicit_matrix_forward_and_gradient(
    kind: str, count: int, length: int, keys: int, positions: bool
) -> None:
    visible = visibilities(count, length, keys)[kind]
    if positions and not visible.causal:
        pytest.skip("positions by distance are causal")
    leaves = tensors(count, length, keys, torch.float64)
    leaves = leaves if positions else leaves[:4]

    def prepare(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *rest: Tensor) -> Prepared:
        return Prepared(query * 2, key, value, bias, *rest)

    batched, shared = tuple(leaves[:5]), tuple(leaves[5:])
    ours = inform(prepare, batched, shared, visible, normalization=True)
    theirs = explicit(prepare(*leaves), visible)
    upper = [draw(*tensor.shape, seed=9) for tensor in theirs]
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)
    for outputs in ((0,), (1,), (0, 1)):
        wanted = leaves if 0 in outputs else [*leaves[:2], *leaves[3:]]
        got, expected = (
            torch.autograd.grad([side[i] for i in outputs], wanted, [upper[i] for i in outputs], retain_graph=True)
            for side in (ours, theirs)
        )
        for mine, reference in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "keys"), [(300, 300), (130, 290), (1, 40), (17, 17)])
def test_float32_is_as_close_as_float32_is(causal: bool, length: int, keys: int) -> None:
    visible, exact = Visible(length, keys, causal), tensors(2, length, keys, torch.float64)
    exact = exact if causal else exact[:4]
    rough = [tensor.detach().float().requires_grad_() for tensor in exact]
    ours = inform(Prepared, tuple(rough[:5]), tuple(rough[5:]), visible)[0]
    theirs = explicit(Prepared(*exact), visible)[0]
    upper = draw(*theirs.shape, seed=9)
    torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-5)
    got = torch.autograd.grad(ours, rough, upper.float())
    expected = torch.autograd.grad(theirs, exact, upper)
    for mine, reference in zip(got, expected, strict=True):
        assert (mine.double() - reference).norm() <= 1e-5 * reference.norm().clamp_min(1)


@pytest.mark.parametrize("kind", ["causal", "padded", "entropy"])
@pytest.mark.parametrize(("length", "keys"), [(5, 5), (4, 9), (140, 150)])
def test_an_opaque_bias_is_the_same_as_positions(kind: str, length: int, keys: int) -> None:
    heads, batch, width = 1, 2, 4
    visible = visibilities(batch, length, keys)[kind]
    query, key, value = draw(batch, length, width), draw(batch, keys, width), draw(batch, keys, 3)
    positions, content, position = draw(heads, keys, width), draw(heads, width), draw(heads, width, seed=1)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, positions, content, position)]

    def prepare(query: Tensor, key: Tensor, value: Tensor, *relative: Tensor) -> Prepared:
        positions, content, position = relative
        padded = torch.nn.functional.pad(positions, (0, 0, 0, 1))
        return Prepared(query, key, value, (key @ content[0]) * 1.0, query + position, padded)

    native = inform(prepare, tuple(leaves[:3]), tuple(leaves[3:]), visible, normalization=True)
    bias = RelativeBias(query[:, None], key[:, None], positions, content, position, 1.0)
    opaque = inform_biased(Prepared(query, key, value), lambda start, stop: bias(start, stop)[:, 0], visible)
    upper = [draw(*tensor.shape, seed=9) for tensor in native]
    for got, expected in zip(native, opaque, strict=True):
        torch.testing.assert_close(got, expected)
    got, expected = (torch.autograd.grad(side, leaves, upper) for side in (native, opaque))
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference)


def test_gradcheck() -> None:
    leaves = tensors(2, 3, 4, torch.float64)
    assert torch.autograd.gradcheck(
        lambda *t: inform(Prepared, t[:5], t[5:], Visible(3, 4), normalization=True), leaves, fast_mode=True
    )
    assert torch.autograd.gradcheck(
        lambda t: unit(t, torch.tensor(0.7, dtype=torch.float64)), draw(3, 5).requires_grad_()
    )


def test_unit_of_a_zero_row_is_zero_with_a_finite_gradient() -> None:
    rows = torch.zeros(1, 4, requires_grad=True)
    units = unit(rows, torch.tensor(1.0))
    units.sum().backward()
    assert not units.any()
    assert torch.isfinite(rows.grad).all()


def test_weights_sum_to_one_whoever_informs() -> None:
    for visible in visibilities(3, 6, 8).values():
        leaves = [tensor.detach() for tensor in tensors(3, 6, 8, torch.float64)[:4]]
        p = torch.softmax(block_scores(Prepared(*leaves), visible, 0, 6), -1)
        torch.testing.assert_close(p.sum(-1), torch.ones(3, 6, dtype=torch.float64))
        assert torch.equal(p > 0, informs(visible, 3)[..., : p.shape[-1]])


def test_by_key_moves_rows() -> None:
    products = torch.arange(2 * 3 * 6.0).view(2, 3, 6)  # distances 4, 3, 2, 1, 0, -1
    for row in range(3):
        own = 5 - 3 + row
        for key in range(own + 1):
            assert torch.equal(by_key(products)[:, row, key], products[:, row, 4 - (own - key)])


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = (leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.elements = max([self.elements, *(size // 4 for size in sizes)])
        return result


def measure(length: int, run: Callable[[list[Tensor], Visible], Tensor]) -> tuple[int, int]:
    """Elements of the largest tensor made, and of all that is kept for backward, in forward and backward."""
    leaves = tensors(1, length, length, torch.float32)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run(leaves, Visible(length, length))
        torch.autograd.grad(out.sum(), leaves[:2])
    return largest.elements, sum(kept.values())


def test_memory_grows_linearly() -> None:
    def plain(leaves: list[Tensor], visible: Visible) -> Tensor:
        return inform(Prepared, tuple(leaves[:5]), tuple(leaves[5:]), visible)[0]

    def biased(leaves: list[Tensor], visible: Visible) -> Tensor:
        slope = torch.ones((), requires_grad=True)

        def bias(start: int, stop: int) -> Tensor:
            return slope * (torch.arange(visible.keys) - torch.arange(start, stop)[:, None])

        return inform_biased(Prepared(*leaves[:4]), bias, visible)[0]

    for run in (plain, biased):
        small, large = measure(1024, run), measure(4096, run)
        for before, after in zip(small, large, strict=True):
            assert after <= 4.1 * before
        assert large[0] < 4096 * 4096 // 8
