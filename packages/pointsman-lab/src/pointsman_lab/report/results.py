"""What a comparison directory gets: its tables, and results.csv, one line a router, seed and k."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError
from pointsman_lab._files import write_whole
from pointsman_lab._grid import Grid, formatted, inert
from pointsman_lab._values import finite
from pointsman_lab.report import task_table
from pointsman_lab.report.forms import Forms
from pointsman_lab.report.language_table import LanguageTable
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.compact import write_record
from pointsman_lab.runs.comparison import Comparison, read_comparison
from pointsman_lab.runs.record import RunRecord, over_layers

if TYPE_CHECKING:
    import pandas

RESULTS = "results.csv"
COLUMNS = ("router", "seed", "k", "split", "metric", "value", "experts_per_token", "entropy")


def tidy(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """One row for every finished run and every k of its final evaluation, in the comparison's order.

    Keys are `COLUMNS`. `value` is as stored (accuracies are shares); `experts_per_token` the mean number of experts
    that a token got, and `entropy` (nats, before mixing) the mean over tokens and layers; None where there is none.
    """
    for router in comparison.routers:
        for run in comparison.of(router):
            for result in run.evaluation.get("results", ()):
                if isinstance(result, dict) and not result.get("attack"):
                    yield {
                        "router": router,
                        "seed": run.seed,
                        "k": result.get("top_k"),
                        "split": result.get("split"),
                        "metric": result.get("metric"),
                        "value": finite(result.get("value")),
                        "experts_per_token": experts_per_token(result),
                        "entropy": over_layers(result, "entropy"),
                    }


def experts_per_token(result: dict[str, Any]) -> float | None:
    """Mean number of experts a token, over layers: as recorded, or k where every token gets k; None without routers."""
    if not result.get("routers"):
        return None
    recorded = over_layers(result, "experts_per_token")
    return finite(result.get("top_k")) if recorded is None else recorded


def load_comparison(path: Path | str) -> pandas.DataFrame:
    """The results of a comparison (or run) directory as a table with the columns of results.csv."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise RunError("load_comparison needs pandas: pip install pandas") from None
    return pandas.DataFrame(list(tidy(read_comparison(Path(path)))), columns=list(COLUMNS))


def write_results(folder: Path) -> Path:
    """Writes the rows of `tidy` as results.csv, in full precision; an empty field where there is no figure."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    rows = tidy(read_comparison(folder))
    writer.writerows({name: inert(value) for name, value in row.items()} for row in rows)
    return write_whole(folder / RESULTS, out.getvalue())


def write_tables(out: Path) -> str:
    """Writes the table in four forms, results.csv and record.jsonl; returns the table's text."""
    comparison = read_comparison(out)
    table = ComparisonTable.of(comparison)
    table.write(out)
    write_results(out)
    write_record(out)
    languages = LanguageTable.of([run for router in comparison.routers for run in comparison.of(router)], "languages")
    if languages is None:
        return table.text()
    languages.write(out)
    return f"{table.text()}\n{languages.text()}"


def write_task_tables(folder: Path, variants: Sequence[str] | None = None) -> list[Forms]:
    """Writes the tables of a comparison's fine-tunings, by default of all."""
    comparison = read_comparison(folder)
    tables: list[Forms] = []
    for name in task_table.variants(comparison) if variants is None else variants:
        tables += tables_of(task_table.TaskTable.of(comparison, name), task_table.finetunings(comparison, name))
    for each in tables:
        each.write(folder)
    return tables


def tables_of(table: task_table.TaskTable, runs: Sequence[RunRecord]) -> list[Forms]:
    """The table of fine-tunings on one task, and the one by language where there is any."""
    languages = LanguageTable.of(runs, f"xtreme-{table.name}", table.note)
    return [table, *([languages] if languages else [])]


def text_of_results(results: Sequence[Mapping[str, Any]]) -> str:
    """The metric and the mean router entropy at every k; where tokens do not all get k experts, how many on average."""
    each = [experts_per_token(dict(result)) for result in results]
    varies = any(mean is not None and abs(mean - of["top_k"]) > 1e-6 for mean, of in zip(each, results, strict=True))
    titles = ["k", results[0]["metric"].replace("_", " "), "tokens", "router entropy (nats)", "experts/token"]
    rows = []
    for result, mean in zip(results, each, strict=True):
        entropy = formatted(over_layers(result, "entropy"))
        value = formatted(result["value"], ".4f")
        rows.append([str(result["top_k"]), value, f"{result['tokens']:,}", entropy, formatted(mean, ".2f")])
    grid = Grid(titles, rows)
    return (grid if varies else grid.only(titles[1:4])).text(rule=False)
