"""The page's sections on tasks and attacks: grids for the template, and under "chart" the data for the scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman._grid import NONE, Grid
from pointsman_lab.report import series
from pointsman_lab.report.attack_table import AttackTable, attack_tables
from pointsman_lab.report.robust_table import RobustTable, robust_tables
from pointsman_lab.report.tables import Cell
from pointsman_lab.report.task_table import FROM_SCRATCH, PUBLISHED, ROUTING, ROUTING_KEYS, TaskTable, variants
from pointsman_lab.runs.comparison import Comparison

TASKS_SHOWN = {"tuned": "from the pre-trained run", "scratch": "from scratch"}


def tasks(comparison: Comparison, *, baseline: str | None = None) -> list[dict[str, Any]]:
    """An entry for each task; fine-tunings from scratch are columns beside those from the pre-trained run."""
    every = variants(comparison)
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(one.removesuffix(FROM_SCRATCH) for one in every):
        tables = {
            start: TaskTable.of(comparison, variant, baseline=baseline)
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
        "published": first.published_grid(),
        "published_note": PUBLISHED,
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


def attacks(comparison: Comparison) -> list[dict[str, Any]]:
    """One entry for each attack on one text or task."""
    return [{"id": f"attack-{i}", **_attack(table)} for i, table in enumerate(attack_tables(comparison))]


def _attack(table: AttackTable) -> dict[str, Any]:
    clean = table.conditions[0].table
    counts = {"all": "all targets count", "unmarked": "attacked targets left out"}
    if not any(one.unmarked for one in table.conditions):
        counts = {"all": "all texts"}
    recipes = [one for one in table.conditions if one.rate is None]
    return {
        "name": _title(table.name),
        "grids": [_sweep(table, k, counts) for k in reversed(clean.top_k)],
        "recipes": [(one.words, one.table.quality_grid()) for one in recipes],
        "label": clean.metric.label,
        "direction": clean.metric.direction,
        "protocol": table.protocol,
        "further": table.further(),
        "chart": {
            "label": clean.metric.label,
            "decimals": clean.metric.decimals,
            "ks": [[str(k), str(k)] for k in clean.top_k],
            "counts": [[count, words] for count, words in counts.items()],
            "of": {
                shown: {
                    count: {
                        str(k): _curves(table, k, unmarked=count == "unmarked", rise=shown == "rise")
                        for k in clean.top_k
                    }
                    for count in counts
                }
                for shown in ("value", "rise")
            },
        },
    }


def _title(name: str) -> str:
    """`attack-word-enwik8-test` in words."""
    kind, _, where = name.removeprefix("attack-").partition("-")
    done = {"word": "Words swapped for AAA", "char": "Letters changed"}.get(kind, f"Recipe {kind}")
    return f"{done}: {where}" if where else done


def _sweep(table: AttackTable, k: int, counts: Mapping[str, str]) -> Grid:
    """Rows: routers; columns: clean, then the rates for each count of targets."""
    clean = table.conditions[0].table
    rows = []
    for router in (row.router for row in clean.rows):
        cells = [table.cell(router, k, 0.0)]
        cells += [table.cell(router, k, rate, unmarked=count == "unmarked") for count in counts for rate in table.rates]
        if any(cell.values for cell in cells):
            rows.append([router, *(cell.shown(clean.metric) for cell in cells)])
    rates = [f"{100 * rate:.3g} %" for rate in table.rates]
    groups = [("", 1), ("", 1), *((words, len(rates)) for words in counts.values())] if len(counts) > 1 else []
    return Grid([f"k={k}", "clean", *rates * len(counts)], rows, groups=groups)


def _curves(table: AttackTable, k: int, *, unmarked: bool, rise: bool) -> list[dict[str, Any]]:
    """For every router its points (rate in percent, figure), or the rise over the clean figure."""
    clean, curves = table.conditions[0].table, {}
    for router in (row.router for row in clean.rows):
        cells = {100 * rate: table.cell(router, k, rate, unmarked=unmarked) for rate in (0.0, *table.rates)}
        shown = {rate: cell.minus(cells[0]) if rise else cell for rate, cell in cells.items()}
        curves[router] = series.cell_points(shown, clean.metric.scale)
    return series.drawn(curves)


def robust(comparison: Comparison) -> list[dict[str, Any]]:
    """One entry for each kind of shifted images."""
    return [
        {
            "id": f"robust-{i}",
            "name": table.title,
            "grids": table.grids,
            "note": table.note,
            "by_corruption": table.by_corruption,
            "chart": _severity_chart(table) if table.severities else None,
        }
        for i, table in enumerate(robust_tables(comparison))
    ]


def _severity_chart(table: RobustTable) -> dict[str, Any]:
    """Accuracy against severity of every router, for each corruption and for their mean."""
    names = list(dict.fromkeys(name for of in table.severities.values() for name in of))
    names.sort(key=bool)  # the mean first

    def curves(name: str, *, drop: bool) -> list[dict[str, Any]]:
        found = []
        for router, of in table.severities.items():
            cells = of.get(name, {})
            start = cells.get(0, Cell({}))
            points = [
                point
                for severity, cell in cells.items()
                if (point := series.cell_point(severity, cell.minus(start) if drop else cell, 100.0))
            ]
            if points:
                found.append({"name": router, "points": points})
        return found

    return {
        "choices": [[name, name.replace("_", " ") or "mean over all"] for name in names],
        "of": {shown: {name: curves(name, drop=shown == "drop") for name in names} for shown in ("value", "drop")},
    }


def charts(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The part of these entries for the scripts."""
    return [{"id": one["id"], "name": one["name"], **one["chart"]} for one in entries if one["chart"]]
