"""record.jsonl: the finished runs of a comparison in one compact file, a JSON line a run.

A line is `{"format": 2, "path": "runs/smoe/seed-0", "files": {…}}`. `files` holds what tables, page and claims read of
the run: settings, environment with versions, evaluation with its protocol, attacks and fine-tunings as they are,
diagnoses in four digits, and `metrics.jsonl` thinned to what a curve shows, by columns. Weights, vocabularies and
samples of the data (explorer) are left out. `restore` makes the run directories again for `compare`, in its
own folder; `restored_aside` makes them for those who only read. Tables come out identical.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab import _files
from pointsman_lab._shapes import METRICS_ROW, MOST_GROWTH, is_shaped, shape_of
from pointsman_lab.runs.paths import CONFIG, DIAGNOSTICS, EVALUATION, EXPLORER, METRICS, VOCABULARY, runs_in
from pointsman_lab.runs.record import read_metrics

FORMAT = 2
RECORD = "record.jsonl"
LEFT_OUT = (VOCABULARY, EXPLORER)
ROWS = {"train": 160, "routing": 60}
"""At most so many steps of a kind of metrics are kept, evenly spaced: as many points as the page's curves have."""
KEPT = {
    "train": ("kind", "step", "loss", "top_k"),
    "routing": ("kind", "step", "layer", "entropy", "load", "margin", "dead"),
}
"""Fields that are kept; of other kinds of rows all are."""
DIGITS = 4
_NAME = r"(?!\.\.?/)[^/\\:\x00-\x1f]+"
_RUN = re.compile(rf"runs/{_NAME}/seed-[0-9]+")
_FILE = re.compile(rf"(?:finetune/{_NAME}/seed-[0-9]+/)?([^/]+)")
"""Paths that a record may name: of a run in its comparison, and of a file in a run."""


def write_record(folder: Path) -> Path | None:
    """Writes record.jsonl of a comparison (`record_of`)."""
    text = record_of(folder)
    return _files.write_whole(folder / RECORD, text) if text else None


def record_of(folder: Path) -> str:
    """The record of a comparison: every finished run on the disk, and those that only record.jsonl knows."""
    entries = {entry["path"]: entry for entry in read_record(folder)}
    for run in runs_in(folder, "runs/*", EVALUATION):
        path = run.relative_to(folder).as_posix()
        if (run / CONFIG).is_file() and _RUN.fullmatch(path):
            entries[path] = {"path": path, "files": packed(run)}
    return "".join(line_of(entries[path]) + "\n" for path in sorted(entries))


def restore(folder: Path, into: Path | None = None) -> list[Path]:
    """Makes the run directories of record.jsonl that are not on the disk; each appears whole or not at all.

    Args:
        into: the folder that gets them; by default `folder` itself.
    """
    made = []
    for entry in read_record(folder):
        names = entry["path"].split("/")
        run = _files.within(into or folder, *names)
        if run.exists() or _files.within(folder, *names).exists():
            continue
        with (
            _files.disk_errors(run, "the run of the record was not restored"),
            _files.scratch_folder(run.parent) as scratch,  # new, so that no link in the folder is written through
        ):
            for name, content in entry["files"].items():
                file = scratch.joinpath(run.name, *name.split("/"))
                file.parent.mkdir(parents=True, exist_ok=True)
                with _files.open_new(file) as opened:
                    opened.write(written(content).encode())
            (scratch / run.name).replace(run)
        made.append(run)
    return made


_ASIDE: dict[tuple[str, int, int], Path] = {}
"""Path, size and time of a record -> where this process has restored it."""


def restored_aside(folder: Path) -> Path | None:
    """A temporary folder of this process with the runs of record.jsonl that are not in `folder`; None where none is.

    A folder that is read is not written to. Raises as `restore` does.
    """
    file = folder / RECORD
    if not file.is_file():
        return None
    status = file.lstat()
    key = (os.path.realpath(file), status.st_size, status.st_mtime_ns)
    if key not in _ASIDE:
        _ASIDE[key] = _files.temporary_folder() / Path(key[0]).parent.name  # errors name runs by their paths
        _ASIDE[key].mkdir()
    restore(folder, _ASIDE[key])
    return _ASIDE[key]


def read_record(folder: Path) -> Iterator[dict[str, Any]]:
    """The entries of record.jsonl, in file order, metrics as rows; none without the file."""
    file = folder / RECORD
    if file.is_file():
        yield from entries_of(_files.read_lines(file), file)


