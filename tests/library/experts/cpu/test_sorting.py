"""Every assignment has one row, rows are sorted by expert, and pieces are small."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.experts.cpu import sorting
from pointsman.experts.cpu.sorting import sort


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 60),
    k=st.integers(1, 4),
    num_experts=st.sampled_from([1, 3, 8, 255, 256, 257]),
    dropped=st.booleans(),
    as_pairs=st.booleans(),
    together=st.booleans(),
    most=st.sampled_from([1, 7, 30, 1000]),
)
def test_every_assignment_has_its_row(
    tokens: int, k: int, num_experts: int, dropped: bool, as_pairs: bool, together: bool, most: int
) -> None:
    torch.manual_seed(tokens)
    chosen = torch.randint(num_experts, (tokens, k))
    if dropped:
        chosen[torch.rand(tokens, k) < 0.4] = -1
    token, expert = torch.arange(tokens).repeat_interleave(k), chosen.reshape(-1)
    if as_pairs:
        shuffled = torch.randperm(tokens * k)[expert >= 0]
        token, expert = token[shuffled], expert[shuffled]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "MOST", 8 * most)
        at = sort(*((token, expert) if as_pairs else (None, chosen)), num_experts, 8, together)
    assert at.order.tolist() == [i for e in range(num_experts) for i in (expert == e).nonzero().flatten().tolist()]
    assert torch.equal(at.token, token[at.order])
    assert torch.equal(at.expert, expert[at.order])
    assert at.counts == torch.bincount(expert[expert >= 0], minlength=num_experts).tolist()
    stop, seen = 0, set()
    for piece in at.pieces:
        assert piece.start == stop
        stop = piece.stop
        assert 0 < stop - piece.start <= most
        assert piece.alone or together
        assert piece.opens == (piece.first not in seen)
        sizes = piece.ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
        mine = [e for e, size in zip(range(piece.first, piece.end), sizes, strict=True) for _ in range(size)]
        assert at.expert[piece.rows].tolist() == mine
        assert piece.alone or not seen & set(mine)
        seen |= {piece.first, *mine}
    assert stop == len(at.order)


def test_any_number_of_experts_keeps_its_order() -> None:
    for num_experts in (255, 256, 257, 65535, 65537):
        at = sort(None, torch.tensor([[num_experts - 1], [0], [-1]]), num_experts, 1, together=True)
        assert at.order.tolist() == [1, 0]
        assert (at.counts[0], at.counts[-1], sum(at.counts)) == (1, 1, 2)
