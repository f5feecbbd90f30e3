"""Published figures: one TOML file a paper, `papers/NAME.toml`, as printed there; each cell says which runs match it.

The file has the fields of `Paper`, `[[tables]]` with those of `PublishedTable`, in these columns and lines; "-" is a
value that is not in the paper. `[columns]` and `[routers]` hold lists by name: the name stands for the list then.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._grid import NONE

COUNTED = ("flops", "router_trainable", "fixed_a_layer", "backbone")
"""Quantities that follow from the model alone."""


@dataclass(frozen=True)
class Column:
    """A column of a published table.

    Attributes:
        name: as printed.
        top_k: experts a token; None: the line's, or all (k = N).
        split: of the data. attacked: on word-swapped text. task: instead of the table's data, and how many languages
            it is the mean over.
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
    languages: int = 0
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
        needs: data that a line without a figure of ours needs.
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
    needs: str = ""
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
    return {paper.name: paper for paper in (_read(tomllib.loads(file.read_text(encoding="utf-8"))) for file in files)}


def open_paper(name: str) -> Paper:
    """The paper of that name."""
    if name not in papers():
        raise RunError(f"paper {name!r}: {did_you_mean(name, papers())}")
    return papers()[name]


def _read(found: dict[str, Any]) -> Paper:
    """The content of a paper's file."""
    columns, routers = found.pop("columns", {}), found.pop("routers", {})

    def shared(value: Any, named: Mapping[str, Any]) -> Any:
        """A list as it is; a name stands for the list of that name."""
        return named[value] if isinstance(value, str) else value

    def table(values: dict[str, Any]) -> PublishedTable:
        shown = tuple(Column(**column) for column in shared(values.pop("columns"), columns))
        lines = []
        for line in values.pop("lines"):
            printed = tuple(None if value == NONE else value for value in line.pop("values"))
            lines.append(Line(values=printed, routers=tuple(shared(line.pop("routers", ()), routers)), **line))
        tuples: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("presets", "free") if name in values}
        note = values.pop("note", "").strip()
        return PublishedTable(columns=shown, lines=tuple(lines), note=note, **tuples, **values)

    return Paper(**{**found, "tables": tuple(table(values) for values in found["tables"])})
