"""Models against peers: every case once."""

import pytest

from tools.bench import models


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", models.CASES)
def test_a_case(case: str) -> None:
    pytest.importorskip("transformers")
    for grid in models.CASES[case](1):
        assert len(grid.rows) >= 2
        assert "nan" not in grid.markdown()
