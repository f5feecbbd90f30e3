"""Results of `pointsman diagnose` for the page: a grid of all layers, and figures at earlier checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman._grid import NONE, Grid
from pointsman._values import finite
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import DIAGNOSTICS
from pointsman_lab.runs.record import read_object

Found = Mapping[str, Any]


def diagnosis_of(comparison: Comparison, router: str) -> dict[str, Any]:
    """diagnostics.json of the router's first run that has one, else the comparison's entry for it, else {}."""
    for run in comparison.of(router):
        if "layers" in (found := run.diagnostics):
            return found
    if comparison.planned:
        found = read_object(comparison.path / DIAGNOSTICS).get("routers", {}).get(router, {})
        return found if isinstance(found, dict) else {}
    return {}


def diagnosis_grid(comparison: Comparison) -> Grid:
    """Router, layer and figures of all diagnosed routers, without empty columns; the caption is their protocols."""
    from pointsman.diagnostics.summary import COLUMNS

    rows: list[list[str]] = []
    protocols: dict[str, None] = {}
    for router in comparison.routers:
        found = diagnosis_of(comparison, router)
        for name, layer in found.get("layers", {}).items():
            moved = _last_fluctuation(found, name)
            consistency = finite((found.get("consistency", {}).get(name) or {}).get("without_diagonal"))
            figures = [cell(layer) for _, cell in COLUMNS]
            figures += [NONE if value is None else f"{value:.3f}" for value in (moved, consistency)]
            rows.append([router, name, *figures])
        if protocol := found.get("protocol"):
            read = f"{int(protocol['tokens']):,} tokens of {protocol['split']}" if "tokens" in protocol else "tokens"
            protocols[f"{read}, k = {protocol.get('top_k', NONE)}"] = None
    header = ["router", "layer", *(name for name, _ in COLUMNS), "fluctuation", "IC over seeds"]
    return Grid(header, rows, caption="; ".join(protocols)).without_empty_columns(keep=2)


def _last_fluctuation(found: Found, layer: str) -> float | None:
    history = found.get("history") or []
    return _top1(history[-1], layer) if history else None


def _top1(entry: Found, layer: str) -> float | None:
    return finite((entry["layers"].get(layer, {}).get("fluctuation") or {}).get("top1"))


def history_of(diagnosis: Found, sample: Found) -> list[dict[str, Any]]:
    """[{"step", "layers": {name: {"collapse", "top1"}}}], oldest checkpoint first.

    top1: share of tokens whose first expert changed since the previous checkpoint. From a diagnosis with earlier
    checkpoints, which reads more tokens, else from the explorer's sample.
    """
    entries = list(diagnosis.get("history") or [])
    sampled = list(sample.get("history", {}).get("checkpoints", []))
    if (sampled and not entries) or not diagnosis:
        return sampled
    line = [*((str(entry["checkpoint"]), entry["layers"]) for entry in entries)]
    line.append((f"step-{diagnosis.get('source', {}).get('step', '')}", diagnosis["layers"]))
    found = []
    for place, (label, layers) in enumerate(line):
        step = label.rpartition("-")[2]
        if step.isdigit():
            values = {
                name: {
                    "collapse": finite((layer.get("collapse") or {}).get("value")),
                    "top1": _top1(entries[place - 1], name) if place else None,
                }
                for name, layer in layers.items()
            }
            found.append({"step": int(step), "layers": values})
    return found
