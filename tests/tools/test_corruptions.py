"""The page of corruptions has a row for each, and the tool gives both codes the same random numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pointsman_lab.tasks.images.corruptions import CORRUPTIONS
from tools.corruptions import WHY, drawing_from, right_before_down

PAGE = Path(__file__).parents[2] / "docs" / "corruptions.md"


def test_the_page_has_every_corruption_and_a_reason_for_every_difference() -> None:
    rows = {line.split("`")[1]: line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert list(rows) == list(CORRUPTIONS)
    assert {name for name, row in rows.items() if int(row[1]) > 1} == set(WHY)


def test_their_draws_are_ours() -> None:
    mine, before = np.random.default_rng(3), np.random.uniform
    expected = mine.normal(size=4), mine.uniform(-1, 1, 3)
    with drawing_from(np.random.default_rng(3)):
        assert np.array_equal(np.random.normal(size=4), expected[0])  # noqa: NPY002
        assert np.array_equal(np.random.uniform(-1, 1, 3), expected[1])  # noqa: NPY002
    assert np.random.uniform is before
    draw, plain = right_before_down(np.random.default_rng(3)), np.random.default_rng(3)
    given = [draw(-1, 1, (2,)) for _ in range(3)]
    assert np.array_equal(np.array(given)[[0, 2, 1]], [plain.uniform(-1, 1, (2,)) for _ in range(3)])
