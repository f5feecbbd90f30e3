"""Rows of a GPU's products are of whole 16 bytes: the same numbers, run here on a CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman.ops import relative
from pointsman.ops.kernels import Kernels, using
from pointsman.routers.mutual import posterior
from pointsman_lab.models import attention_blocks
from pointsman_lab.models.traced_attention import traced_attention


class Strides(TorchDispatchMode):
    """Notes products with an operand whose rows are not 16 bytes apart, or that starts between."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.odd = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("mm", "bmm", "addmm", "baddbmm"):
            self.products += 1
            given = args[-2:]  # what is added is copied first
            for tensor in (*given, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))):
                steps = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if s > 1 and size > 1]
                if any(step * tensor.element_size() % 16 for step in steps) or tensor.storage_offset() * 2 % 16:
                    self.odd.append((func.__name__, tuple(tensor.shape), tensor.stride()))
        return result


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(relative, "alignment", lambda _: 8)
    monkeypatch.setattr(posterior, "alignment", lambda _: 8)
    monkeypatch.setattr(attention_blocks, "SINGLE", 1 << 60)
    with using(Kernels()):
        yield


def inputs(length: int, memory: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    heads, batch, width, keys = 2, 2, 16, memory + length
    shapes = (heads, batch, length, width), (2, heads, batch, keys, width), (heads, keys, width), (heads, width)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, (heads, width))]
    return [tensor.requires_grad_() for tensor in drawn]


def results(given: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    output, _ = traced_attention(*given, scale=0.25, key_mask=mask, trace=False)
    upper = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output, *torch.autograd.grad(output, given, upper)]


@pytest.mark.parametrize(("length", "memory"), [(5, 0), (8, 8), (7, 4), (9, 22)])
@pytest.mark.parametrize("padded", [False, True])
def test_aligned_attention_is_the_same(length: int, memory: int, padded: bool, request: pytest.FixtureRequest) -> None:
    given = inputs(length, memory)
    mask = torch.rand(2, length + memory, generator=torch.Generator().manual_seed(2)) < 0.7 if padded else None
    with using(Kernels()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "ROWS", 4)
        expected = results(given, mask)
        request.getfixturevalue("as_on_a_gpu")
        for got, value in zip(results(given, mask), expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_no_product_of_the_attention_has_odd_rows() -> None:
    with Strides() as seen:
        results(inputs(32, 32, torch.bfloat16), None)
    assert seen.products >= 8
    assert not seen.odd


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("length", [3, 8, 11])
def test_aligned_bias_is_the_same(length: int) -> None:
    query, key_value, positions, content, position = inputs(length, 5)
    key = key_value[0]
    bias = relative.RelativeBias(query.transpose(0, 1), key.transpose(0, 1), positions, content, position, 0.5)
    scores = bias(0, length)
    for row in range(length):
        for column in range(5 + row + 1):
            by_position = (query[:, :, row] + position[:, None]) * positions[:, None, length - 1 - row + column]
            expected = 0.5 * (by_position.sum(-1) + (content[:, None] * key[:, :, column]).sum(-1))
            torch.testing.assert_close(scores[:, :, row, column], expected.t())
