"""Image classifiers under shift: a table for each kind of shifted images, over seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pointsman_lab._grid import NONE, Grid
from pointsman_lab._values import finite, mean_of
from pointsman_lab.report.cell import Cell, significantly_best, squared_variation
from pointsman_lab.report.forms import Forms, protocol_line, unlike
from pointsman_lab.report.published import Column
from pointsman_lab.report.tables import COST, COSTS, COUNTED, CSV_COSTS, cost_cells, cost_of
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.record import RunRecord, read_object
from pointsman_lab.tasks.images.scores import ALEXNET, ALEXNET_CLEAN, corruption_error

Record = Mapping[str, Any]
Runs = Mapping[tuple[str, int], Record]

TITLES = {
    "c": "Corrupted images", "a": "Hard photographs (ImageNet-A)", "r": "Renditions (ImageNet-R)", "o": "Outliers",
    "hard": "Images that another model gets wrong", "pgd": "Projected gradient descent", "fgsm": "One gradient step",
}  # fmt: skip
NOTES = {
    "c": "Mean over 15 corruptions at 5 severities. mCE: errors divided by those of the first row with the same seed "
    "(ImageNet-C's own files: of AlexNet), mean over corruptions; relative mCE: the same of the rise over the clean "
    "error. Neither is printed where a seed of the row has none, nor the relative one where the first row's rise on a "
    "corruption is within two standard errors of 0 (shares of the images that were read). Moved: share of patches "
    "whose first expert, or whose set of experts, differs between the clean and the corrupted image at the k of "
    "training, mean over layers. RMS, ECE, AURRA: calibration on the clean images.",
    **dict.fromkeys(
        ("a", "r"), "Logits are restricted to the classes of these images; clean: the test images of the same classes."
    ),
    "o": "Score: minus the largest probability; outliers are the positives. An AUPR of the base rate is chance.",
    "hard": "The reference has accuracy 0 on these images by construction, and is left out; a model with independent "
    "mistakes would have its accuracy on all images.",
    **dict.fromkeys(
        ("pgd", "fgsm"),
        "Shared experts: intersection over union of the experts chosen before and after, mean over patches.",
    ),
}
SHIFT = {
    "shifted_data": "shifted", "images": "scored", "classes": "classes",
    "clean_images": "clean images of these classes", "reference_k": "k of the reference",
}  # fmt: skip
"""What records say of the shifted images -> its name in tables."""
LOWER = ("drop", "gap", "mCE", "relative mCE", "FPR95", "first expert moved", "set moved", "RMS", "ECE")


@dataclass(frozen=True)
class RobustTable(Forms):
    """Routers x figures under one kind of shift.

    Attributes:
        name: of its files and of the records: `robust-c`.
        kind: a key of `TITLES`.
        cells: k -> router -> its figures over seeds, the records' first k first.
        costs: router -> what a token costs.
        by_corruption: accuracy of every router at each corruption; only of kind c.
        protocol: one line.
    """

    name: str
    kind: str
    cells: Mapping[int, Mapping[str, Mapping[str, Cell]]]
    costs: Mapping[str, Mapping[str, int]]
    by_corruption: Grid | None
    protocol: str

    @property
    def head(self) -> str:
        return f"{TITLES[self.kind]}. {NOTES[self.kind]} {self.protocol}"

    @property
    def grids(self) -> list[Grid]:
        """One for each k."""
        return [_grid(of, self.costs, k) for k, of in self.cells.items()]

    def shown_grids(self) -> list[Grid]:
        return [*self.grids, *([self.by_corruption] if self.by_corruption else [])]

    def csv(self) -> str:
        every = [(k, router, of) for k, rows in self.cells.items() for router, of in rows.items()]
        known = [name for *_, of in every for name, cell in of.items() if cell.values]
        names = [name for name in every[0][2] if name in known]
        header = [f"{name} {figure}" for name in names for figure in ("mean", "std", "seeds")]
        lines = []
        for k, router, of in every:
            shown = (figure for name in names for figure in (of[name].mean, of[name].std, len(of[name].values)))
            cost = (self.costs.get(router, {}).get(name) for name in COST if self.costs)
            lines.append([k, router, *shown, *cost])
        return Grid(["k", "router", *header, *(CSV_COSTS if self.costs else ())], lines).csv()


def robust_tables(comparison: Comparison) -> list[RobustTable]:
    """A table for each kind of shifted images of which the comparison's runs have records."""
    found: dict[str, dict[tuple[str, int], Record]] = {}
    for router in comparison.routers:
        for run in comparison.of(router):
            for file in sorted(run.path.glob("robust-*.json")):
                if record := shifted_images(run, file.stem):
                    found.setdefault(file.stem, {})[router, run.seed] = record
    return [table_of(comparison.routers, name, runs, comparison.seeds) for name, runs in sorted(found.items())]


def shifted_images(run: RunRecord, name: str) -> Record:
    """A run's record NAME.json, with "every_k" = its figures hold at every k, and "cost"; {} without a figure."""
    record = read_object(run.path / f"{name}.json")
    if not record.get("results") or record.get("kind") not in TITLES:
        return {}
    from pointsman.routers.frame.registry import has_one_k  # torch, which few tables need

    return {**record, "every_k": has_one_k(run.router), "cost": cost_of([run])}


