"""The trainers and engines that are installed: what `check_trainer` finds of them."""

import inspect

import pytest

from pointsman.testing.trainers.case import Setting, Trainer
from pointsman.testing.trainers.check import verdicts
from pointsman.testing.trainers.lines import LINES, judged
from pointsman_lab.checks import find_trainer, installed
from pointsman_lab.checks.nvidia import Megatron, MegatronGlobal, MegatronPerToken, Nemo

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

OWN_ONLY = ("megatron-global", "nemo-sigmoid")


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


class MegatronContext(Megatron):
    context = True


class NemoContext(Nemo):
    context = True


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["own", "pointsman"])
@pytest.mark.parametrize("kind", [Megatron, MegatronGlobal, MegatronContext, MegatronPerToken, NemoContext])
def test_the_coefficient_on_two_ranks(kind: type[Trainer], balance: str) -> None:
    """Megatron-LM#3768, #5007, which 0.16 does not have: two of its own losses are divided by the number of ranks."""
    trainer(kind.name)
    found = next(iter(verdicts(f"{inspect.getsourcefile(kind)}:{kind.__name__}", balance, ["ranks"])))
    if kind is MegatronGlobal and balance == "pointsman":
        assert found.holds is None
        return
    wrong = balance == "own" and kind in (MegatronGlobal, MegatronPerToken)
    assert (found.holds, found.told) == (not wrong, f"x {0.5 if wrong else 1} on 2 processes")
