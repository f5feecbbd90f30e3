"""Every legal pair of scores and choice through the contract, at one small size; what is no pair says why in a line.

A function that scores for several names, and one that chooses for several, stand here once.
"""

import pytest

from pointsman.routers.frame.registry import ROUTERS
from pointsman.testing import CHECKS, Case
from pointsman.testing import layer as layers
from pointsman.testing import routing as checks

SCORES = list({(one.build, *sorted(one.defaults.items())): name for name, one in reversed(ROUTERS.items())}.values())
CHOICES = [*{one.choose: name for name, one in reversed(ROUTERS.items())}.values(), "mask:visible=2"]
COMPILING = (checks.compiles, layers.compiles_in_training, layers.trains_the_same_parameters)


def case(scores: str, choice: str) -> Case:
    return Case(f"{scores}@{choice}", dim=8, num_experts=4, length=9, must_show=False)


PAIRS = [
    pytest.param(
        scores, choice, marks=[] if "smoe" in (scores, choice) or (row + column) % 4 == 0 else pytest.mark.weekly
    )
    for row, scores in enumerate(SCORES)
    for column, choice in enumerate(CHOICES)
]
"""All; those with one half of `smoe` and each fourth of the others in every run, the rest weekly (`--all-specs`)."""


@pytest.mark.parametrize("scores", SCORES)
def test_what_is_no_pair_says_why(scores: str) -> None:
    for choice in CHOICES:
        try:
            case(scores, choice).router()
        except ValueError as refusal:
            told = str(refusal)
            assert "\n" not in told
            assert "needs" in told
            assert "gives" in told
            assert scores != choice, "a router's own halves fit"


@pytest.mark.slow
@pytest.mark.parametrize(("scores", "choice"), PAIRS)
def test_a_pair_keeps_the_contract(scores: str, choice: str) -> None:
    pair = case(scores, choice)
    try:
        pair.router()
    except ValueError:
        return
    for check in CHECKS:
        if check not in COMPILING:  # which mechanisms compile: `test_routers.COMPILED`
            check(pair)
