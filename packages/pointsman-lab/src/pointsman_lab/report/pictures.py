"""pictures.json as the page's data; `picture_samples` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman_lab.report.series import short_layer
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import CHECKPOINTS, PICTURES
from pointsman_lab.runs.record import RunRecord, read_object

FORMAT = 1


def is_current(run: RunRecord) -> bool:
    """Whether the pictures are of the checkpoint of the run's evaluation, or cannot be made anew."""
    found = read_object(run.path / PICTURES)
    if found.get("format") != FORMAT:
        return not (run.path / CHECKPOINTS).is_dir()
    return found.get("checkpoint") == run.evaluation.get("checkpoint") or not (run.path / CHECKPOINTS).is_dir()


def pictures(comparison: Comparison) -> dict[str, Any]:
    """The data of the page's section on images: those of each router's first run that has any; {} without.

    Returns:
        {"sets": [{"images", "names"}], "routers": [{"name", "seed", "set", "topK", "k", "experts", "grid", "layers",
        "first", "found", "best", "sampled", "loads": {k: {layer: [share of each expert]}}}]}.
    """
    sets: list[dict[str, Any]] = []
    routers = []
    for router in comparison.routers:
        for run in comparison.of(router):
            found = read_object(run.path / PICTURES)
            if found.get("format") != FORMAT:
                continue
            classes = found["classes"]
            shown = {"images": found["images"], "names": [classes[label] for label in found["labels"]]}
            if shown not in sets:
                sets.append(shown)
            routers.append({
                "name": router, "seed": run.seed, "set": sets.index(shown), "topK": found["top_k"],
                "k": found["trained_k"], "experts": found["num_experts"], "grid": found["grid"],
                "layers": [[name, short_layer(name)] for name in found["layers"]], "first": found["first"],
                "found": {k: [classes[label] for label in labels] for k, labels in found["found"].items()},
                "best": found["best"], "sampled": found["sampled"], "loads": loads(run),
            })  # fmt: skip
            break
    return {"sets": sets, "routers": routers} if routers else {}


def loads(run: RunRecord) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """k -> layer -> share of the assignments that each expert takes on the whole evaluated part."""
    return {
        str(k): {name: layer["load"] for name, layer in (row.get("routers") or {}).items() if layer.get("load")}
        for k, row in run.results().items()
    }
