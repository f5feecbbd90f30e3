"""What the page shows beyond pre-training: tasks that runs were fine-tuned on, and attacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pointsman.lab.report import series
from pointsman.lab.report.attack_table import CONSISTENCY, AttackTable, attack_tables
from pointsman.lab.report.attack_table import ROUTING as ATTACKED_ROUTING
from pointsman.lab.report.metrics import Metric
from pointsman.lab.report.tables import Cell, ComparisonTable
from pointsman.lab.report.task_table import FROM_SCRATCH, PUBLISHED, ROUTING, ROUTING_KEYS, TaskTable, variants
from pointsman.lab.runs.comparison import Comparison

TASKS_SHOWN = {"tuned": "from the pre-trained run", "scratch": "from scratch"}


def cell_text(cell: Cell, metric: Metric, *, sign: bool = False, best: bool = False) -> dict[str, Any]:
    """A table cell of the page: mean and spread as text."""
    mean, _, spread = cell.text(metric.decimals, metric.scale, sign=sign).partition(" ± ")
    return {"text": mean, "spread": spread, "best": best}


def tasks(comparison: Comparison, *, baseline: str | None = None) -> list[dict[str, Any]]:
    """One entry a task: what the template prints, and under "chart" what the scripts draw.

    Fine-tunings from scratch stand beside those from the pre-trained run with the same settings.
    """
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
    rows = {start: {row.router: row for row in one.table.rows} for start, one in tables.items()}
    groups = [{"name": TASKS_SHOWN[start], "ks": one.table.top_k} for start, one in tables.items()]
    largest = max(first.table.top_k, default=0)
    gain = len(tables) > 1
    kept = [key for key in ROUTING_KEYS if any(of[key] is not None for of in first.routing.values())]
    lines = []
    for style, router in enumerate(comparison.routers):
        if not any(router in of for of in rows.values()):
            continue
        cells = [
            cell_text(row.quality.get(k, Cell({})) if row else Cell({}), metric, best=router in one.table.best(k))
            for start, one in tables.items()
            for row in [rows[start].get(router)]
            for k in one.table.top_k
        ]
        if gain:
            ours, control = (rows[start][router].quality if router in rows[start] else {} for start in tables)
            cells.append(cell_text(_difference(ours.get(largest), control.get(largest)), metric, sign=True))
        routing = first.routing.get(router, {})
        cells += [_plain(None if (value := routing.get(key)) is None else f"{value:.3f}") for key in kept]
        row = next(of[router] for of in rows.values() if router in of)
        cells.append(_plain(f"{len(row.done)}/{len(row.done) + len(row.missing)}"))
        lines.append({"router": router, "style": style, "cells": cells})
    return {
        "groups": groups,
        "gain": f"gain at k={largest}" if gain else "",
        "routing": kept,
        "rows": lines,
        "split": first.table.split,
        "notes": list(dict.fromkeys(one.note for one in tables.values())),
        "routing_note": ROUTING if kept else "",
        "published": first.published_lines(),
        "published_note": PUBLISHED,
        "label": metric.label,
        "chart": {
            "label": metric.label,
            "decimals": metric.decimals,
            "choices": [[start, TASKS_SHOWN[start]] for start in tables],
            "of": {start: series.quality(one.table) for start, one in tables.items()},
        },
    }


def attacks(comparison: Comparison) -> list[dict[str, Any]]:
    """One entry an attack on one text or task: what the template prints, and under "chart" what the scripts draw."""
    return [_attack(comparison, f"attack-{place}", table) for place, table in enumerate(attack_tables(comparison))]


def _attack(comparison: Comparison, place: str, table: AttackTable) -> dict[str, Any]:
    clean = table.conditions[0].table
    counts = {"all": "all targets count", "unmarked": "attacked targets left out"}
    if not any(one.unmarked for one in table.conditions):
        counts = {"all": "all texts"}
    tables = [_sweep(comparison, table, clean, k, counts) for k in reversed(clean.top_k)]
    return {
        "id": place,
        "name": _title(table.name),
        "rates": [f"{100 * rate:.3g} %" for rate in table.rates],
        "counts": list(counts.values()) if len(counts) > 1 else [],
        "tables": tables,
        "recipes": [_recipe(comparison, one.words, one.table) for one in table.conditions if one.rate is None],
        "label": clean.metric.label,
        "direction": clean.metric.direction,
        "protocol": table.protocol,
        "beside": [
            {"words": words, "lines": lines}
            for words, lines in ((ATTACKED_ROUTING, table.routing_lines()), (CONSISTENCY, table.consistency_lines()))
            if lines
        ],
        "chart": {
            "label": clean.metric.label,
            "decimals": clean.metric.decimals,
            "ks": [[str(k), str(k)] for k in clean.top_k],
            "counts": [[count, words] for count, words in counts.items()],
            "of": {
                shown: {
                    count: {str(k): _curves(table, clean, k, count == "unmarked", value) for k in clean.top_k}
                    for count in counts
                }
                for shown, value in (("value", _own), ("rise", _difference))
            },
        },
    }


def _title(name: str) -> str:
    """`attack-word-enwik8-test` in words."""
    kind, _, where = name.removeprefix("attack-").partition("-")
    done = {"word": "Words swapped for AAA", "char": "Letters changed"}.get(kind, f"Recipe {kind}")
    return f"{done}: {where}" if where else done


def _sweep(
    comparison: Comparison, table: AttackTable, clean: ComparisonTable, k: int, counts: Mapping[str, str]
) -> dict[str, Any]:
    """Rows: routers; columns: clean, then the rates for each count of targets."""
    lines = []
    for row in clean.rows:
        cells = [table.cell(row.router, k, 0.0)]
        cells += [
            table.cell(row.router, k, rate, unmarked=count == "unmarked") for count in counts for rate in table.rates
        ]
        if any(cell.values for cell in cells):
            style = list(comparison.routers).index(row.router)
            texts = [cell_text(cell, clean.metric) for cell in cells]
            lines.append({"router": row.router, "style": style, "cells": texts})
    return {"k": k, "rows": lines}


def _recipe(comparison: Comparison, words: str, table: ComparisonTable) -> dict[str, Any]:
    rows = [
        {
            "router": row.router,
            "style": list(comparison.routers).index(row.router),
            "cells": [cell_text(table.quality(row, k), table.metric) for k in table.top_k],
        }
        for row in table.rows
    ]
    return {"words": words, "ks": table.top_k, "rows": rows}


def _curves(
    table: AttackTable, clean: ComparisonTable, k: int, unmarked: bool, value: Callable[[Cell, Cell], Cell]
) -> list[dict[str, Any]]:
    found = []
    for row in clean.rows:
        start = table.cell(row.router, k, 0.0)
        cells = {0.0: start} | {rate: table.cell(row.router, k, rate, unmarked=unmarked) for rate in table.rates}
        points = [
            point
            for rate, cell in cells.items()
            if (point := series.cell_point(100 * rate, value(cell, start), clean.metric.scale))
        ]
        if points:
            found.append({"name": row.router, "points": points})
    return found


def _own(cell: Cell, clean: Cell) -> Cell:
    return cell


def _difference(cell: Cell | None, other: Cell | None) -> Cell:
    """`cell` minus `other`, over the seeds that both have."""
    if cell is None or other is None:
        return Cell({})
    return Cell({seed: value - other.values[seed] for seed, value in cell.values.items() if seed in other.values})


def _plain(text: str | None) -> dict[str, Any]:
    return {"text": "-" if text is None else text, "spread": "", "best": False}


def charts(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the scripts need of these entries."""
    return [{"id": one["id"], "name": one["name"], **one["chart"]} for one in entries]
