"""Verdicts from paired differences, held against R's documentation, published examples and simulations."""

import math

import numpy as np
import pytest
from scipy import special, stats

from tools.results.inference import ALPHA, Judged, Prior, inverse_trigamma, judge, smallest_effect, smallest_margin

SLEEP = [-1.2, -2.4, -1.3, -1.3, 0.0, -1.0, -1.8, -0.8, -4.6, -1.4]
"""Group 1 minus group 2 of R's data set `sleep` (Student 1908)."""


@pytest.fixture
def draws() -> np.random.Generator:
    """Of each test its own: one for all would depend on the tests before."""
    return np.random.default_rng(0)


def test_a_paired_test_is_that_of_r() -> None:
    # ?t.test: t.test(extra ~ group, data = sleep, paired = TRUE): t = -4.0621, df = 9, p-value = 0.002833
    test = Judged(SLEEP, margin=0.5).tested()
    assert test.mean / test.error == pytest.approx(-4.0621, abs=5e-5)
    assert test.p == pytest.approx(0.002833, abs=5e-7)
    assert (test.mean - test.half, test.mean + test.half) == pytest.approx((-2.4598858, -0.7001142), abs=5e-7)


def test_equivalence_is_the_larger_of_two_one_sided_tests() -> None:
    # the R package TOSTER on the same data with bounds of 0.5: the lower bound's t is -2.776, df = 9, p = 0.989
    test = Judged(SLEEP, margin=0.5).tested()
    assert test.p_equal == pytest.approx(0.989, abs=5e-4)
    one, other = (stats.ttest_1samp(SLEEP, bound, alternative=side).pvalue
                  for bound, side in ((-0.5, "greater"), (0.5, "less")))  # fmt: skip
    assert test.p_equal == pytest.approx(max(one, other), rel=1e-12)


