"""One self-contained HTML page for a run or a comparison: opens offline, loads nothing from outside."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import check_writable, disk_errors, open_named, write_whole
from pointsman_lab._grid import NONE, Grid
from pointsman_lab._shapes import MOST_OTHERS
from pointsman_lab.registry import entries
from pointsman_lab.report import commands, protocol, series
from pointsman_lab.report.audits import audit_parts, load_maps
from pointsman_lab.report.forms import Forms, asset, check_jinja, embed, fill
from pointsman_lab.report.inside import diagnosis_grid, inside
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.report.task_table import TaskTable, variants
from pointsman_lab.runs.comparison import Comparison, read
from pointsman_lab.runs.paths import is_page

OURS = b'<meta name="generator" content="pointsman '
SCRIPTS = ("charts.js", "maps.js", "page.js", "explorer.js")


def write_report(
    path: Path | Sequence[Path],
    out: Path | None = None,
    *,
    samples: bool = False,
    note: Callable[[str], None] | None = None,
) -> Path:
    """Writes report.html for a run directory, a comparison directory, or several run directories side by side.

    Args:
        out: the file to write, or a folder for it; `report.html` in the (first) directory by default.
        samples: whether to make the samples for maps and explorer first, where they are missing (a second or two a
            run).
        note: told which runs are sampled, and which cannot be.

    Raises:
        RunError: no run, a damaged file, jinja2 missing, a folder that cannot be written, or a file in the page's
            place that pointsman did not write.
    """
    comparison = read(path)
    page = page_path(out, comparison)
    if out is not None:
        refuse_foreign(page, OURS, "page")
    if samples:
        from pointsman_lab.report.samples import collect_all

        check_jinja()  # before the samples, which take a while
        check_writable(page.parent)
        keep = page.absolute().is_relative_to(comparison.path.absolute())
        comparison = collect_all(comparison, note=note, keep=keep)
    return write_whole(page, render(comparison))


def refuse_foreign(file: Path, mark: bytes, kind: str) -> None:
    """RunError where a file is there, not empty, and lacks the mark that ours have: somebody else's is not replaced."""
    if file.exists():
        with disk_errors(file, "whose file it is cannot be told"), open_named(file) as opened:
            if (content := opened.read(MOST_OTHERS)) and mark not in content:
                raise RunError(f"{file}: it exists and is no {kind} of `pointsman report`; choose another --out")


def page_path(out: Path | None, comparison: Comparison) -> Path:
    """Where the page goes: `out` itself if it is called .html, else `report.html` in it, or in the directory."""
    if out is not None and is_page(out):
        return out
    return (out or comparison.path) / "report.html"


def render(comparison: Comparison) -> str:
    """The page as a string."""
    named = ComparisonTable.of(comparison)
    table = replace(named, names={})  # renamed below, everywhere
    data = chart_data(comparison, table)
    values = context(comparison, table, data)
    values["missing"] = protocol.missing(comparison, named)
    names = comparison.shown.get("names", {})
    data = renamed(data, names)
    scripts = "\n".join(asset(name) for name in SCRIPTS)
    return fill("page.html.j2", javascript=scripts, json=embed(data), data=data, **renamed(values, names))


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The values of the page with other names for rows, wherever one stands alone."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        words = ("texts", "tokens")  # of the data: no names
        return {renamed(key, names): one if key in words else renamed(one, names) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(renamed(one, names) for one in value)
    if not isinstance(value, Grid):
        return value
    before, base, after = value.caption.partition("differences to ")
    row = next((row for row in names if after.startswith((f"{row} ", f"{row},"))), "")
    return replace(value.named(names), caption=before + base + names.get(row, "") + after[len(row) :])


def chart_data(comparison: Comparison, table: ComparisonTable) -> dict[str, Any]:
    """What the page's scripts draw."""
    metric, found = table.metric, inside(comparison)
    return {
        "routers": list(comparison.routers),
        "metric": {"label": metric.label, "decimals": metric.decimals, "lower": metric.lower_is_better},
        "baseline": table.baseline,
        "quality": series.quality(table),
        "audits": load_maps(comparison),
        "differences": series.differences(table),
        "loss": series.loss(comparison, bits=metric.name.startswith("bits")),
        "validation": series.validation(comparison, metric.scale),
        "inside": {**found, "layers": [series.short_layer(name) for name in found["layers"]]},
    }


def context(comparison: Comparison, table: ComparisonTable, data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the template; `data` is for the scripts."""
    routing = data["inside"]
    explorer, any_routing = bool(routing["explorer"]["routers"]), bool(routing["heat"] or routing["byLayer"]["entropy"])
    experts = next((run.num_experts for run in comparison.runs.values() if run.num_experts), None)
    trained = any(run.steps for run in comparison.runs.values())
    audit = audit_parts(comparison)
    tasks: list[Forms] = [TaskTable.of(comparison, name) for name in variants(comparison)]
    tasks += [one for entry in entries() for one in entry.tables(comparison)]
    sections = [
        ("audit", "Audit", audit), ("result", "Result", True), ("training", "Training", trained),
        ("routing", "Routing", any_routing), ("tasks", "Tasks and shifts", tasks), ("explore", "Explorer", explorer),
        ("protocol", "Protocol", True),
    ]  # fmt: skip
    return {
        "title": protocol.title(comparison),
        "facts": protocol.facts(comparison, table),
        "findings": protocol.findings(comparison),
        "trained": trained,
        "bars": "" if audit or len(comparison.seeds) < 2 else "Bars: mean ± sample standard deviation over seeds",
        "sections": [(name, title) for name, title, there in sections if there],
        "inside": {"any": any_routing or explorer, "uniform": f"{math.log(experts):.3f}" if experts else NONE},
        "audit": audit,
        "tasks": [(one.file, one.head, [each for each in one.shown_grids() if each.rows]) for one in tasks],
        "order": {router: position for position, router in enumerate(comparison.routers)},
        "table": table.grid(),
        "baseline": table.baseline,
        "differences": table.difference_grid(),
        "diagnosis": diagnosis_grid(comparison),
        "loss_note": protocol.loss_note(comparison),
        "command": commands.command(comparison),
        "protocol": protocol.lines(comparison),
        "pairing": protocol.pairing(comparison),
        "settings": protocol.settings(comparison),
        "environment": protocol.environment(comparison),
    }
