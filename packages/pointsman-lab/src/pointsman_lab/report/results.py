"""results.csv: one line a router, seed and k; and the same as a pandas table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError
from pointsman._files import write_whole
from pointsman._values import finite
from pointsman_lab.runs.comparison import Comparison, read_comparison
from pointsman_lab.runs.evaluation import over_layers

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
    """The results of a comparison (or run) directory as a table with the columns of results.csv.

    Raises:
        RunError: neither a run nor a comparison; a damaged file; pandas missing.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise RunError("load_comparison needs pandas: pip install pandas") from None
    return pandas.DataFrame(list(tidy(read_comparison(Path(path)))), columns=list(COLUMNS))


def results_csv(comparison: Comparison) -> str:
    """The rows of `tidy` as CSV in full precision; an empty field where there is no figure."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(tidy(comparison))
    return out.getvalue()


def write_results(folder: Path) -> Path:
    """Writes results.csv of a comparison directory."""
    return write_whole(folder / RESULTS, results_csv(read_comparison(folder)))
