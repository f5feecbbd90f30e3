"""The exchange of rows against all experts in one process."""

import pytest

from tests.lab.parallel.ranks import on_ranks


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_process_and_a_token_is_sent_once_to_each_rank(count: int) -> None:
    """Experts and BASE experts, gated or not, k 1 to 8, padding, a rank without tokens, no tokens, chosen pairs."""
    found = on_ranks("exchange", count)
    assert max(rank["worst"] for rank in found) < 1e-12
    sent = sum(rank["sent"] for rank in found)
    assert sent == sum(rank["expected"] for rank in found) < sum(rank["assigned"] for rank in found)


def test_rows_travel_in_the_dtype_of_autocast() -> None:
    """Weights in float32; rows and outputs in bf16, as the experts compute them."""
    for rank in on_ranks("half_exchange", 2):
        assert rank["travelled"] == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
        assert rank["worst"] < 0.02
