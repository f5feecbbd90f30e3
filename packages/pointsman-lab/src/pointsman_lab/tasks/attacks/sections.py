"""The page's section on attacks: a grid for each k, and figures against the share attacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman._grid import Grid
from pointsman_lab.report import series
from pointsman_lab.report.page import Sections
from pointsman_lab.report.sections import charts
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.tasks.attacks.table import AttackTable, attack_tables


def sections(comparison: Comparison) -> Sections | None:
    """One entry for each attack on one text or task."""
    found = [{"id": f"attack-{i}", **_attack(table)} for i, table in enumerate(attack_tables(comparison))]
    if not found:
        return None
    return Sections(__package__, [("attacks", "Attacks")], {"attacks": found}, {"attacks": charts(found)})


def _attack(table: AttackTable) -> dict[str, Any]:
    clean = table.conditions[0].table
    counts = {"all": "all targets count", "unmarked": "attacked targets left out"}
    if not any(one.unmarked for one in table.conditions):
        counts = {"all": "all texts"}
    return {
        "name": _title(table.name),
        "grids": [_sweep(table, k, counts) for k in reversed(clean.top_k)],
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
    done = {"word": "Words swapped for AAA", "char": "Letters changed"}[kind]
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
