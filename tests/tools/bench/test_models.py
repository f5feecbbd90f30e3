"""Models against peers: the table's arithmetic, and every case once."""

from __future__ import annotations

import pytest

from tools.bench import models


def test_a_ratio_is_paired_with_the_fastest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"ours": [1.0, 2.0, 1.0], "slow": [9.0, 9.0, 9.0], "fast": [2.0, 4.0, 2.0]}
    monkeypatch.setattr(models, "measured", lambda *_: times)
    grid = models.table("case", {}, 3, 10, "tokens", ["slow", "fast"])
    assert list(grid.header) == ["case", "tokens a second", "times fast"]
    assert [list(row) for row in grid.rows] == [["ours", "10", "2.00"], ["slow", "1", "0.22"], ["fast", "5", "1.00"]]


def test_calls_take_turns() -> None:
    seen: list[str] = []
    times = models.measured({name: (lambda name=name: seen.append(name)) for name in "abc"}, 2)
    assert "".join(seen[3:]) == "abcbca"
    assert {name: len(own) for name, own in times.items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", models.CASES)
def test_a_case(case: str) -> None:
    pytest.importorskip("transformers")
    for grid in models.CASES[case](1):
        assert len(grid.rows) >= 2
        assert "nan" not in grid.markdown()
