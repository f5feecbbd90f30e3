"""Trainers of others, for `pointsman check`: by name, whether they are installed, and the matrix of all.

The lines and their oracles are the library's (`pointsman.testing.trainers`). `loops.py` and `others.py` train models of
transformers; `layers.py`, `engines.py` and `nvidia.py` a tiny model of an engine's own layers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from pointsman._errors import did_you_mean

if TYPE_CHECKING:
    from pointsman.testing.trainers.case import Trainer
    from pointsman.testing.trainers.lines import Verdict

TRAINERS = {
    "loop": "loops:Loop",
    "accelerate": "loops:Accelerate",
    "trainer": "loops:TransformersTrainer",
    "trl": "others:Trl",
    "peft": "others:Peft",
    "lightning": "others:Lightning",
    "deepspeed": "others:DeepSpeed",
    "pointsman": "layers:Pointsman",
    "megatron": "nvidia:Megatron",
    "megatron-global": "nvidia:MegatronGlobal",
    "megatron-per-token": "nvidia:MegatronPerToken",
    "nemo": "nvidia:Nemo",
    "nemo-sigmoid": "nvidia:NemoSigmoid",
    "olmo_core": "engines:OlmoCore",
    "torchtitan": "engines:Torchtitan",
}
"""Trainer -> its file and class in this folder."""
HEAD = """# What trainers do to a router

Made on {date} by `pointsman check all --out DIR`, on a CPU, with
{versions}.

Each line is held against float64 on tiny models ([what the lines mean](trainers.md)). "yes": the line holds; **no**:
it does not; "-": the trainer has no such thing; empty: the line was not run. "own" is the loss or bias of the model's
class or of the engine; "pointsman" is `pointsman.hf.balance`, or a router of ours in the engine's layer.
"""


def find_trainer(name: str) -> Trainer:
    """A trainer by its name, or `FILE.py:function` or `module:function`, a step of your own.

    Raises:
        ValueError: no such trainer, file or function.
        ImportError: its package is not installed.
    """
    from pointsman.testing.trainers import check

    if name not in TRAINERS and ":" not in name:
        raise ValueError(f"trainer {name!r}: {did_you_mean(name, [*TRAINERS, 'FILE.py:function'])}")
    found = check.find_trainer(f"{__name__}.{TRAINERS[name]}" if name in TRAINERS else name)
    for package in found.packages if name in TRAINERS else ():
        try:
            version(package)
        except PackageNotFoundError:
            raise ImportError(f"{name}: {package} is not installed", name=package) from None
    return found


def installed(name: str) -> str:
    """The first package of a trainer that is not installed; "" if all are."""
    try:
        find_trainer(name)
    except ImportError as error:
        return str(error.name)
    return ""


def matrix(found: Mapping[tuple[str, str], Sequence[Verdict]], missing: Sequence[str]) -> str:
    """The page: a table of trainers and lines, then what was found where a line does not hold or has no meaning."""
    from pointsman.testing.trainers.lines import LINES

    packages = sorted({package for name, _ in found for package in find_trainer(name).packages})
    said = textwrap.fill(", ".join(f"{package} {version(package)}" for package in packages), 119)
    marks = {True: "yes", False: "**no**", None: "-"}
    by_line = [{one.line: marks[one.holds] for one in verdicts} for verdicts in found.values()]
    columns = [line for line in LINES if any(line in row for row in by_line)]
    lines = ["| trainer | balance | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for (name, balance), row in zip(found, by_line, strict=True):
        lines.append(f"| {name} | {balance} | " + " | ".join(row.get(line, "") for line in columns) + " |")
    parts = [HEAD.format(date=datetime.now(UTC).date(), versions=said)]
    if missing:
        parts.append(f"Not installed: {', '.join(missing)}.\n")
    parts.append("\n".join(lines) + "\n")
    for (name, balance), verdicts in found.items():
        parts.append(f"## {name}, {balance}\n")
        parts.append("\n".join(f"- {one.line}: {marks[one.holds]}; {one.told}" for one in verdicts) + "\n")
    return "\n".join(parts)