def entries_of(lines: Iterable[bytes], file: Path) -> Iterator[dict[str, Any]]:
    """The same of the lines of a record that `file` holds."""
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            entry = _files.parse_json(line.decode())
            if not isinstance(entry, dict) or entry.get("format") != FORMAT or not _is_whole(entry):
                raise ValueError
            columns = {name: content for name, content in entry["files"].items() if name.endswith(METRICS)}
            size = sum(map(_size_of_rows, columns.values()))
            if size <= MOST_GROWTH * len(line):
                rows = {name: from_columns(content) for name, content in columns.items()}
                if not all(is_shaped(row, METRICS_ROW) for of in rows.values() for row in of):
                    raise ValueError
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise RunError(f"{where}: no run of a record of format {FORMAT}; the file is damaged") from None
        if size > MOST_GROWTH * len(line):
            raise RunError(f"{where}: its metrics become more than {MOST_GROWTH} times as large")
        yield {**entry, "files": {**entry["files"], **rows}}


def _size_of_rows(columns: Iterable[Mapping[str, Any]]) -> int:
    """About how many characters the rows of `from_columns` have as JSON, beyond those of the columns."""
    repeated = (len(json.dumps([group["fields"], group["same"]])) for group in columns)
    return sum(size * len(group["each"]["step"]) for size, group in zip(repeated, columns, strict=True))


def packed(run: Path) -> dict[str, Any]:
    """File name -> content, of a run and of its fine-tunings: JSON objects, and lists of rows for metrics."""
    found: dict[str, Any] = {}
    for file in [*_files.find(run, "*.json"), *_files.find(run, "finetune/*/seed-*/*.json")]:
        name = file.relative_to(run).as_posix()
        if _is_kept(name) and (content := _files.read_json(file)) is not None:
            found[name] = rounded(content) if file.name == DIAGNOSTICS else content
    for file in [*_files.find(run, METRICS), *_files.find(run, f"finetune/*/seed-*/{METRICS}")]:
        if _is_kept(name := file.relative_to(run).as_posix()):
            config = found.get(file.with_name(CONFIG).relative_to(run).as_posix(), {})
            found[name] = thinned(read_metrics(file), config.get("steps"))
    return found


def thinned(rows: Iterable[Mapping[str, Any]], steps: int | None) -> list[dict[str, Any]]:
    """Rows of metrics, the last steps of equal stretches of the run, rounded; what is thin already stays as it is."""
    every = list(rows)
    last = max([steps or 1, *(int(row["step"]) for row in every)])
    kept: dict[tuple[str, int], int] = {}
    for row in every:
        if (kind := str(row["kind"])) in ROWS:
            kept[kind, math.ceil(int(row["step"]) * ROWS[kind] / last)] = int(row["step"])
    steps_kept = {(kind, step) for (kind, _), step in kept.items()}
    return [
        {key: rounded(value) for key, value in row.items() if row["kind"] not in KEPT or key in KEPT[str(row["kind"])]}
        for row in every
        if row["kind"] not in ROWS or (row["kind"], int(row["step"])) in steps_kept
    ]


def to_columns(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows by kind, layer and fields: `{"fields", "same": what all of them share, "each": {field: values}}` a group."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row.get("layer"), *row), []).append(row)
    columns = []
    for group in groups.values():
        first = group[0]
        same = {key: first[key] for key in first if key != "step" and all(row[key] == first[key] for row in group)}
        each = {key: [row[key] for row in group] for key in first if key not in same}
        columns.append({"fields": list(first), "same": same, "each": each})
    return columns


def from_columns(columns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `to_columns`, by step."""
    rows = [
        {key: group["same"][key] if key in group["same"] else group["each"][key][row] for key in group["fields"]}
        for group in columns
        for row in range(len(group["each"]["step"]))
    ]
    return sorted(rows, key=lambda row: row["step"])


def rounded(value: Any) -> Any:
    """Floats to four significant digits, in lists and objects too."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def line_of(entry: Mapping[str, Any]) -> str:
    files = {name: to_columns(of) if name.endswith(METRICS) else of for name, of in entry["files"].items()}
    line = {"format": FORMAT, "path": entry["path"], "files": files}
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False)


def _is_whole(entry: Mapping[str, Any]) -> bool:
    path, files = entry.get("path"), entry.get("files")
    if not isinstance(path, str) or not isinstance(files, dict) or not {CONFIG, EVALUATION} <= files.keys():
        return False
    shaped = (isinstance(of, list if name.endswith(METRICS) else dict) for name, of in files.items())
    return _RUN.fullmatch(path) is not None and all(map(_is_kept, files)) and all(shaped)


def _is_kept(name: str) -> bool:
    """Whether a record holds the file of this path in a run."""
    found = _FILE.fullmatch(name)
    return found is not None and (found[1] == METRICS or (found[1] not in LEFT_OUT and shape_of(found[1]) is not None))


def written(content: Any) -> str:
    if isinstance(content, list):
        return "".join(json.dumps(row) + "\n" for row in content)
    return json.dumps(content) + "\n"  # without indentation, which can make much of little