def table_of(rows: Sequence[str], name: str, runs: Runs, seeds: Sequence[int] = ()) -> RobustTable:
    """The table of what `shifted_images` found, by router and seed; of these seeds it names those without a record."""
    first = next(iter(runs.values()))
    kind = str(first["kind"])
    routers = [router for router in rows if any(own == router for own, _ in runs)]
    asked = [k for record in runs.values() for k in record["protocol"]["top_k"]]
    values = sorted(set(asked), key=lambda k: (k != asked[0], k))  # a model without routers has one k: its figures
    cells = {k: _cells(kind, runs, routers, k) for k in values}
    costs = {router: record["cost"] for (router, _), record in runs.items() if record["cost"]}
    every = [{**record["protocol"], **_shift(record)} for record in runs.values()]
    shared = set.intersection(*map(set, every)) - {"top_k"}  # records of earlier versions lack some
    words = protocol_line(every[0]) + unlike([{key: one[key] for key in shared} for one in every])
    lacking = {row: [str(seed) for seed in seeds if (row, seed) not in runs] for row in rows}
    missing = "; ".join(f"{row}: seeds {', '.join(lack)}" for row, lack in lacking.items() if lack)
    words += f". Missing: {missing}" if missing else ""
    by_corruption = _by_corruption(runs, routers, values[0]) if kind == "c" else None
    return RobustTable(name, kind, cells, costs, by_corruption, words)


def _shift(record: Record) -> dict[str, Any]:
    """What a record says of the shifted images, for the protocol."""
    if record["kind"] == "o":
        return {"outliers": record.get("outlier_data"), "base rate": f"{100 * record.get('base_rate', 0):.1f} %"}
    return {shown: record[key] for key, shown in SHIFT.items() if key in record}


def _at(record: Record, k: int, part: str = "results") -> list[Mapping[str, Any]]:
    """The rows at this k; those of a model that has one k at every k."""
    return [row for row in record.get(part) or [] if record["every_k"] or row["top_k"] == k]


def figures(record: Record, k: int) -> dict[str, float | None]:
    """The columns of the tables of one run's `shifted_images` at this k; mCE, which needs another run, is None."""
    kind, rows = record["kind"], _at(record, k)
    if kind == "c":
        clean, corrupted = _clean(record, k), mean_of(row.get("value") for row in rows)
        routing = record.get("routing") or ()  # at the k of training
        calibration: Record = next((row.get("calibration", {}) for row in _at(record, k, "clean")), {})
        return {
            "clean": clean, "corrupted": corrupted, "drop": _difference(clean, corrupted), "mCE": None,
            "relative mCE": None, "first expert moved": _layers("top1", routing), "set moved": _layers("sets", routing),
            **{name.upper(): finite(calibration.get(name)) for name in ("rms", "ece", "aurra")},
        }  # fmt: skip
    first = rows[0] if rows else {}
    if kind == "o":
        return {name.upper(): finite(first.get(name)) for name in ("aupr", "auroc", "fpr95")}
    clean = finite(first.get("clean"))
    if kind in ("pgd", "fgsm"):
        hostile = finite(first.get("attacked"))
        return {
            "clean": clean, "attacked": hostile, "drop": _difference(clean, hostile),
            "shared experts": _layers("iou", rows), "first expert moved": _layers("top1", rows),
        }  # fmt: skip
    made_from = record.get("asked", {}).get("from", {})
    if kind == "hard" and made_from.get("path") == made_from.get("weights", NONE):  # RUN's weights are this run's own
        return {"clean": clean, "accuracy": None, "gap": None}
    return {"clean": clean, "accuracy": finite(first.get("value")), "gap": finite(first.get("gap"))}


def _clean(record: Record, k: int) -> float | None:
    return next((finite(row.get("value")) for row in _at(record, k, "clean")), None)


def _layers(name: str, rows: Iterable[Record]) -> float | None:
    """A figure of the routing, mean over layers, and over the conditions of the record."""
    return mean_of(layer.get(name) for row in rows for layer in row.get("layers", {}).values())


