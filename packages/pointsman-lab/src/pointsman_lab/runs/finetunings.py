"""The fine-tunings of one run, read from their metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pointsman_lab.runs.paths import finetuned_runs
from pointsman_lab.runs.record import read_run


def finetunings_of(run: Path) -> dict[str, Any]:
    """Inter-run consistency of the fine-tunings of one run (X-MoE, 4.5), by variant, where there are two or more.

    Returns:
        {variant: {"runs", "window": batches whose loads are summed, "layers": {layer: [{"step", "runs",
        "with_diagonal", "without_diagonal"}]}}}; variants whose runs have no window are left out.
    """
    from pointsman.diagnostics.diagnose import consistency_over_training, window_of  # they import torch

    by_variant: dict[str, list[Path]] = {}
    for path in finetuned_runs(run):
        by_variant.setdefault(path.parent.name, []).append(path)
    found = {}
    for variant, paths in by_variant.items():
        done = [one for path in paths if (one := read_run(path)).done]
        if len(done) > 1 and not variant.endswith(",from-scratch"):
            window = window_of(min(one.steps or 0 for one in done))
            layers = consistency_over_training([one.metrics("routing") for one in done], window)
            if layers:
                found[variant] = {"runs": len(done), "window": window, "layers": layers}
    return found
