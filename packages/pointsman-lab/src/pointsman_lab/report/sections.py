"""The page's section on fine-tunings: grids for the template, and under "chart" the data for the scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman._grid import NONE, Grid
from pointsman_lab.report import series
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.task_table import FROM_SCRATCH, ROUTING, ROUTING_KEYS, TaskTable, variants
from pointsman_lab.runs.comparison import Comparison

TASKS_SHOWN = {"tuned": "from the pre-trained run", "scratch": "from scratch"}


def tasks(comparison: Comparison) -> list[dict[str, Any]]:
    """An entry for each task; fine-tunings from scratch are columns beside those from the pre-trained run."""
    every = variants(comparison)
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(one.removesuffix(FROM_SCRATCH) for one in every):
        tables = {
            start: TaskTable.of(comparison, variant)
            for start, variant in (("tuned", name), ("scratch", name + FROM_SCRATCH))
            if variant in every
        }
        found.append({"id": f"task-{len(found)}", "name": name, **_task(comparison, tables)})
    return found


def _task(comparison: Comparison, tables: Mapping[str, TaskTable]) -> dict[str, Any]:
    first = next(iter(tables.values()))
    metric = first.table.metric
    kept = [key for key in ROUTING_KEYS if any(of[key] is not None for of in first.routing.values())]
    return {
        "grid": _task_grid(comparison, tables, kept),
        "gain": len(tables) > 1,
        "split": first.table.split,
        "notes": list(dict.fromkeys(one.note for one in tables.values())),
        "routing_note": ROUTING if kept else "",
        "label": metric.label,
        "chart": {
            "label": metric.label,
            "decimals": metric.decimals,
            "choices": [[start, TASKS_SHOWN[start]] for start in tables],
            "of": {start: series.quality(one.table) for start, one in tables.items()},
        },
    }


def _task_grid(comparison: Comparison, tables: Mapping[str, TaskTable], kept: Sequence[str]) -> Grid:
    """Accuracies at every k from both starts, the gain of pre-training, and the change of the routing."""
    first = next(iter(tables.values()))
    rows = {start: {row.router: row for row in one.table.rows} for start, one in tables.items()}
    largest, gain = max(first.table.top_k, default=0), len(tables) > 1
    header, groups = ["router"], [("", 1)]
    for start, one in tables.items():
        header += one.table.titles
        groups.append((TASKS_SHOWN[start], len(one.table.top_k)))
    header += [*([f"gain at k={largest}"] if gain else []), *kept, "seeds"]
    groups += [*([("", 1)] if gain else []), *([("routing moved", len(kept))] if kept else []), ("", 1)]
    lines: list[list[str]] = []
    best = set()
    for router in comparison.routers:
        own = {start: of[router] for start, of in rows.items() if router in of}
        if not own:
            continue
        line = [router]
        for start, one in tables.items():
            for k in one.table.top_k:
                best |= {(len(lines), len(line))} if router in one.table.best(k) else set()
                line.append(one.table.quality(own[start], k).shown(one.table.metric) if start in own else NONE)
        if gain:
            tuned, scratch = (own[start].quality.get(largest, Cell({})) if start in own else Cell({}) for start in rows)
            line.append(tuned.minus(scratch).shown(first.table.metric, sign=True))
        routing = first.routing.get(router, {})
        line += [NONE if (value := routing.get(key)) is None else f"{value:.3f}" for key in kept]
        row = next(iter(own.values()))
        lines.append([*line, f"{len(row.done)}/{len(row.done) + len(row.missing)}"])
    return Grid(header, lines, best, groups=groups)


def charts(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The part of these entries for the scripts."""
    return [{"id": one["id"], "name": one["name"], **one["chart"]} for one in entries if one["chart"]]
