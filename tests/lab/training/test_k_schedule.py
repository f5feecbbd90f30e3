"""Schedules of k against the published transition points and an independent transcription of the released formulas."""

import math

import pytest

from pointsman_lab.training.k_schedule import SHAPES, TopKSchedule, doublings, parse_top_k

T = 400_000


def first_steps(schedule: TopKSchedule, stride: int = 1) -> dict[int, int]:
    """k -> the first step at which it is used."""
    found: dict[int, int] = {}
    for step in range(0, T + 1, stride):
        found.setdefault(schedule(step), step)
    return found


def test_the_scripts_schedule_changes_k_where_the_released_code_does() -> None:
    schedule = TopKSchedule(*parse_top_k("N/2:N", 16), T, "linear")
    found = first_steps(schedule)
    assert {k: round(step / 1000) for k, step in found.items()} == {
        8: 0, 9: 25, 10: 75, 11: 125, 12: 175, 13: 225, 14: 275, 15: 325, 16: 375,
    }  # fmt: skip
    assert schedule(25_000) == 8  # halves round to even, as Python's round does
    assert schedule(25_001) == 9
    assert schedule(75_000) == 10
    assert sum(schedule(step) for step in range(0, T, 100)) / (T / 100) == pytest.approx(12.0, abs=0.01)


def test_the_papers_schedule_from_two() -> None:
    schedule = TopKSchedule(*parse_top_k("2:N", 16), T, "linear")
    found = first_steps(schedule, 10)
    assert found[3] / 1000 == pytest.approx(14.3, abs=0.06)
    assert found[4] / 1000 == pytest.approx(42.9, abs=0.06)
    assert found[16] / 1000 == pytest.approx(385.7, abs=0.06)
    assert sum(schedule(step) for step in range(0, T, 100)) / (T / 100) == pytest.approx(9.0, abs=0.01)


@pytest.mark.parametrize(("low", "high"), [(8, 16), (2, 16), (1, 16), (3, 7)])
def test_against_the_released_formulas(low: int, high: int) -> None:
    linear, cosine, exponential = (TopKSchedule(low, high, T, shape) for shape in SHAPES[:3])
    for t in range(0, T, 997):
        assert linear(t) == min(max(round((high - low) * t / T) + low, low), high)
        assert cosine(t) == round((low - high) * math.cos(math.pi * t / (2 * T))) + high
        assert exponential(t) == round((low - high) * 0.99 ** math.floor(t / (T // 300))) + high


def test_multi_step_is_the_released_list_of_five() -> None:
    schedule = TopKSchedule(1, 16, 1000, "multi-step")
    assert [schedule(t) for t in (0, 199, 200, 399, 400, 600, 799, 800, 999, 1000)] == [1, 1, 2, 2, 4, 8, 8, 16, 16, 16]
    assert TopKSchedule(4, 8, 10, "multi-step")(4) == 4
    assert TopKSchedule(4, 8, 10, "multi-step")(5) == 8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("low", "high", "steps"), [(1, 1, 5), (1, 8, 1), (2, 5, 7), (4, 8, 299), (4, 8, 1200)])
def test_every_shape_grows_within_its_bounds_and_beyond_the_run_keeps_the_last(
    shape: str, low: int, high: int, steps: int
) -> None:
    schedule = TopKSchedule(low, high, steps, shape)
    values = [schedule(step) for step in range(steps + 1)]
    assert values[0] == low
    assert values == sorted(values)
    assert all(low <= value <= high for value in values)
    assert schedule(10 * steps) == values[-1]
    assert values[-1] == high or shape == "exponential"


@pytest.mark.parametrize(
    ("text", "experts", "expected"),
    [("2", 8, (2, 2)), ("2:N", 8, (2, 8)), ("N/2:N", 8, (4, 8)), ("N", 5, (5, 5)), ("N/2:N", 5, (2, 5)),
     ("1:3", 4, (1, 3)), ("N/4", 2, (1, 1))],
)  # fmt: skip
def test_what_train_top_k_means(text: str, experts: int, expected: tuple[int, int]) -> None:
    assert parse_top_k(text, experts) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "0:N", "17", "2:17", "N:2", "a", "2:4:8", "N/0", "N/00", "1.5", "-1", "2:", "2N", "n"]
)
def test_wrong_ones_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="train_top_k"):
        parse_top_k(text, 16)


def test_an_unknown_shape_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        TopKSchedule(*parse_top_k("2:N", 4), 10, "cosinus")


def test_doublings() -> None:
    assert doublings(1, 16) == (1, 2, 4, 8, 16)
    assert doublings(3, 7) == (3, 6, 7)
    assert doublings(4, 4) == (4,)
