"""Inter-run consistency: whether runs with different seeds load the experts equally."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pointsman.diagnostics.base import number, table

WINDOW = 100


def inter_run_consistency(loads: Sequence[Tensor | Sequence[float]]) -> dict[str, Any]:
    """IC of m runs: the mean of the m x m matrix of Pearson correlations between their expert loads (X-MoE, 4.4).

    `with_diagonal` is the paper's figure, IC = sum_ij rho_ij / m^2; its diagonal alone adds 1/m. `without_diagonal` is
    the mean over i != j. A run with the same load on every expert has no correlation: it is not counted in `runs`, and
    `matrix` has None for it. Experts are compared by index, which is meaningful only for runs that start from the same
    weights, as in fine-tuning.

    Args:
        loads: m vectors [E], the number of tokens of each expert (in the paper: of 100 mini-batches).

    Raises:
        ValueError: runs with different numbers of experts.
    """
    rows = [torch.as_tensor(load, dtype=torch.float64).cpu() for load in loads]
    if len({row.shape for row in rows}) > 1:
        raise ValueError(f"inter_run_consistency: loads of {[len(row) for row in rows]} experts: must be equal")
    if not rows:
        return {"runs": 0, "with_diagonal": None, "without_diagonal": None, "matrix": []}
    stacked = torch.stack(rows)
    centred = stacked - stacked.mean(1, keepdim=True)
    norm = centred.norm(dim=1)
    kept = norm > 1e-12 * stacked.norm(dim=1)
    unit = centred / norm[:, None]
    matrix = (unit @ unit.T).clamp(-1, 1).fill_diagonal_(1.0).where(kept[:, None] & kept, torch.nan)
    used = matrix[kept][:, kept]
    m = len(used)
    return {
        "runs": m,
        "with_diagonal": number(used.mean()),
        "without_diagonal": number((used.sum() - m) / (m * (m - 1))) if m > 1 else None,
        "matrix": table(matrix),
    }


def window_of(steps: int) -> int:
    """Batches of a window: 100 as in the paper; of runs below 400 steps a quarter of them."""
    return max(1, min(WINDOW, steps // 4))


def gathered_loads(rows: Iterable[Mapping[str, Any]], window: int = WINDOW) -> dict[str, list[tuple[int, Tensor]]]:
    """Loads over training from a run's rows of metrics.jsonl: layer -> [(last step, tokens of each expert [E])].

    Rows are summed over windows of at least `window` batches; an incomplete last window is dropped.
    """
    done: dict[str, list[tuple[int, Tensor]]] = {}
    open_: dict[str, tuple[int, Tensor]] = {}
    for row in rows:
        if row.get("kind") != "routing" or any(share is None for share in row["load"]):
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


def consistency_over_training(
    runs: Sequence[Iterable[Mapping[str, Any]]], window: int = WINDOW
) -> dict[str, list[dict[str, Any]]]:
    """IC at every window of training: layer -> [{"step", "runs", "with_diagonal", "without_diagonal"}].

    Args:
        runs: the rows of metrics.jsonl of each run. Only steps and layers that occur in all runs are compared.
    """
    each = [{layer: dict(loads) for layer, loads in gathered_loads(rows, window).items()} for rows in runs]
    found: dict[str, list[dict[str, Any]]] = {}
    for layer in each[0] if each else ():
        for step in sorted(set.intersection(*(set(run.get(layer, ())) for run in each))):
            ic = inter_run_consistency([run[layer][step] for run in each])
            del ic["matrix"]
            found.setdefault(layer, []).append({"step": step, **ic})
    return found
