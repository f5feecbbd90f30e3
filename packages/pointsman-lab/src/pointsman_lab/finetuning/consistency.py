"""Inter-run consistency of the experts' loads over training (X-MoE, 4.5 and Figure 3b), and of a run's fine-tunings."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pointsman.diagnostics.statistics import inter_run_consistency
from pointsman_lab.runs.paths import finetuned_runs
from pointsman_lab.runs.record import read_run

WINDOW = 100  # batches, as in the paper

Rows = Iterable[Mapping[str, Any]]
"""Of metrics.jsonl."""


def gathered_loads(rows: Rows, window: int = WINDOW) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """Loads over training from a run's rows: layer -> [(last step, tokens of each expert [E])].

    Rows are summed over windows of at least `window` batches; an incomplete last window is dropped.
    """
    done: dict[str, list[tuple[int, torch.Tensor]]] = {}
    open_: dict[str, tuple[int, torch.Tensor]] = {}
    for row in rows:
        if row.get("kind") != "routing" or "layer" not in row or None in (row.get("load") or [None]):
            continue
        layer = row["layer"]
        load = torch.tensor(row["load"], dtype=torch.float64) * row.get("tokens", 1)
        batches, before = open_.pop(layer, (0, torch.zeros_like(load)))
        batches += row.get("batches", 1)
        if batches >= window:
            done.setdefault(layer, []).append((row["step"], before + load))
        else:
            open_[layer] = (batches, before + load)
    return done


def consistency_over_training(runs: Sequence[Rows], window: int = WINDOW) -> dict[str, list[dict[str, Any]]]:
    """IC at every window of training: layer -> [{"step", "runs", "with_diagonal", "without_diagonal"}].

    Only steps and layers that occur in all runs are compared.
    """
    each = [{layer: dict(loads) for layer, loads in gathered_loads(rows, window).items()} for rows in runs]
    found: dict[str, list[dict[str, Any]]] = {}
    for layer in each[0] if each else ():
        for step in sorted(set.intersection(*(set(run.get(layer, ())) for run in each))):
            ic = inter_run_consistency([run[layer][step] for run in each])
            del ic["matrix"]
            found.setdefault(layer, []).append({"step": step, **ic})
    return found


def finetunings_of(run: Path) -> dict[str, Any]:
    """Inter-run consistency of the fine-tunings of one run (X-MoE, 4.5), by variant, where there are two or more.

    Returns:
        {variant: {"runs", "window": batches whose loads are summed, "layers": {layer: [{"step", "runs",
        "with_diagonal", "without_diagonal"}]}}}; variants whose runs have no window are left out.
    """
    by_variant: dict[str, list[Path]] = {}
    for path in finetuned_runs(run):
        by_variant.setdefault(path.parent.name, []).append(path)
    found = {}
    for variant, paths in by_variant.items():
        done = [one for path in paths if (one := read_run(path)).done]
        if len(done) > 1 and "from-scratch" not in variant.split(","):
            window = max(1, min(WINDOW, min(one.steps or 0 for one in done) // 4))  # a quarter of runs below 400 steps
            layers = consistency_over_training([one.metrics("routing") for one in done], window)
            if layers:
                found[variant] = {"runs": len(done), "window": window, "layers": layers}
    return found
