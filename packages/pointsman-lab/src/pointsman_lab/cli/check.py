"""`pointsman check TRAINER`: what a trainer really does to the router, a verdict a line; `all` makes the matrix."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import write_whole
from pointsman_lab.cli.options import Parser
from pointsman_lab.cli.options import words as names_of

if TYPE_CHECKING:
    from pointsman.testing.trainers.lines import Verdict

EPILOG = """examples:
  pointsman check trainer
  pointsman check trainer --balance pointsman
  pointsman check my_loop.py:step
  pointsman check all --out check

TRAINER is
{trainers};
all; or a step of your own, FILE.py:function, called as step(model, batches):
one optimizer step on a list of micro-batches.
Exit code 1: a line does not hold.
"""


def parser() -> Parser:
    from pointsman_lab.checks import TRAINERS

    names = ", ".join(TRAINERS)
    told = "Say what a trainer does to the router of a tiny mixture of experts, beside float64."
    flags = Parser("check", told, EPILOG.format(trainers=textwrap.fill(names, 78)))
    flags.add("trainer TRAINER", "a name, all, or FILE.py:function")
    told = "own (of the class or engine), pointsman (hf.balance, a router of ours), or both, with a comma "
    flags.add("--balance WHOSE", f"{told}(default: own; of all: both)", type=names_of)
    flags.add("--lines A,B", "only these lines", type=names_of)
    flags.common("a folder for the verdicts, as check.json and check.md", settings="")
    flags.only_cpu = "checks run on a CPU"
    return flags


def run(words: Sequence[str]) -> int:
    values = parser().read(words)
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")
    from pointsman.testing.trainers.check import BALANCES
    from pointsman_lab.checks import TRAINERS, find_trainer, installed

    asked = values.balance or (["own", "pointsman"] if values.trainer == "all" else ["own"])
    for one in asked:
        if one not in BALANCES:
            raise RunError(f"--balance {one!r}: {did_you_mean(one, BALANCES)}")
    names = list(TRAINERS) if values.trainer == "all" else [values.trainer]
    found: dict[tuple[str, str], list[Verdict]] = {}
    missing = []
    if values.trainer != "all":
        find_trainer(values.trainer)
    for name in names:
        if values.trainer == "all" and (lacks := installed(name)):
            missing.append(f"{name} ({lacks})")
            continue
        for balance in asked:
            found[name, balance] = list(_shown(name, balance, values.lines or ()))
    if missing:
        print(f"not installed: {', '.join(missing)}")
    if values.out:
        _write(values.out, found, missing)
    return int(any(one.holds is False for verdicts in found.values() for one in verdicts))


def _shown(name: str, balance: str, lines: Sequence[str]) -> Iterable[Verdict]:
    """The verdicts, each printed when it is there."""
    from pointsman.testing.trainers.check import verdicts
    from pointsman_lab.checks import find_trainer

    of_the_model = []
    print(f"{name}, balance: {balance}")
    for one in verdicts(name if ":" in name else find_trainer(name), balance, lines):
        head = f"  {one.line:<19} {'-' if one.holds is None else 'yes' if one.holds else 'NO':<4}"
        print(textwrap.fill(one.told, 80, initial_indent=head, subsequent_indent=" " * 26), flush=True)
        if one.holds is False and one.line in ("top-k", "per layer") and ":" in name and balance == "own":
            of_the_model.append(one.line)
        yield one
    if of_the_model:
        print(f"{' and '.join(of_the_model)}: of Mixtral's own loss, not of your step; see --balance pointsman")


def _write(folder: Any, found: Mapping[tuple[str, str], Sequence[Verdict]], missing: Sequence[str]) -> None:
    from pointsman_lab.checks import matrix

    rows = [
        {"trainer": name, "balance": balance, "line": one.line, "holds": one.holds, "told": one.told}
        for (name, balance), verdicts in found.items()
        for one in verdicts
    ]
    write_whole(folder / "check.json", json.dumps(rows, indent=1) + "\n")
    write_whole(folder / "check.md", matrix(found, missing))
