"""Numbers drawn for rows: together those of one process, whatever the number of ranks."""

import pytest
import torch
from torch import Tensor

from pointsman.ops.drawing import dropout, own_rows, rand_like, randn_like
from pointsman.ranks import ALONE, Ranks


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 5, 6), (4, 3)])
def test_the_ranks_parts_are_what_one_process_draws(count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=dtype)

    def draws(some: Tensor, ranks: Ranks) -> list[Tensor]:
        torch.manual_seed(1)
        return [
            rand_like(some, ranks), dropout(some, 0.3, True, ranks), randn_like(some, ranks),
            own_rows(lambda shape: some.new_empty(shape).exponential_(), some.shape, ranks),
            rand_like(some[..., 0], ranks), torch.rand(3),
        ]  # fmt: skip

    whole = draws(values, ALONE)
    each = len(values) // count
    parts = [draws(values[rank * each : (rank + 1) * each], Ranks(rank, count)) for rank in range(count)]
    for place, expected in enumerate(whole[:-1]):
        assert torch.equal(torch.cat([part[place] for part in parts]), expected)
    assert all(torch.equal(part[-1], whole[-1]) for part in parts)  # the generator goes on alike


def test_one_process_draws_as_torch() -> None:
    values = torch.randn(4, 5)
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(values, 0.5)
    torch.manual_seed(0)
    assert torch.equal(dropout(values, 0.5, True), expected)
    assert dropout(values, 0.5, False, Ranks(1, 2)) is not None
