"""`compare --tune`: each row's settings by successive halving, on seeds that are not used for results."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.routers.frame.registry import parse_spec
from pointsman_lab._files import read_json, write_whole
from pointsman_lab._grid import NONE, Grid
from pointsman_lab.models.config import build_model
from pointsman_lab.runs.comparison import read_comparison, read_plan
from pointsman_lab.runs.paths import slug
from pointsman_lab.training.compare import Plan, merged
from pointsman_lab.training.config import settings as all_settings
from pointsman_lab.training.settings import without_effect

SEEDS = (1000, 1001, 1002)
"""The last round has all three, the others the first: its choices often differ by less than one choice's seeds do."""
SHARES = (4, 2, 1)
"""A round trains for one part in so many of the steps. After the first the better half of a row's choices goes on,
after the second at most four; the last has all steps, since fewer favour higher rates."""
SHARED = {"data", "batch_size", "accumulation", "segment_length", "seed", "steps", "model.router"}
"""Settings that all rows have in common, besides those of their task (how it reads data) and those without effect."""
ROUTER = "router_lr_scale"
CURVE = "tuning.json"
Choice = tuple[tuple[str, str], ...]


def choices(told: Sequence[str]) -> list[Choice]:
    """All combinations of `KEY=A,B,C` or `KEY=LOW..HIGH`, which doubles from LOW on."""
    columns = []
    for one in told:
        key, _, values = one.partition("=")
        ends = re.fullmatch(r"([^.,]+(?:\.\d+)?[^.,]*)\.\.(.+)", values)
        try:
            found = _doubled(*map(float, ends.groups())) if ends else [*map(str.strip, values.split(","))]
        except ValueError:
            found = []
        if not key or not all(found) or len({*found}) < max(2, len(found)):
            raise RunError(
                f"--tune {one!r}: allowed is KEY=A,B,C or KEY=LOW..HIGH with LOW above 0 and HIGH at least twice LOW"
            )
        columns.append([(key, value) for value in found])
    if len({column[0][0] for column in columns}) < len(columns):
        raise RunError("--tune: a key is given twice; name all its values in one")
    return list(product(*columns))


def _doubled(low: float, high: float) -> list[str]:
    if not 0 < low < high < math.inf:
        raise ValueError
    return [f"{low * 2**power:.12g}" for power in range(math.floor(math.log2(high / low) + 1e-9) + 1)]


def spec_of(row: str, choice: Choice) -> str:
    """The row with the choice's scale of the router's learning rate."""
    scale = dict(choice).get(ROUTER, "1")
    if float(scale) == 1:
        return row
    parts = (f"smoe+{part}" if parse_spec(part).mixer and "+" not in part else part for part in row.split("|"))
    return "|".join(re.sub(r"^[^+]+", rf"\g<0>:lr_scale={scale}", part) for part in parts)


def takes(row: str, choice: Choice, model: Any) -> bool:
    """Whether the row has what the choice changes: a router that learns, for another scale of its rate."""
    spec = spec_of(row, choice)
    try:
        if spec != row:
            with torch.device("meta"):
                build_model(replace(model, router=spec))
    except ValueError:
        return False
    return True


