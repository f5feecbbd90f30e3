"""The exchange waits for a device once, and adds no two rows of a token in one call. (Numbers: tests/lab/parallel.)"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pointsman.ops.exchange import Exchange, _Sum, _Take
from pointsman.routing import Routing

WAITING = {"nonzero", "_local_scalar_dense", "masked_select", "unique_consecutive", "_unique2", "repeat_interleave"}


class Calls(TorchDispatchMode):
    """The operators of a block, and whether one adds two rows at the same place."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.twice = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.partition(".")[0]
        self.names.append(name)
        if name.startswith("index_add"):
            self.twice |= len(args[2].unique()) < len(args[2])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    genuine = Tensor.tolist

    def counting(self: Tensor) -> object:
        nonlocal read
        read += 1
        return genuine(self)

    monkeypatch.setattr(Tensor, "tolist", counting)
    hidden, weights = torch.randn(5, 4, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    experts = torch.tensor([[0, 1], [1, -1], [-1, -1], [2, 0], [2, 1]])
    routing = Routing(experts, weights, torch.rand(5, 3), torch.rand(5, 3))
    exchange = Exchange(dist.group.WORLD, 3)
    with Calls() as seen:
        output = exchange(lambda rows, own: rows * own.weights.sum(-1, keepdim=True), hidden, routing)
        output.sum().backward()
    expected = hidden * (weights * (experts >= 0)).sum(-1, keepdim=True)
    torch.testing.assert_close(output, expected)
    assert exchange.sent == 4
    assert read == 1
    assert not WAITING & set(seen.names)


def test_a_token_s_rows_are_added_part_by_part() -> None:
    token, sizes = torch.tensor([0, 2, 3, 1, 2, 3, 3]), [3, 3, 1]
    hidden, rows = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7))
    with Calls() as seen:
        taken, summed = _Take.apply(hidden, token, sizes), _Sum.apply(rows, token, sizes, 5)
        torch.autograd.grad((taken.sum(), summed.sum()), (hidden, rows))
    assert not seen.twice
    assert torch.equal(taken, hidden[token])
    torch.testing.assert_close(summed, torch.zeros(5, 3, dtype=torch.float64).index_add(0, token, rows))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda one: _Take.apply(one, token, sizes), hidden)
        assert check(lambda one: _Sum.apply(one, token, sizes, 5), rows)
