"""The trainers and engines that are installed: what `check_trainer` finds of them."""

from __future__ import annotations

import pytest

from pointsman.testing.trainers.case import Setting, Trainer
from pointsman.testing.trainers.check import verdicts
from pointsman.testing.trainers.lines import LINES, judged
from pointsman_lab.checks import find_trainer, installed

QUICK = [line for line in LINES if line not in ("compiled", "ranks")]
WRONG: dict[str, set[str]] = {
    "accelerate": {"top-k", "per layer", "router in float32"},
    "lightning": {"top-k", "per layer", "router in float32"},
    "trainer": {"accumulation", "top-k", "per layer", "resume", "router in float32"},
    "megatron": set(),
    "megatron-global": set(),
    "megatron-per-token": set(),
    "nemo": {"router in float32"},
    "nemo-sigmoid": {"top-k", "router in float32"},
    "olmo_core": {"padding"},
    "torchtitan": {"router in float32"},
}
"""Lines that do not hold for a trainer with its own balance."""
OF_THE_LAYER = {"trainer": {"resume"}, "olmo_core": {"padding"}, "torchtitan": {"padding"}}
"""Lines that do not hold with ours either: layers that are not told what padding is, experts that are not resumed."""

OWN_ONLY = ("megatron-global", "megatron-per-token", "nemo-sigmoid")


def trainer(name: str) -> Trainer:
    if lacks := installed(name):
        pytest.skip(f"{lacks} is not installed")
    return find_trainer(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_by_default(name: str) -> None:
    found = [judged(line, trainer(name), Setting()) for line in QUICK]
    wrong = {one.line for one in found if one.holds is False}
    assert wrong == WRONG[name], found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", *(name for name in WRONG if name not in OWN_ONLY), "pointsman"])
def test_ours_is_right_in_it(name: str) -> None:
    found = [judged(line, trainer(name), Setting(balance="pointsman")) for line in QUICK]
    wrong = {one.line for one in found if one.holds is False} - {"router in float32"}
    assert wrong == OF_THE_LAYER.get(name, set()), found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("megatron", 1), ("megatron-global", 0.5), ("megatron-per-token", 0.5)])
def test_losses_of_megatron_on_two_ranks(name: str, factor: float) -> None:
    """Megatron-LM#3768, #5007, which 0.16 does not have: a coefficient divided by the number of ranks."""
    reference = f"pointsman_lab.checks.nvidia:{type(trainer(name)).__name__}"
    found = next(iter(verdicts(reference, lines=["ranks"])))
    assert (found.holds, found.told) == (factor == 1, f"x {factor} on 2 processes")
