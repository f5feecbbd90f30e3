"""Published figures: one TOML file a paper, `papers/NAME.toml`, as printed there; each cell says which runs match it.

name, citation, link
[columns]  name = [column, …]           columns that several tables share
[routers]  name = [spec, …]             specs that several lines share
[[tables]] number, title, metric, columns = [column, …] or a name, lines = [line, …], and optionally
           data, presets, steps, note, decimals, free = ["frozen", "balance"], trained_k
column     name, and optionally top_k, split, attacked, task, shift, layer, language, quantity
line       label, values = [number or "-", …], and optionally routers = [spec, …] or a name, top_k, frozen, balance
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman._files import read_ordinary
from pointsman._grid import NONE
from pointsman._shapes import check_shape
from pointsman._values import finite, typed_fields
from pointsman_lab.report.cell import METRICS, Metric

_SHAPE = {
    "name": str, "link": str, "columns": {"*": [dict]}, "routers": {"*": [str]},
    "tables": [{"number": str, "note": str, "columns": list | str, "lines": [{"values": list, "routers": list | str}]}],
}  # fmt: skip
COUNTED = ("flops", "router_trainable", "fixed_a_layer", "backbone")
"""Quantities that follow from the model alone."""

QUANTITIES = ("value", "entropy", "exact_match", "f1_xtreme", "average", "imbalance", "none", *COUNTED)

OWN_METRICS = {
    metric.name: metric
    for metric in (
        Metric("entropy", "entropy", decimals=4),
        Metric("flops", "FLOPs (1e10)", decimals=3),
        Metric("parameters", "parameters", decimals=0),
        Metric("ratio", "ratio", decimals=3),
        Metric("imbalance", "squared coefficient of variation", decimals=3),
    )
}
"""Metrics that only published tables have."""


@dataclass(frozen=True)
class Column:
    """A column of a published table.

    Attributes:
        name: as printed.
        top_k: experts a token; None: the line's, or all (k = N).
        split: of the data. attacked: on word-swapped text. task: instead of the table's data.
        shift: of a run on images: "clean", its own test images, or a kind of `evaluate RUN --robust`.
        layer: for a quantity of one router, counted from 0.
        language: the figure is that of this language (of translation: of the source).
        quantity: "value" (the table's metric), "entropy", "exact_match", "f1_xtreme", "average" (`cells.average`
            of the other columns), "imbalance" (of the expert loads of a run on images), one of `COUNTED`, or "none":
            not in any run directory.
    """

    name: str
    top_k: int | None = None
    split: str = "test"
    attacked: bool = False
    task: str | None = None
    shift: str | None = None
    layer: int | None = None
    language: str | None = None
    quantity: str = "value"


@dataclass(frozen=True)
class Line:
    """A line of a published table.

    Attributes:
        label, values: as printed; None: not in the paper.
        routers: our specs that count as this router.
        top_k: where the column does not say.
        frozen, balance: fine-tuned with the router frozen, with this weight of the balance loss.
    """

    label: str
    values: tuple[float | None, ...]
    routers: tuple[str, ...] = ()
    top_k: int | None = None
    frozen: bool = False
    balance: float | None = None


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        number: as in the paper. title: what it shows, in our words. metric: its name.
        columns, lines: the table.
        data: the corpus of matching runs; None: that of each column's task.
        presets: names of presets and recipes with the paper's model and schedule. steps: of its training.
        note: what a reader must know.
        decimals: printed at least.
        free: what lines say nothing of: "frozen", "balance". Fine-tunings of every kind match then, each in a row of
            its own.
        trained_k: figures are at the k of training; a column with a k takes runs trained with that k.
    """

    number: str
    title: str
    metric: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    data: str | None = None
    presets: tuple[str, ...] = ()
    steps: int | None = None
    note: str = ""
    decimals: int = 2
    free: tuple[str, ...] = ()
    trained_k: bool = False


