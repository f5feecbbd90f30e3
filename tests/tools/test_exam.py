"""The exam's page: rank correlation against scipy, and sentences that follow from figures."""

import itertools
from pathlib import Path

import pytest

from pointsman_lab.exam.card import Card
from tests.lab.report.fixtures import quality, write_comparison
from tools.exam import DRAWS, ROOT, correlations, results, spearman, text


@pytest.mark.parametrize(
    "pairs", [[(1, 2), (2, 1), (3, 5), (4, 4)], [(1, 1), (1, 2), (2, 2), (5, 0)], [(0, 1), (1, 2), (2, 3)]]
)
def test_rank_correlation_is_that_of_scipy(pairs: list[tuple[float, float]]) -> None:
    from scipy.stats import spearmanr

    assert spearman(pairs) == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)


def test_a_constant_side_correlates_with_nothing() -> None:
    assert spearman([(1, 1), (1, 2), (1, 3)]) == 0


def test_the_page_says_what_the_figures_say() -> None:
    values = {"oracle": 0.0, "plain": 1.0, "smoe": 0.2, "xmoe": 0.5, "hash": 1.1, "switch": 1.2}
    cells = {("clusters", row): {"runs": {str(seed): {"value": value + 0.001 * seed * (row == "smoe"), "ami": 0.9}
                                          for seed in range(8)}}
             for row, value in values.items()}  # fmt: skip
    cells["clusters", "soft"] = {"refused": "soft: every token uses all experts", "runs": {}}
    page = text(cells, ["clusters"], [*values, "soft"], {"models": dict.fromkeys(values, 1.0)})
    assert page.splitlines()[2].startswith("0 of 0 pairs of a task and a comparison")
    assert "- `clusters`: `smoe` with 0.80 ± 0.00 (mutual information 0.900). Worse: 2 of the 2 others." in page
    assert "| `soft` | refused |" in page
    assert "Too few routers are in both" in page


def test_the_interval_of_a_correlation_leaves_out_a_fortieth_of_the_draws_at_each_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"oracle": 0.0, "plain": 1.0, "smoe": 0.2, "xmoe": 0.5, "switch": 0.6, "relu": 0.7, "top-p": 0.8}
    cells = {("clusters", row): {"runs": {"0": {"value": value}}} for row, value in values.items()}
    numbers = itertools.count()
    monkeypatch.setattr("tools.exam.spearman", lambda pairs: float(next(numbers)))
    card = Card(["clusters"], cells, list(values))
    [(*_, low_to_high, count, apart)] = correlations(card, {"models": dict.fromkeys(values, 1.0)})
    assert (low_to_high, count, apart) == ((DRAWS / 40, DRAWS * 39 / 40 - 1), 5, True)


def test_figures_at_two_experts_count(tmp_path: Path) -> None:
    write_comparison(tmp_path / "both", ("smoe",), (0,), top_k=(1, 2))
    write_comparison(tmp_path / "other", ("smoe",), (0,), top_k=(1, 4))
    one, two, four = (quality("smoe", k, 0) for k in (1, 2, 4))
    assert results(tmp_path) == {"both": {"smoe": -two}, "other": {"smoe": pytest.approx(-(one + four) / 2)}}


@pytest.mark.slow
def test_figures_of_trained_models_are_found() -> None:
    found = results(ROOT / "records")
    assert found["enwik8-tiny"]["smoe"] < 0
    assert found["cifar10-10k-tiny-vit"]["smoe"] > 0
    assert {"smoe:balance=0.01", "smoe+similarity:source=input"} <= found["main-k2"].keys(), "whatever was tuned"