def _difference(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def errors(record: Record, k: int) -> dict[str, list[float]]:
    """Corruption -> error at each severity that has one."""
    found: dict[str, list[float]] = {}
    for row in _at(record, k):
        if (value := finite(row.get("value"))) is not None:
            found.setdefault(row.get("corruption", ""), []).append(1 - value)
    return found


def _cells(kind: str, runs: Runs, routers: Sequence[str], k: int) -> dict[str, dict[str, Cell]]:
    """Router -> the figures at this k over seeds."""
    reference = {seed: record for (router, seed), record in runs.items() if router == routers[0]}
    cells: dict[str, dict[str, Cell]] = {}
    for router in routers:
        own = {seed: record for (name, seed), record in runs.items() if name == router}
        found = {seed: figures(record, k) for seed, record in own.items()}
        names = list(next(iter(found.values())))
        cells[router] = {
            name: Cell({seed: value for seed, of in found.items() if (value := of[name]) is not None}) for name in names
        }
        if kind == "c":
            for name, rise in (("mCE", False), ("relative mCE", True)):
                cells[router][name] = _relative(own, k, reference, rise=rise)
    return cells


def _grid(cells: Mapping[str, Mapping[str, Cell]], costs: Mapping[str, Mapping[str, int]], k: int) -> Grid:
    names, counted = list(next(iter(cells.values()))), bool(costs)
    rows = [
        [router, *(_shown(*one) for one in line.items()), *(cost_cells(costs.get(router, {})) if counted else ())]
        for router, line in cells.items()
    ]
    best = {
        (list(cells).index(router), place)
        for place, name in enumerate(names, 1)
        if name not in ("first expert moved", "set moved", "shared experts", "clean")
        for router in significantly_best({of: line[name] for of, line in cells.items()}, lower_is_better=name in LOWER)
    }
    caption = (
        f"k={k}, in % but for the routing and costs; mean ± sample standard deviation over seeds; bold: significantly "
        f"different from every other row{f'. {COUNTED}' if counted else ''}"
    )
    header = [f"k={k}", *names, *(COSTS if counted else ())]
    return Grid(header, rows, best, caption).without_empty_columns()


def _relative(own: Mapping[int, Record], k: int, reference: Mapping[int, Record], *, rise: bool) -> Cell:
    """mCE, or relative mCE, against the first row of the same seed; of ImageNet-C's 1,000 classes against AlexNet.

    Empty where a seed of the row has none, so that a printed mean is over all seeds.
    """
    values = {seed: _ratio(record, reference.get(seed), k, rise=rise) for seed, record in own.items()}
    known = {seed: value for seed, value in values.items() if value is not None}
    return Cell(known if len(known) == len(values) else {})


def _ratio(record: Record, other: Record | None, k: int, *, rise: bool) -> float | None:
    if (start := _clean(record, k)) is None:
        return None
    errs = errors(record, k)
    if record.get("imagenet_c"):
        theirs, begin = {name: [error] for name, error in ALEXNET.items()}, 1 - ALEXNET_CLEAN
    elif other is None or (first := _clean(other, k)) is None:
        return None
    else:
        theirs, begin = errors(other, k), first
        if any(len(of) != len(errs.get(name, ())) for name, of in theirs.items()) or (
            rise and not all(_is_measured(statistics.fmean(of), 1 - begin, other) for of in theirs.values())
        ):
            return None
    return corruption_error(errs, theirs, *((1 - start, 1 - begin) if rise else ()))


def _is_measured(error: float, clean: float, record: Record) -> bool:
    """Whether a rise of the error exceeds two standard errors of a difference of shares of so many images."""
    variance = error * (1 - error) + clean * (1 - clean)
    return error - clean > 2 * math.sqrt(max(0.0, variance) / max(1, record["protocol"].get("images", 1)))


def _shown(name: str, cell: Cell) -> str:
    decimals = 3 if name in ("first expert moved", "set moved", "shared experts") else 2
    return cell.text(decimals, 1.0 if decimals == 3 else 100.0)


def _by_corruption(runs: Runs, routers: Sequence[str], k: int) -> Grid:
    """Routers x corruptions, accuracy, mean over severities and seeds."""
    every = (row for record in runs.values() for row in record["results"])
    names = list(dict.fromkeys(row["corruption"] for row in every if "corruption" in row))
    rows = []
    for router in routers:
        found = [row for (own, _), record in runs.items() if own == router for row in _at(record, k)]
        means = [mean_of(row.get("value") for row in found if row.get("corruption") == name) for name in names]
        rows.append([router, *(NONE if mean is None else f"{100 * mean:.1f}" for mean in means)])
    header = [f"k={k}", *(name.replace("_", " ") for name in names)]
    return Grid(header, rows, caption="Accuracy (%) by corruption, mean over five severities and seeds")


def published(run: RunRecord, column: Column, top_k: int | None) -> float | None:
    """A run's figure of a column of V-MoE's tables at this k: expert loads, or accuracy on clean or shifted images."""
    if column.quantity == "imbalance":
        return _imbalance(run, column.layer, top_k)
    shift = column.shift
    if shift == "clean":
        return finite(run.results().get(top_k or 0, {}).get("value"))
    for file in sorted(run.path.glob(f"robust-{shift}*.json")):
        record = read_object(file)
        if record.get("protocol", {}).get("split") == column.split:
            rows = (row for row in record.get("results", ()) if row.get("top_k") == top_k)
            if (mean := mean_of(row.get("value") for row in rows)) is not None:
                return mean
    return None


def _imbalance(run: RunRecord, layer: int | None, top_k: int | None) -> float | None:
    """Squared coefficient of variation of the expert loads on a run's own images: of a layer, or mean over layers."""
    found = [squared_variation(one) for one in (run.results().get(top_k or 0, {}).get("routers") or {}).values()]
    return mean_of(found if layer is None else found[layer : layer + 1])
