"""Every choice of experts of each token in the last layer, beside the router's own: exact counterfactual routing.

python -m tools.routes GRID FILE [ROW...]     # of the runs with weights of a comparison (all rows) into FILE (JSON)

No token reads another's experts after the last layer, so a token's loss with each choice of k experts there is exact: a
pass over the text for each choice. After "When Are Experts Misrouted?" (arXiv 2605.07260), which draws some choices.

The paper sorts tokens by their loss on the router's own route. Whatever is compared must not sort: a large loss on the
own route, or on the others, would then be found where it was looked for. So a model sorts that is neither: the
comparison's first row without a router, of the same seed.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pointsman import record_routing, replay_routing, set_top_k
from pointsman._errors import RunError
from pointsman.control import routers_by_layer
from pointsman.routers.frame.registry import BASELINES
from pointsman_lab._files import write_whole
from pointsman_lab._grid import Grid
from pointsman_lab.report.cell import Cell
from pointsman_lab.runs.comparison import required_plan, saved_runs
from pointsman_lab.runs.paths import run_path
from pointsman_lab.tasks.language_modelling.task import corpus_of
from pointsman_lab.training.run import Run, load_run

TOKENS, LENGTH, PARTS, MOST, SAME = 16_384, 128, 4, 1000, 1e-3
KINDS = ("own", "mean", "best")
GROUPS = {"all": slice(None), "easiest": slice(0, 1), "hardest": slice(PARTS - 1, None)}


@torch.no_grad()
def bits(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """[tokens] float64: of the tokens of inputs and targets [B, T]."""
    loss: Tensor = model(inputs, targets, reduction="none").loss
    return loss.double().flatten() / math.log(2)


def losses(model: Any, inputs: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Bits of each token on the router's own route [tokens], and on every choice of k experts [choices, tokens].

    Args:
        inputs, targets: [B, T] int64.
        k: experts a token, everywhere.

    Raises:
        RunError: the choices are not all that k allows, or too many, or the experts of one token change another's loss.
    """
    name, router = list(routers_by_layer(model).items())[-1]
    number = router.num_experts
    if k == number or math.comb(number, k) > MOST:
        raise RunError(f"{k} of {number} experts: 2 to {MOST:,} choices are expected, not {math.comb(number, k):,}")
    choices = [torch.tensor(one) for one in combinations(range(number), k)]
    with set_top_k(model, k):
        with record_routing(model) as records:
            own = bits(model, inputs, targets)
        chosen = records[name].chosen
        if chosen.shape[1] != k or bool(((chosen < 0) | (chosen >= number)).any()):
            raise RunError(f"{name} has tokens with other than {k} of its {number} experts: no route has their cost")
        changed = chosen.clone()
        changed[0] = next(one for one in choices if not torch.equal(one, chosen[0].sort().values))
        with replay_routing(model, {name: changed}):
            if bool(((bits(model, inputs, targets) - own)[1:].abs() > SAME).any()):
                raise RunError(f"{name}: the experts of one token change another's loss, or the router draws")
        every = []
        for one in choices:
            with replay_routing(model, {name: one.expand(inputs.numel(), k)}):
                every.append(bits(model, inputs, targets))
    return own, torch.stack(every)


def summary(own: Tensor, every: Tensor, difficulty: Tensor) -> dict[str, dict[str, float]]:
    """Group of tokens -> mean bits of the router's own route, of all routes, and of each token's best one.

    Args:
        own, every: as of `losses`.
        difficulty: [tokens], by which they are sorted.
    """
    parts = difficulty.argsort().chunk(PARTS)
    found = {}
    for group, of in GROUPS.items():
        at = torch.cat(parts[of])
        values = own[at].mean(), every[:, at].mean(), every[:, at].amin(0).mean()
        found[group] = dict(zip(KINDS, map(float, values), strict=True))
    return found


def text_of(run: Run) -> tuple[Tensor, Tensor]:
    """Inputs and targets: the first `TOKENS` of the test text in rows of `LENGTH`, each without what is before it."""
    text = corpus_of(run).split("test")[: TOKENS + 1]
    ids = torch.from_numpy(text.astype("int64"))
    if len(ids) <= TOKENS:
        raise RunError(f"{run.path}: its test text has {len(ids):,} tokens; {TOKENS + 1:,} are expected")
    return ids[:-1].view(-1, LENGTH), ids[1:].view(-1, LENGTH)


def measured(grid: Path, rows: Sequence[str] = ()) -> dict[str, dict[str, list[float]]]:
    """{"bits": {"ROW, KIND, GROUP": [one a seed]}}: the shape that claims.toml's `losses` reads."""
    plan = required_plan(grid)
    dense = next((router for router in plan["routers"] if router in BASELINES), None)
    wanted = list(rows) or [router for router in plan["routers"] if router not in BASELINES]
    if dense is None or not wanted or BASELINES.keys() & set(wanted):
        raise RunError(f"{grid}: rows with a router are measured, and one without sorts the tokens: both are expected")
    runs: dict[str, list[Run]] = {}
    for router, seed in saved_runs(grid, plan, print, [dense, *wanted]):
        run = load_run(run_path(grid, router, seed))
        if run.step < run.config.steps:
            raise RunError(f"{run.path} has not ended: train it first")
        runs.setdefault(router, []).append(run)
    sorting = runs.pop(dense, [])
    for router in wanted:
        if [run.config.seed for run in runs.get(router, [])] != [run.config.seed for run in sorting]:
            raise RunError(f"{grid}: {router} and {dense} have runs of other seeds: train what is missing")
    inputs, targets = text_of(sorting[0])
    difficulties = [bits(run.model, inputs, targets) for run in sorting]
    found: dict[str, list[float]] = {}
    for router in wanted:
        for run, difficulty in zip(runs[router], difficulties, strict=True):
            print(f"{router}, seed {run.config.seed}", file=sys.stderr)
            try:
                own, every = losses(run.model, inputs, targets, run.last_top_k)
            except (RunError, ValueError) as error:
                raise RunError(f"{router}: {error}; name the other rows") from None
            for group, values in summary(own, every, difficulty).items():
                for kind, value in values.items():
                    found.setdefault(f"{router}, {kind}, {group}", []).append(round(value, 6))
    return {"bits": found}


def table(found: Mapping[str, list[float]]) -> str:
    """Own and best route minus the mean of all, by row and group."""
    lines = []
    for row in dict.fromkeys(name.rsplit(", ", 2)[0] for name in found):
        cells = []
        for group in GROUPS:
            mean = found[f"{row}, mean, {group}"]
            for kind in ("own", "best"):
                gaps = [one - other for one, other in zip(found[f"{row}, {kind}, {group}"], mean, strict=True)]
                cells.append(Cell(dict(enumerate(gaps))).text(3))
        lines.append([row, *cells])
    header = ["bits minus the mean route", *(f"{kind}, {group}" for group in GROUPS for kind in ("own", "best"))]
    return Grid(header, lines, labels=1).text()


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case [*_, word] if word in ("-h", "--help"):
                print(__doc__)
            case [grid, file, *rows]:
                result = measured(Path(grid), rows)
                write_whole(Path(file), json.dumps(result) + "\n")
                print(table(result["bits"]))
            case _:
                raise RunError(str(__doc__))
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
