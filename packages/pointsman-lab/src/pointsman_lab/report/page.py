"""One self-contained HTML page for a run or a comparison: opens offline, loads nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pointsman._files import write_whole
from pointsman._grid import NONE, Grid
from pointsman_lab.registry import entries
from pointsman_lab.report import protocol, series, task_table
from pointsman_lab.report.audits import audit_parts
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.html import asset, embed, fill
from pointsman_lab.report.inside import diagnosis_grid, inside
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison, read

SCRIPTS = ("charts.js", "maps.js", "page.js", "explorer.js")


@dataclass(frozen=True)
class Sections:
    """What a task adds to the page.

    Attributes:
        package: whose section.html.j2 draws it.
        titles: (id, title) of each section.
        values: of the template.
    """

    package: str
    titles: Sequence[tuple[str, str]]
    values: Mapping[str, Any]


def write_report(
    path: Path | Sequence[Path],
    out: Path | None = None,
    *,
    samples: bool = False,
    note: Callable[[str], None] | None = None,
) -> Path:
    """Writes report.html for a run directory, a comparison directory, or several run directories side by side.

    Args:
        path: the directory, or several run directories.
        out: the file to write, or a folder for it; `report.html` in the (first) directory by default.
        samples: whether to make the samples for maps and explorer first, where they are missing (a second or two a
            run).
        note: told which runs are sampled, and which cannot be.

    Returns:
        The file written.

    Raises:
        RunError: no run, a damaged file, jinja2 missing, or a folder that cannot be written.
    """
    comparison = read(path)
    if samples:
        from pointsman_lab.report.samples import collect_all

        keep = page_path(out, comparison).absolute().is_relative_to(comparison.path.absolute())
        comparison = collect_all(comparison, note=note, keep=keep)
    return write_whole(page_path(out, comparison), render(comparison))


def page_path(out: Path | None, comparison: Comparison) -> Path:
    """Where the page goes: `out` itself if it is called .html, else `report.html` in it, or in the directory."""
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        return out
    return (out or comparison.path) / "report.html"


def render(comparison: Comparison) -> str:
    """The page as a string."""
    table = replace(ComparisonTable.of(comparison), names={})  # renamed below, everywhere
    tasks, added = task_table.tasks(comparison), task_sections(comparison)
    data = chart_data(comparison, table) | {"tasks": task_table.charts(tasks)}
    values = {
        **context(comparison, table, data, [title for each in added for title in each.titles]),
        "totals": [table.grid() for entry in entries() for table in entry.tables(comparison)],
        "tasks": tasks,
    }
    names = comparison.shown.get("names", {})
    data = renamed(data, names)
    return fill(
        "page.html.j2",
        javascript="\n".join(asset(name) for name in SCRIPTS),
        json=embed(data),
        data=data,
        added=added,
        **renamed(values, names),
    )


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The values of the page with other names for rows, wherever one stands alone."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {renamed(key, names): renamed(one, names) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(renamed(one, names) for one in value)
    return value.named(names) if isinstance(value, Grid) else value


def task_sections(comparison: Comparison) -> list[Sections]:
    """What the tasks whose records lie in the comparison's runs add."""
    runs = [run for router in comparison.routers for run in comparison.of(router)]
    told = [
        entry.sections(comparison)
        for entry in entries()
        if any(next(run.path.glob(pattern), None) for run in runs for pattern in entry.records)
    ]
    return [each for each in told if each]


def chart_data(comparison: Comparison, table: ComparisonTable) -> dict[str, Any]:
    """What the page's scripts draw."""
    metric, found = table.metric, inside(comparison)
    return {
        "routers": list(comparison.routers),
        "metric": {"label": metric.label, "decimals": metric.decimals, "lower": metric.lower_is_better},
        "baseline": table.baseline,
        "quality": series.quality(table),
        "differences": series.differences(table),
        "loss": series.loss(comparison, bits=metric.name.startswith("bits")),
        "validation": series.validation(comparison, metric.scale),
        "inside": {**found, "layers": [series.short_layer(name) for name in found["layers"]]},
    }


def context(
    comparison: Comparison, table: ComparisonTable, data: Mapping[str, Any], added: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The values of the template; `data` is for the scripts, `added` the titles of the tasks' sections."""
    routing = data["inside"]
    explorer, any_routing = bool(routing["explorer"]["routers"]), bool(routing["heat"] or routing["byLayer"]["entropy"])
    experts = next((run.num_experts for run in comparison.runs.values() if run.num_experts), None)
    trained = any(run.steps for run in comparison.runs.values())
    audit = audit_parts(comparison)
    shown = [*([("audit", "Audit")] if audit else []), ("result", "Result")]
    shown += [("training", "Training")] if trained else []
    shown += [("routing", "Routing")] if any_routing else []
    shown += [("tasks", "Tasks")] if data["tasks"] else []
    shown += added
    shown += [("explore", "Explorer")] if explorer else []
    return {
        "title": protocol.title(comparison),
        "facts": protocol.facts(comparison, table),
        "findings": protocol.findings(comparison),
        "trained": trained,
        "sections": [*shown, ("protocol", "Protocol")],
        "inside": {"any": any_routing or explorer, "uniform": f"{math.log(experts):.3f}" if experts else NONE},
        "audit": audit,
        "missing": protocol.missing(comparison),
        "order": {router: position for position, router in enumerate(comparison.routers)},
        "table": table.grid(),
        "baseline": table.baseline,
        "differences": _differences(table),
        "per_seed": per_seed(comparison, table),
        "diagnosis": diagnosis_grid(comparison),
        "loss_note": protocol.loss_note(comparison),
        "command": protocol.command(comparison),
        "protocol": protocol.lines(comparison),
        "pairing": protocol.pairing(comparison),
        "settings": protocol.settings(comparison),
        "environment": protocol.environment(comparison),
    }


def _differences(table: ComparisonTable) -> Grid:
    """The paired differences of the rows that have any, each with its number of seeds as a hint."""
    grid = table.difference_grid()
    differences = table.differences()
    kept = [row for row in grid.rows if any(cell.values for cell in differences[row[0]].values())]
    cells = [list(differences[row[0]].values()) for row in kept]
    seeds = {(i, j): len(cell.values) for i, line in enumerate(cells) for j, cell in enumerate(line, 1)}
    hints = {place: f"{count} seed{'' if count == 1 else 's'}" for place, count in seeds.items()}
    header = [f"router − {table.baseline}", *table.titles]
    return replace(grid, header=header, rows=kept, hints=hints)


def per_seed(comparison: Comparison, table: ComparisonTable) -> Grid:
    """Paired differences seed by seed, with the confidence interval of their mean; no rows for a single seed."""
    digits, scale = table.metric.decimals, table.metric.scale
    rows = []
    for router, of in table.differences().items() if len(comparison.seeds) > 1 else ():
        for k, cell in of.items():
            if cell.values:
                each = [Cell({s: cell.values[s]} if s in cell.values else {}) for s in comparison.seeds]
                shown = [one.shown(table.metric, sign=True) for one in (*each, Cell({0: cell.mean or 0.0}))]
                interval = NONE if cell.interval is None else f"± {cell.interval * scale:.{digits}f}"
                rows.append([router, str(k), *shown, interval])
    return Grid(["router", "k", *(f"seed {seed}" for seed in comparison.seeds), "mean", "95 %"], rows)