def tuned(
    plan: Plan,
    told: Sequence[str],
    out: Path,
    train: Callable[[Plan, Path], object],
    say: Callable[[str], None],
    lower_is_better: Callable[[str], bool],
    note: Callable[[str], None] = lambda _: None,
    title: Callable[[str], str] = str,
) -> Plan:
    """The plan with each row's settings; rows that the comparison in `out` has already keep theirs.

    The rounds are comparisons in `out`-tuning, which go on after an interruption; its tuning.json has every figure.
    What diverges is left behind.

    Args:
        train: trains a plan in a directory; runs that diverge have no result there.
        say: gets the table of each row's choices.
        lower_is_better: of a metric's name.
        note: told which rows keep settings that were not chosen among these.
        title: what a row is called in the tables.
    """
    if shared_seeds := sorted({*SEEDS} & {*plan.seeds}):
        raise RunError(f"--tune uses seed {shared_seeds[0]}, which is then no seed of a result: fewer --seeds")
    every, shared = choices(told), SHARED | plan.base.own.keys() | without_effect(plan.base.model.family)
    for scale in {dict(one).get(ROUTER, "1") for one in every}:
        try:
            number = float(scale)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise RunError(f"--tune {ROUTER}={scale}: allowed are numbers above 0")
    if common := [key for key, _ in every[0] if key in shared]:
        raise RunError(f"--tune {common[0]}: all rows share it; use --set or its flag")
    for one in every:  # a wrong value is told before the rounds
        plan.base.with_overrides({key: value for key, value in one if key != ROUTER})
    named = out if out.name not in ("", "..") else out.resolve()
    file = named.with_name(f"{named.name}-tuning") / CURVE
    before, told_before = read_plan(out) or {}, (read_json(file) or {}).get("curve", {})
    held = before.get("tuned", {})
    names = {row: row for row in before.get("routers", ())} | {one.get("row", name): name for name, one in held.items()}
    merged(replace(plan, routers=tuple(names.get(row, row) for row in plan.routers)), out)  # refused before the rounds
    rows = [row for row in plan.routers if row not in names]
    asked = {row: held.get(names.get(row, row), {}).get("row", row) for row in plan.routers}
    fitting = {row: [one for one in every if takes(asked[row], one, plan.base.model)] for row in plan.routers}
    tried = {row: told_before.get(asked[row], {}).keys() for row in plan.routers if row in names}
    if others := [row for row, of in tried.items() if not of or {_text(one) for one in fitting[row]} - of]:
        note(f"{', '.join(others)}: trained already, and so not tuned on these values")
    left = {row: fitting[row] for row in rows}
    if fixed := [row for row, of in left.items() if not of]:
        raise RunError(f"--tune {ROUTER}: {fixed[0]} has no router whose rate can be scaled; give 1 among its values")
    became = {spec: row for row, spec in names.items()}
    for row, of in left.items():
        for spec in (spec_of(row, one) for one in of):
            if (other := became.setdefault(spec, row)) != row:
                raise RunError(f"--tune {ROUTER}: {other} and {row} may both become {spec}; leave one of them out")
    curve: dict[str, dict[str, list[Any]]] = {row: {_text(one): [] for one in left[row]} for row in rows}
    k = plan.base.top_k_schedule.high
    for share in SHARES:
        steps, seeds = max(1, plan.base.steps // share), SEEDS if share == SHARES[-1] else SEEDS[:1]
        for choice in every:
            settings = {key: value for key, value in choice if key != ROUTER}
            base = plan.base.with_overrides({
                **settings, "steps": str(steps), "eval_top_k": str(k),
                **({"eval_split": "valid"} if "eval_split" in all_settings(plan.base.model.family) else {}),
            })  # fmt: skip
            specs = {row: spec_of(row, choice) for row in rows if choice in left[row]}
            if not specs:
                continue
            folder = file.with_name(f"{steps}-{slug(_text(choice))}")
            try:
                train(replace(plan, base=base, routers=tuple(specs.values()), seeds=seeds), folder)
            except RunError as error:
                raise RunError(f"--tune {_text(choice)}, {steps} steps: {error}") from None
            done = read_comparison(folder).runs
            for row, spec in specs.items():
                each = [done[spec, seed].results("valid").values() for seed in seeds]  # a dense row has its own k
                figures = [_value(result, lower_is_better) for results in each for result in results or [{}]]
                curve[row][_text(choice)].append(fmean(figures))
        for row, of in left.items():
            finite = [one for one in of if not math.isinf(curve[row][_text(one)][-1])]
            if not (best := sorted(finite, key=lambda one: curve[row][_text(one)][-1])):
                raise RunError(f"--tune: {row} diverged at every choice ({steps} steps): name lower learning rates")
            left[row] = best[: (max(2, math.ceil(len(of) / 2)), 4, 1)[SHARES.index(share)]]
    picked = {spec_of(row, of[0]): {"row": row, **dict(of[0])} for row, of in left.items()}
    if curve:
        kept = {row: values for row, values in told_before.items() if row in names}
        found: dict[str, Any] = {}
        for row, values in curve.items():  # JSON has no infinity
            found[row] = {text: [None if math.isinf(one) else one for one in each] for text, each in values.items()}
        write_whole(file, json.dumps({"seeds": SEEDS, "k": k, "curve": {**kept, **found}}) + "\n")
    for row, values in curve.items():
        say(_table(title(row), values, _text(left[row][0]), plan.base.steps))
    routers = dict.fromkeys(names.get(row) or spec_of(row, left[row][0]) for row in plan.routers)
    return replace(plan, routers=tuple(routers), tuned={**held, **picked})


def _value(result: Mapping[str, Any], lower_is_better: Callable[[str], bool]) -> float:
    if (value := result.get("value")) is None:
        return math.inf
    return float(value) if lower_is_better(result["metric"]) else -float(value)


def _text(choice: Choice) -> str:
    return " ".join(f"{key}={value}" for key, value in choice)


def _table(row: str, values: Mapping[str, Sequence[float]], best: str, steps: int) -> str:
    """The curve of a row; what was left out after a round has no figure in the next."""
    lines = []
    for text, found in values.items():
        figures = [NONE if math.isinf(one) else f"{abs(one):.4f}" for one in found]
        lines.append([text, *figures, *[NONE] * (len(SHARES) - len(found)), "chosen" * (text == best)])
    first = f"{row}, seed {SEEDS[0]} (last round: {SEEDS[0]} to {SEEDS[-1]})"
    header = [first, *(f"{max(1, steps // share)} steps" for share in SHARES), ""]
    return Grid(header, lines, labels=1).text() + edges(values, best)


def edges(values: Mapping[str, Sequence[float]], best: str) -> str:
    """A line for each setting whose chosen value is its least or largest: the best one may lie beyond it."""
    told = ""
    for key, value in (pair.split("=", 1) for pair in best.split()):
        of = [pair.split("=", 1)[1] for text in values for pair in text.split() if pair.startswith(f"{key}=")]
        numbers = {one: float(one) for one in of if re.fullmatch(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?", one)}
        tried = set(numbers.values())
        if value in numbers and len(tried) > 1 and numbers[value] in (min(tried), max(tried)):
            told += f"\n{key}={value} is at the edge of what was tried: the best value may lie beyond it"
    return told
