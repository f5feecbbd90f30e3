"""metrics.jsonl: one JSON object a line, each with "kind" and "step"."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pointsman._files import disk_errors, open_new, parse_json, read_lines, write_whole
from pointsman._shapes import METRICS_ROW, is_shaped


def read_metrics(file: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The rows of these kinds (of every kind where none is given), in file order; no rows where there is no file.

    A line that is not a whole row is skipped: a killed run may leave one at the end.
    """
    try:
        for line in read_lines(file):
            try:
                row = parse_json(line.decode("utf-8", "replace"))
            except ValueError:
                continue
            if is_shaped(row, METRICS_ROW) and row["step"] >= 0 and (not kinds or row["kind"] in kinds):
                yield row
    except (FileNotFoundError, NotADirectoryError):
        return


class MetricsFile:
    """metrics.jsonl, open for appending. Rows after `step` are removed first: the run resumes from that step.

    Attributes:
        rows: all rows that the file holds.
    """

    def __init__(self, file: Path, step: int) -> None:
        self.rows = [row for row in read_metrics(file) if row["step"] <= step]
        self._file = file
        write_whole(file, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._opened = open_new(file, os.O_APPEND)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with disk_errors(self._file, "lines of metrics were not written"):
            for row in rows:
                self.rows.append(dict(row))
                self._opened.write(f"{json.dumps(row)}\n".encode())
            self._opened.flush()

    def sync(self) -> None:
        """Waits until the disk has the rows: call it before a checkpoint that follows them."""
        with disk_errors(self._file, "lines of metrics were not written"):
            os.fsync(self._opened.fileno())

    def close(self) -> None:
        with disk_errors(self._file, "lines of metrics were not written"):
            self._opened.close()
