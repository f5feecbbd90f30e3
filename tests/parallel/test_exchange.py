"""The exchange of rows against all experts in one process."""

from pathlib import Path

import pytest
from tests.parallel.ranks import on_ranks


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_process(count: int, tmp_path: Path) -> None:
    """Experts and BASE experts, gated or not, k 1 to 8, padding, a rank without tokens, no tokens, chosen pairs."""
    found = on_ranks("exchange", count, tmp_path)
    assert max(rank["worst"] for rank in found) < 1e-12


def test_a_token_is_sent_once_to_each_rank(tmp_path: Path) -> None:
    found = on_ranks("exchange", 2, tmp_path)
    assert sum(rank["sent"] for rank in found) == sum(rank["expected"] for rank in found)
    assert sum(rank["sent"] for rank in found) < sum(rank["assigned"] for rank in found)