def test_corrections_are_the_published_ones() -> None:
    # Benjamini and Hochberg 1995, section 4.1: of 15 p-values Holm's method rejects three, theirs four
    values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.324, 0.4262, 0.5719, 0.6528,
              0.759, 1.0]  # fmt: skip
    n = 10
    base = np.array([1.0, -1.0] * (n // 2))  # mean 0; with a shift the p-value is any that one wants
    tests = []
    for p in values:
        t = float(stats.t.isf(p / 2, n - 1))
        tests.append(Judged(list(base + t * base.std(ddof=1) / math.sqrt(n)), margin=0.0))
    assert [test.tested().p for test in tests] == pytest.approx(values, rel=1e-6)
    assert sum(test.p < ALPHA for test in judge(tests, "primary")) == 3
    assert sum(test.p < ALPHA for test in judge(tests, "exploratory")) == 4


def test_moderation_finds_the_prior_it_was_drawn_from() -> None:
    d, d0, s0 = 4, 8.0, 2.0
    variances = s0 * stats.f.rvs(d, d0, size=20_000, random_state=1)
    prior = Prior.of(list(variances), [d] * len(variances))
    assert prior.variance == pytest.approx(s0, rel=0.05)
    assert prior.freedom == pytest.approx(d0, rel=0.15)
    variance, freedom = prior.moderate(3.0, d)
    assert freedom == prior.freedom + d
    assert variance == pytest.approx((prior.freedom * prior.variance + d * 3.0) / freedom)


def test_the_prior_of_few_variances_by_hand() -> None:
    prior = Prior.of(variances := [0.1, 1.0, 10.0, 4.0], [3] * 4)
    logs = np.log(variances) - special.digamma(1.5) + np.log(1.5)
    assert special.polygamma(1, prior.freedom / 2) == pytest.approx(logs.var(ddof=1) - special.polygamma(1, 1.5))
    assert prior.moderate(1.0, 30)[1] == 12, "never more than all of them have together"


def test_variances_that_differ_by_chance_alone_are_pooled() -> None:
    prior = Prior.of([1.0, 1.1, 0.9, 1.0, 1.05], [4] * 5)
    assert math.isinf(prior.freedom)
    assert prior.moderate(3.0, 4) == (pytest.approx(1.01), 20), "their mean, and their degrees of freedom: limma"
    assert Prior.of([1.0, 2.0], [4, 4]) == Prior()


def test_inverse_trigamma() -> None:
    for x in (1e-3, 0.1, 1.0, 7.5, 400.0):
        assert inverse_trigamma(float(special.polygamma(1, x))) == pytest.approx(x, rel=1e-9)


def test_false_verdicts_are_as_rare_as_promised(draws: np.random.Generator) -> None:
    wrong = 0
    for _ in range(300):
        spreads = np.sqrt(stats.f.rvs(5, 8, size=6, random_state=draws))
        values = draws.normal(size=(6, 6)) * spreads[:, None]
        prior = Prior.of([float(v.var(ddof=1)) for v in values], [5] * 6)
        wrong += any(test.p < ALPHA for test in judge([Judged(list(v), 0.0, prior) for v in values], "primary"))
    assert wrong / 300 < 0.08  # 5 %, three standard errors and what estimating the prior costs


def test_the_smallest_effect_has_the_power_it_says(draws: np.random.Generator) -> None:
    n, alpha = 12, 0.01
    effect = smallest_effect(1.0, n, n - 1, alpha)
    values = draws.normal(effect, 1.0, size=(20_000, n))
    t = values.mean(1) * math.sqrt(n) / values.std(1, ddof=1)
    assert (t > stats.t.ppf(1 - alpha / 2, n - 1)).mean() == pytest.approx(0.8, abs=0.01)
    assert smallest_effect(1.0, n, math.inf, alpha) < effect


@pytest.mark.parametrize(
    ("mean", "expected", "verdict"),
    [(-1.0, "less", "holds"), (1.0, "less", "does not hold"), (-1.0, "more", "does not hold"), (1.0, "more", "holds"),
     (0.0, "less", "equivalent"), (0.0, "equal", "holds"), (1.0, "equal", "does not hold")],
)  # fmt: skip
def test_verdicts(mean: float, expected: str, verdict: str) -> None:
    values = [mean + x for x in (0.01, -0.01, 0.02, -0.02, 0.0, 0.0)]
    (test,) = judge([Judged(values, margin=0.1, expected=expected)], "primary")
    assert test.verdict == verdict


def test_undecided_says_how_many_more_seeds() -> None:
    (test,) = judge([Judged([1.2, -1.2] * 6, margin=0.5)], "primary")
    assert test.verdict == "undecided"
    assert test.smallest > 0.5
    seeds = 12 + test.more_seeds
    spread = test.spread[0]
    assert smallest_effect(spread, seeds, seeds - 1, test.alpha) <= 0.5
    assert smallest_effect(spread, seeds - 1, seeds - 2, test.alpha) > 0.5


def test_no_spread_is_decided_by_the_mean() -> None:
    assert judge([Judged([0.0, 0.0, 0.0], 0.1)], "primary")[0].verdict == "equivalent"
    assert judge([Judged([-1.0, -1.0, -1.0], 0.1)], "primary")[0].verdict == "holds"


def test_a_small_difference_is_no_difference_where_equality_was_claimed() -> None:
    inside, beyond = ([base + 1e-4 * one for one in (-1, 0, 1)] for base in (0.002, 0.05))
    for values, verdict in ((inside, "holds"), (beyond, "does not hold")):
        assert Judged(values, margin=0.01, expected="equal").tested().verdict == verdict
    assert Judged(inside, margin=0.01).tested().verdict == "does not hold", "it is more, however little"


def test_equality_fails_only_beyond_the_margin() -> None:
    for mean, verdict in ((0.0104, "undecided"), (0.02, "does not hold")):
        values = [mean + 1e-3 * one for one in (-1.5, -0.5, 0.5, 1.5)]
        test = Judged(values, margin=0.01, expected="equal").tested()
        assert test.verdict == verdict
        assert Judged(values, margin=0.01).tested().p < ALPHA, "it is no equality"
        sides = (stats.ttest_1samp(values, bound, alternative="greater").pvalue for bound in (0.01, -0.01))
        assert test.p == pytest.approx(sum(sides), rel=1e-9)


def test_equality_is_denied_as_rarely_as_promised(draws: np.random.Generator) -> None:
    """At a margin that is small beside the spread, too, where the difference can err to either side."""
    denied = [
        Judged(list(0.1 + draws.normal(size=6)), margin=0.1, expected="equal").tested().p < ALPHA for _ in range(2000)
    ]
    assert sum(denied) / 2000 < 0.065


def test_the_smallest_margin_has_the_power_it_says(draws: np.random.Generator) -> None:
    n, alpha = 12, 0.01
    margin = smallest_margin(1.0, n, n - 1, alpha)
    values = draws.normal(0.0, 1.0, size=(20_000, n))
    error = values.std(1, ddof=1) / math.sqrt(n)
    shown = (margin - np.abs(values.mean(1))) / error > stats.t.ppf(1 - alpha, n - 1)
    assert shown.mean() == pytest.approx(0.8, abs=0.03)
    one = Judged([0.5, -0.5] * 6, margin=0.1, expected="equal").tested()
    assert one.verdict == "undecided"
    assert one.smallest > smallest_margin(one.spread[0], 12 + one.more_seeds, 11 + one.more_seeds, ALPHA)


def test_three_seeds_in_a_family_of_many_have_a_smallest_difference() -> None:
    [one, *_] = judge([Judged([0.1, -0.2, 0.15], 0.01)] * 80, "exploratory")
    assert math.isfinite(one.smallest)
    assert one.smallest > 1


def test_claims_without_runs_count_in_their_family() -> None:
    [one] = judge([Judged(SLEEP, margin=0.5)], "primary", planned=6)
    assert one.p == pytest.approx(6 * 0.002833, abs=5e-6)
    assert one.alpha == pytest.approx(ALPHA / 6)
