"""The plan: every slot has one row, rows are sorted by expert, padding is bounded."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.ops.dispatch import bucket, plan, rows_at_most, slots_of_pairs, slots_of_tokens


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
)
def test_every_slot_has_its_row(tokens: int, k: int, num_experts: int, dropped: bool, as_pairs: bool) -> None:
    torch.manual_seed(tokens)
    experts = torch.randint(num_experts, (tokens, k))
    if dropped:
        experts[torch.rand(tokens, k) < 0.4] = -1
    token = torch.arange(tokens).repeat_interleave(k)[experts.reshape(-1) >= 0]
    expert = experts[experts >= 0]
    if as_pairs:
        shuffled = torch.randperm(len(token))
        slots = slots_of_pairs(token[shuffled], expert[shuffled], tokens)
    else:
        slots = slots_of_tokens(experts)
    layout = plan(slots, num_experts)
    # every (token, expert) assignment once, in rows of that expert
    rows = torch.full((layout.total, 2), -1)
    row = layout.position[layout.order]
    rows[row] = torch.stack([layout.token, slots.expert[layout.order]], 1)
    assert sorted(rows[rows[:, 0] >= 0].tolist()) == sorted(torch.stack([token, expert], 1).tolist())
    for index, part in enumerate(layout.parts):
        mine = rows[part.rows]
        assert (mine[: part.size, 1] == index).all()
        assert (mine[part.size :, 0] == -1).all()
    assert layout.total <= rows_at_most(len(expert), num_experts)
    # combining a row's own token gives each token its number of assignments times itself
    values = torch.zeros(layout.total, 1).index_copy_(0, row, layout.token[:, None].float())
    expected = torch.bincount(token, minlength=tokens) * torch.arange(tokens)
    assert torch.equal(layout.combine(values, torch.ones(len(expert)))[:, 0], expected.float())
    hidden = torch.randn(tokens, 3)
    for part in layout.parts:
        if part.size:
            gathered = layout.gather(hidden, part)
            assert torch.equal(gathered[: part.size], hidden[layout.token[part.slots]])
            assert gathered[part.size :].abs().sum() == 0
            weight = torch.rand(len(expert))
            weighted = layout.gather(hidden, part, weight)
            assert torch.equal(weighted[: part.size], gathered[: part.size] * weight[part.slots, None])
            assert weighted[part.size :].abs().sum() == 0
