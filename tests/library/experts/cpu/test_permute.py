"""Every assignment has one row, rows are sorted by expert, padding is bounded."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.experts.cpu.groups import Grouping, group
from pointsman.experts.cpu.permute import (
    assignments_of_pairs,
    assignments_of_tokens,
    bucket,
    permutation,
    rows_at_most,
)


def test_buckets_are_few_and_tight() -> None:
    for low in (8, 16, 64, 128, 1024, 1 << 20):
        sizes = {bucket(rows) for rows in range(low + 1, 2 * low + 1)} if low < 1 << 20 else {bucket(low + 1)}
        assert len(sizes) <= 16
    for rows in [*range(2000), 12345, 999999]:
        assert rows <= bucket(rows) <= max(rows + 7, rows + rows // 16)
        assert rows > 8 or bucket(rows) == rows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 60),
    k=st.integers(1, 4),
    num_experts=st.sampled_from([1, 3, 8, 256, 257]),
    dropped=st.booleans(),
    as_pairs=st.booleans(),
    limits=st.sampled_from(
        [None, Grouping(3, 2048, 2048), Grouping(128, 2048, 2048), Grouping(128, 16, 2048), Grouping(3, 90, 90, 50)]
    ),
)
def test_every_assignment_has_its_row(
    tokens: int, k: int, num_experts: int, dropped: bool, as_pairs: bool, limits: Grouping | None
) -> None:
    torch.manual_seed(tokens)
    experts = torch.randint(num_experts, (tokens, k))
    if dropped:
        experts[torch.rand(tokens, k) < 0.4] = -1
    token = torch.arange(tokens).repeat_interleave(k)[experts.reshape(-1) >= 0]
    expert = experts[experts >= 0]
    if as_pairs:
        shuffled = torch.randperm(len(token))
        assignments = assignments_of_pairs(token[shuffled], expert[shuffled], tokens)
    else:
        assignments = assignments_of_tokens(experts)
    layout = permutation(assignments, num_experts, limits)
    assert sum(each_group.num_experts for each_group in layout.groups) == num_experts
    assert (len(layout.groups) == num_experts) or limits
    # every (token, expert) assignment once, in rows of that expert
    rows = torch.full((layout.num_rows, 2), -1)
    row = layout.row[layout.order]
    sorted_tokens = torch.cat([each_group.token for each_group in layout.groups])
    rows[row] = torch.stack([sorted_tokens, assignments.expert[layout.order]], 1)
    assert sorted(rows[rows[:, 0] >= 0].tolist()) == sorted(torch.stack([token, expert], 1).tolist())
    first = 0
    used = set(expert.tolist())
    for each_group, mine in zip(layout.groups, layout.split_rows(rows), strict=True):
        if each_group.num_experts > 1:
            assert each_group.unused == [index for index in range(each_group.num_experts) if first + index not in used]
        for each in mine.view(each_group.num_experts, -1, 2):
            size = int((each[:, 0] >= 0).sum())
            assert (each[:size, 1] == first).all()
            assert (each[size:] == -1).all()
            first += 1
    assert layout.num_rows <= rows_at_most(len(expert), num_experts, limits)
    # combining a row's own token gives each token its number of assignments times itself
    values = torch.zeros(layout.num_rows, 1).index_copy_(0, row, sorted_tokens[:, None].float())
    expected = torch.bincount(token, minlength=tokens) * torch.arange(tokens)
    assert torch.equal(layout.combine(values, torch.ones(len(expert)))[:, 0], expected.float())
    hidden, weight = torch.randn(tokens, 3), torch.rand(len(expert))
    gathered, weighted = torch.zeros(2, layout.num_rows, 3)
    gathered[row] = hidden[sorted_tokens]
    weighted[row] = gathered[row] * weight[:, None]
    each = zip(
        layout.groups,
        layout.split_rows(gathered),
        layout.split_rows(weighted),
        layout.split_assignments(weight),
        strict=True,
    )
    for each_group, plain, scaled, factor in each:
        if each_group.size:
            assert torch.equal(each_group.permute(hidden), plain)
            assert torch.equal(each_group.permute(hidden, factor), scaled)


def test_experts_of_nearly_as_many_rows_are_computed_group() -> None:
    def groups(sizes: list[int], spare: int = 64, most: int = 2048, percent: int = 0) -> list[tuple[int, int]]:
        return group(sizes, 0, len(sizes), Grouping(spare, most, 2048, percent))

    assert groups([8] * 16, spare=1) == [(0, 16)]
    assert groups([128] * 32) == [(0, 16), (16, 16)]  # 2,048 rows each
    assert groups([1024] * 4) == [(0, 2), (2, 2)]
    assert groups([1500] * 4) == [(index, 1) for index in range(4)]
    assert groups([8, 8, 8, 900]) == [(0, 2), (2, 1), (3, 1)]
    assert groups([100, 140, 0, 0, 100]) == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert groups([16, 8, 24, 16], most=16) == [(0, 2), (2, 1), (3, 1)]
    assert groups([200, 160, 200, 120], spare=0) == [(index, 1) for index in range(4)]
    assert groups([200, 160, 200, 120], spare=0, percent=20) == [(0, 4)]
    assert groups([200, 160, 200, 100], spare=0, percent=20) == [(0, 2), (2, 1), (3, 1)]


def test_any_number_of_experts_keeps_its_order() -> None:
    for num_experts in (256, 257, 65537):
        assignments = assignments_of_tokens(torch.tensor([[num_experts - 1], [0]]))
        layout = permutation(assignments, num_experts)
        assert layout.order.tolist() == [1, 0]
        assert [each_group.size for each_group in layout.groups] == [1, *[0] * (num_experts - 2), 1]