@dataclass(frozen=True)
class Paper:
    """A paper: how it is cited, where it is, and its tables."""

    name: str
    citation: str
    link: str
    tables: tuple[PublishedTable, ...]


@cache
def papers() -> Mapping[str, Paper]:
    """All papers of the package, by name."""
    folder = resources.files("pointsman_lab.report").joinpath("papers")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    found = [parse_paper(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {paper.name: paper for paper in found}


def open_paper(name: str) -> Paper:
    """The paper of that name, or of a file of your own, called `*.toml`.

    Raises:
        RunError: an unknown name (with the nearest one), or a file that is not in the format.
    """
    if name.endswith(".toml"):
        try:
            return parse_paper(read_ordinary(Path(name)).decode(), name)
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{name} cannot be read: {error}") from None
    if name not in papers():
        raise RunError(f"paper {name!r}: {did_you_mean(name, papers())}")
    return papers()[name]


def parse_paper(text: str, where: str) -> Paper:
    """A paper's TOML file, checked.

    Args:
        where: the file's name, for errors.

    Raises:
        RunError: not TOML, an unknown or missing key, a value of another type, or lines that do not fit the columns.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{where} is not TOML: {error}") from None
    check_shape(found, _SHAPE, where)
    columns, routers = found.pop("columns", {}), found.pop("routers", {})
    tables = []
    for place, values in enumerate(found.pop("tables", ()), 1):
        at = f"{where}, {values.get('number', f'table {place}')}"
        for i, line in enumerate(values.get("lines", ()), 1):
            line["values"] = tuple(_value(value, f"{at}, line {i}") for value in line.get("values", ()))
            line["routers"] = _shared(line.get("routers", []), routers, f"{at}, line {i}: routers")
        values["columns"] = _shared(values.get("columns", []), columns, f"{at}: columns")
        values["note"] = values.get("note", "").strip()
        for name, kind in (("columns", Column), ("lines", Line)):
            each = enumerate(values.get(name, ()), 1)
            of = [typed_fields(kind, one, f"{at}, {name[:-1]} {i}: ", leave=("values",)) for i, one in each]
            values[name] = tuple(kind(**one) for one in of)
        table = PublishedTable(**typed_fields(PublishedTable, values, f"{at}: ", leave=("columns", "lines")))
        _check(table, at)
        tables.append(table)
    paper = Paper(**typed_fields(Paper, {**found, "tables": tuple(tables)}, f"{where}: ", leave=("tables",)))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", paper.name):  # files are called so
        raise RunError(f"{where}: name {paper.name!r}: allowed are letters, digits, '.', '_' and '-'")
    if not paper.link.startswith(("https://", "http://")):
        raise RunError(f"{where}: link {paper.link!r}: allowed are addresses that begin with https:// or http://")
    return paper


def _shared(value: Any, named: Mapping[str, Any], where: str) -> Any:
    """A list as it is; a name stands for the list of that name."""
    if isinstance(value, str) and value not in named:
        raise RunError(f"{where}: {value!r}: {did_you_mean(value, named)}")
    return named[value] if isinstance(value, str) else value


def _value(value: Any, where: str) -> float | None:
    if value == NONE or finite(value) is not None:
        return None if value == NONE else value
    raise RunError(f"{where}: value {value!r}: allowed are numbers and {NONE!r}")


def _check(table: PublishedTable, where: str) -> None:
    for line in table.lines:
        if len(line.values) != len(table.columns):
            raise RunError(f"{where}, {line.label}: {len(line.values)} values for {len(table.columns)} columns")
    for name, value, allowed in (
        ("metric", table.metric, [*METRICS, *OWN_METRICS]),
        *(("quantity", column.quantity, QUANTITIES) for column in table.columns),
        *(("split", column.split, ("valid", "test")) for column in table.columns),
        *(("free", name, ("frozen", "balance")) for name in table.free),
    ):
        if value not in allowed:
            raise RunError(f"{where}: {name} {value!r}: {did_you_mean(value, allowed)}")
