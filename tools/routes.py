"""Every route of equal cost of each token, beside the router's own: exact counterfactual routing.

python -m tools.routes GRID FILE     # of the runs with weights of a comparison, into FILE (JSON)

In the last sparse layer no token reads another's experts, so a token's loss with each choice of k experts is exact: one
pass over the text a choice. After "When Are Experts Misrouted?" (arXiv 2605.07260), which samples the choices. It sorts
tokens by their loss on the router's own route, which favours the others where that loss is large; here they are sorted
by the mean loss of all routes, which favours none.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pointsman import replay_routing, set_top_k
from pointsman._errors import RunError
from pointsman.control import routers_by_layer
from pointsman_lab._files import write_whole
from pointsman_lab._grid import Grid
from pointsman_lab.report.cell import Cell
from pointsman_lab.runs.comparison import required_plan, saved_runs
from pointsman_lab.runs.paths import run_path
from pointsman_lab.tasks.language_modelling.task import corpus_of
from pointsman_lab.training.run import Run, load_run

TOKENS, LENGTH, PARTS = 16_384, 128, 4
KINDS = ("own", "mean", "best")
GROUPS = {"all": slice(None), "easiest": slice(0, 1), "hardest": slice(PARTS - 1, None)}


@torch.no_grad()
def losses(model: Any, inputs: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Bits of each token on the router's own route [tokens], and on every choice of k experts [choices, tokens].

    Args:
        inputs, targets: [B, T] int64.
        k: experts a token, everywhere.
    """
    name, router = list(routers_by_layer(model).items())[-1]

    def bits() -> Tensor:
        loss: Tensor = model(inputs, targets, reduction="none").loss
        return loss.double().flatten() / math.log(2)

    with set_top_k(model, k):
        own = bits()
        every = []
        for choice in combinations(range(router.num_experts), k):
            with replay_routing(model, {name: torch.tensor(choice).expand(inputs.numel(), k)}):
                every.append(bits())
    return own, torch.stack(every)


def summary(own: Tensor, every: Tensor) -> dict[str, dict[str, float]]:
    """Group of tokens -> mean bits of the router's own route, of all routes, and of each token's best one.

    Args:
        own, every: as of `losses`.
    """
    parts = every.mean(0).argsort().chunk(PARTS)  # by difficulty
    found = {}
    for group, of in GROUPS.items():
        at = torch.cat(parts[of])
        values = own[at].mean(), every[:, at].mean(), every[:, at].amin(0).mean()
        found[group] = dict(zip(KINDS, map(float, values), strict=True))
    return found


def of_run(run: Run) -> dict[str, dict[str, float]]:
    """`summary` of the first `TOKENS` tokens of the test text, in rows of `LENGTH`, each without what is before it."""
    text = corpus_of(run).split("test")[: TOKENS + 1]
    ids = torch.from_numpy(text.astype("int64"))
    if len(ids) <= TOKENS:
        raise RunError(f"{run.path}: its test text has {len(ids):,} tokens; {TOKENS + 1:,} are expected")
    return summary(*losses(run.model, ids[:-1].view(-1, LENGTH), ids[1:].view(-1, LENGTH), run.last_top_k))


def measured(grid: Path) -> dict[str, dict[str, list[float]]]:
    """{"bits": {"ROW, KIND route, GROUP": [one a seed]}}: the shape that claims.toml's `losses` reads."""
    bits: dict[str, list[float]] = {}
    for router, seed in saved_runs(grid, required_plan(grid), print):
        run = load_run(run_path(grid, router, seed))
        if run.sparse:
            print(f"{router}, seed {seed}", file=sys.stderr)
            for group, values in of_run(run).items():
                for kind, value in values.items():
                    bits.setdefault(f"{router}, {kind}, {group}", []).append(round(value, 6))
    return {"bits": bits}


def table(bits: Mapping[str, list[float]]) -> str:
    """Own and best route minus the mean of all, by row and group."""
    lines = []
    for row in dict.fromkeys(name.rsplit(", ", 2)[0] for name in bits):
        cells = []
        for group in GROUPS:
            mean = bits[f"{row}, mean, {group}"]
            for kind in ("own", "best"):
                gaps = [one - other for one, other in zip(bits[f"{row}, {kind}, {group}"], mean, strict=True)]
                cells.append(Cell(dict(enumerate(gaps))).text(3))
        lines.append([row, *cells])
    header = ["bits minus the mean route", *(f"{kind}, {group}" for group in GROUPS for kind in ("own", "best"))]
    return Grid(header, lines, labels=1).text()


if __name__ == "__main__":
    try:
        grid, file = map(Path, sys.argv[1:])
        found = measured(grid)
        write_whole(file, json.dumps(found) + "\n")
        print(table(found["bits"]))
    except (RunError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
