"""Reads labelled texts from CSV, TSV, JSON lines and fastText files, plain or compressed with gzip."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import keys_of, parse_json
from pointsman_lab._shapes import MOST_LINE
from pointsman_lab.data.reading import open_unpacked, reading

TEXT_COLUMNS = ("text", "sentence", "review", "content", "utterance", "query", "question", "body", "document")
LABEL_COLUMNS = ("label", "category", "class", "intent", "target", "sentiment", "labels", "topic")
FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "fasttext"}
FASTTEXT_LABEL = "__label__"


@dataclass(frozen=True)
class Columns:
    """Column names of text and label; None: the first usual name in the file. `header`: the first row has the names."""

    text: str | None = None
    label: str | None = None
    header: bool = True


@dataclass(frozen=True)
class LabelledText:
    """One example, and its location for errors: "FILE, line 7"."""

    text: str
    label: str
    where: str


def format_of(path: Path) -> str | None:
    """The format by a file's ending, ignoring `.gz`; None if unknown."""
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return FORMATS.get(name.suffix.lower())


def read_labelled(path: Path, columns: Columns) -> list[LabelledText]:
    """The examples of a file, in order. Texts and labels are stripped."""
    kind = format_of(path)
    if kind is None:
        raise RunError(f"{path}: allowed are .csv, .tsv, .jsonl and fastText .txt files, also compressed as .gz")
    found: list[LabelledText] = []
    with (
        reading(path),
        _long_fields(),
        open_unpacked(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file,
    ):
        try:
            for line, text, label in _rows(_lines(file, path), kind, path, columns):
                where = f"{path}, line {line}"
                if not text.strip():
                    raise RunError(f"{where}: the text is empty: remove the row or add a text")
                if not label.strip():
                    raise RunError(f"{where}: the label is empty")
                found.append(LabelledText(text.strip(), label.strip(), where))
        except UnicodeDecodeError as error:
            raise RunError(f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
        except csv.Error as error:
            raise RunError(f"{path} is not a valid {kind.upper()} file: {error}") from None
    if not found:
        raise RunError(f"{path} contains no example")
    return found


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allows texts of any length; the default limit of csv is 131,072 characters."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _lines(file: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """The lines of a file, which may be packed, none longer than `MOST_LINE`."""
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), ""), 1):
        if len(line) > MOST_LINE:
            raise RunError(f"{path}, line {number}: more than {MOST_LINE:,} characters")
        yield line


def _rows(file: Iterator[str], kind: str, path: Path, columns: Columns) -> Iterator[tuple[int, str, str]]:
    if kind == "jsonl":
        return _json_rows(file, path, columns)
    if kind == "fasttext":
        return _fasttext_rows(file, path)
    return _table_rows(file, kind, path, columns)


def _table_rows(file: Iterator[str], kind: str, path: Path, columns: Columns) -> Iterator[tuple[int, str, str]]:
    if kind == "tsv":  # in the published files quotes are text
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(file, strict=True)
    header: list[str] = []
    text_at, label_at = 0, 1
    if columns.header:
        header = [name.strip() for name in next(rows, [])]
        text_at, label_at = (header.index(name) for name in _names(header, path, columns))
    for row in rows:
        if not row:
            continue
        if len(row) <= max(text_at, label_at):
            raise RunError(f"{path}, line {rows.line_num}: {len(row)} columns; text or label is missing")
        if header and any(row[len(header) :]):
            how = "a text has a tab" if kind == "tsv" else "quote a text that has commas"
            raise RunError(f"{path}, line {rows.line_num}: {len(row)} columns; the header names {len(header)}: {how}")
        yield rows.line_num, row[text_at], row[label_at]


def _json_rows(file: Iterator[str], path: Path, columns: Columns) -> Iterator[tuple[int, str, str]]:
    names: tuple[str, str] | None = None
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row: Any = parse_json(line)
        except json.JSONDecodeError:
            raise RunError(f"{path}, line {number}: not JSON") from None
        except ValueError as error:
            raise RunError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, Mapping):
            raise RunError(f"{path}, line {number}: a JSON object is needed, with text and label")
        keys = keys_of(line)
        if twice := [key for key in row if keys.count(key) > 1]:
            raise RunError(f"{path}, line {number}: the key {twice[0]!r} is there twice: leave one")
        names = names or _names([str(key) for key in row], path, columns)
        text, label = (row.get(name) for name in names)
        if not isinstance(text, str) or label is None or isinstance(label, list | dict | float):
            needed = f"{names[0]!r} must be a text and {names[1]!r} a text or whole number"
            raise RunError(f"{path}, line {number}: {needed}")
        yield number, text, str(label)


def _fasttext_rows(file: Iterator[str], path: Path) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        label, *text = line.split(maxsplit=1)
        if not label.startswith(FASTTEXT_LABEL):
            found = f"a fastText line begins with {FASTTEXT_LABEL}NAME, found {label[:20]!r}"
            raise RunError(f"{path}, line {number}: {found}")
        if text and text[0].startswith(FASTTEXT_LABEL):  # it would be read as text
            raise RunError(f"{path}, line {number}: several labels; a text has one")
        yield number, text[0] if text else "", label.removeprefix(FASTTEXT_LABEL)


def _names(header: Sequence[str], path: Path, columns: Columns) -> tuple[str, str]:
    """The text and the label column of a header."""
    text = _column(header, columns.text, TEXT_COLUMNS)
    label = _column(header, columns.label, LABEL_COLUMNS)
    if text is None or label is None:
        need_text, need_label = columns.text or " | ".join(TEXT_COLUMNS), columns.label or " | ".join(LABEL_COLUMNS)
        missing = " and ".join(name for name, at in (("text", text), ("label", label)) if at is None)
        shown = ", ".join(repr(name[:30]) for name in header[:8]) or "none"
        raise RunError(
            f"{path}: no {missing} column: found {shown}; needed: {need_text}, and {need_label} "
            "(or name them: PATH:text=COLUMN:label=COLUMN)"
        )
    if text == label:
        raise RunError(f"{path}: the column {text!r} cannot be both text and label: name two")
    for name in (text, label):
        if header.count(name) > 1:
            raise RunError(f"{path}: {header.count(name)} columns are called {name!r}: leave one, or rename the others")
    return text, label


def _column(header: Sequence[str], wanted: str | None, usual: Sequence[str]) -> str | None:
    if wanted is not None:
        return wanted if wanted in header else None
    by_lower = {name.lower(): name for name in reversed(header)}
    return next((by_lower[name] for name in usual if name in by_lower), None)
