"""Numbers drawn for rows: together those of one process, whatever the number of ranks."""

import pytest
import torch
from torch import Tensor

from pointsman.ops.drawing import dropout, own_rows, rand_like, randn_like
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.models import attention_blocks
from pointsman_lab.models.attention import Attention
from pointsman_lab.models.traced_attention import traced_attention


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


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("elements", [2**19, 200, 60])
def test_relative_attention_drops_what_one_process_drops(
    count: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However blocks of the whole batch lie across the ranks' rows."""
    monkeypatch.setattr(attention_blocks, "CPU_ELEMENTS", elements)
    monkeypatch.setattr(attention_blocks, "ROWS", 4)
    heads, batch, length, keys, width = 2, 8, 6, 9, 4
    query, key_value = torch.randn(heads, batch, length, width), torch.randn(2, heads, batch, keys, width)
    shared = [torch.randn(heads, keys, width), torch.randn(heads, width), torch.randn(heads, width)]

    def attended(rows: slice, ranks: Ranks) -> list[Tensor]:
        torch.manual_seed(3)
        own = [query[:, rows].double().requires_grad_(), key_value[:, :, rows].double().requires_grad_()]
        rest = [one.double() for one in shared]
        output, _ = traced_attention(*own, *rest, scale=0.5, dropout=0.4, trace=False, ranks=ranks)
        output.square().sum().backward()
        return [output, own[0].grad, own[1].grad[0], own[1].grad[1]]

    whole = attended(slice(None), ALONE)
    parts = [attended(Ranks(rank, count).rows(batch), Ranks(rank, count)) for rank in range(count)]
    for place, expected in enumerate(whole):
        assert torch.allclose(torch.cat([part[place] for part in parts], 1), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_drops_what_one_process_drops(causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    layer, hidden = Attention(16, 4, 4, kv_heads=2, dropout=0.4).double(), torch.randn(4, 5, 16, dtype=torch.float64)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[::2, 3:] = not padded  # each rank has padding, or none

    def attended(rows: slice, ranks: Ranks) -> Tensor:
        torch.manual_seed(3)
        layer.ranks = ranks
        return layer(hidden[rows], key_mask=mask[rows], causal=causal)[0]

    parts = [attended(Ranks(rank, 2).rows(4), Ranks(rank, 2)) for rank in range(2)]
    assert torch.allclose(torch.cat(parts), attended(slice(None), ALONE), atol=1e-12, rtol=0)
