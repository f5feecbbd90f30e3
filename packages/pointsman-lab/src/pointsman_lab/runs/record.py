"""A run as its directory describes it: settings, environment, metrics, results. A damaged file is refused by name."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import disk_errors, open_new, parse_json, read_json, read_lines, read_text, write_whole
from pointsman_lab._shapes import METRICS_ROW, is_shaped
from pointsman_lab._values import finite, mean_of
from pointsman_lab.runs.paths import AUDIT, CONFIG, DIAGNOSTICS, ENVIRONMENT, EVALUATION, EXPLORER, METRICS


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
        lost: how many lines before the last row were no rows; they are removed, too.
    """

    def __init__(self, file: Path, step: int) -> None:
        found = list(read_metrics(file))
        lines = list(read_lines(file)) if file.exists() else []
        self.lost = len(lines) - len(found) - sum(not line.endswith(b"}\n") for line in lines[-1:])
        self.rows = [row for row in found if row["step"] <= step]
        self._file = file
        self._begin()

    def _begin(self) -> None:
        write_whole(self._file, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._opened = open_new(self._file, os.O_APPEND)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with disk_errors(self._file, "lines of metrics were not written"):
            for row in rows:
                self.rows.append(dict(row))
                self._opened.write(f"{json.dumps(row)}\n".encode())
            self._opened.flush()

    def sync(self) -> None:
        """Waits until the disk has the rows: call it before a checkpoint that follows them.

        Where somebody has removed or replaced the file, all rows are written again.
        """
        with disk_errors(self._file, "lines of metrics were not written"):
            os.fsync(self._opened.fileno())
            there = self._file.exists() and os.path.samestat(self._file.stat(), os.fstat(self._opened.fileno()))
            if not there:
                self._opened.close()
                self._begin()

    def close(self) -> None:
        with disk_errors(self._file, "lines of metrics were not written"):
            self._opened.close()


def is_current(
    record: Mapping[str, Any] | None, *, step: int, protocol: Mapping[str, Any], split: str, top_k: Iterable[int]
) -> bool:
    """Whether evaluation.json is of this step, this split, exactly these k, and has these entries of the protocol."""
    if record is None or record.get("checkpoint") != f"step-{step}":
        return False
    found, results = record.get("protocol", {}), record.get("results", [])
    return (
        all(found.get(key) == value for key, value in protocol.items())
        and {result["top_k"] for result in results} == set(top_k)
        and all(result.get("split") == split for result in results)
    )


def over_layers(result: Mapping[str, Any], name: str) -> float | None:
    """A figure of the routers ("entropy", "experts_per_token"), mean over layers; None where there is none."""
    return mean_of(layer.get(name) for layer in (result.get("routers") or {}).values())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} where there is no such file; RunError where it is damaged."""
    return read_json(path) or {}


def is_model(folder: Path) -> bool:
    """Whether this is the folder of a Hugging Face model, which has a config.json, too."""
    try:
        found = parse_json(read_text(folder / CONFIG, "replace"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found and "model" not in found


def refuse_model(folder: Path) -> None:
    """RunError for the folder of a Hugging Face model: what can be done with it."""
    if is_model(folder):
        told = f"`pointsman audit {folder}` measures its routing and its loss at every k"
        told += "; `pointsman hf --help` says how to change its routers"
        raise RunError(f"{folder} is a Hugging Face model, not a run: {told}")


@dataclass(frozen=True)
class RunRecord:
    """A run without its weights.

    Attributes:
        path: the run directory.
        router: the spec, which labels its row; several specs are joined by '|'.
        seed: of the run.
        config, environment, evaluation, diagnostics, explorer: the files of these names; {} where there is none.
        aside: where explorer.json is, of a run whose own folder is only read.
    """

    path: Path
    router: str
    seed: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    aside: Path | None = None

    @property
    def done(self) -> bool:
        return bool(self.evaluation.get("results"))

    @property
    def is_audit(self) -> bool:
        """Whether this is the audit of a Hugging Face model (`pointsman audit`), not a run of ours."""
        return (self.path / AUDIT).is_file()

    @property
    def diagnostics(self) -> dict[str, Any]:
        return read_object(self.path / DIAGNOSTICS)

    @property
    def explorer(self) -> dict[str, Any]:
        return read_object((self.aside or self.path) / EXPLORER)

    @property
    def steps(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def family(self) -> str | None:
        """Of the model; None where config.json names none (an older run's)."""
        value = self.config.get("model", {}).get("family")
        return value if isinstance(value, str) else None

    @property
    def num_experts(self) -> int | None:
        value = self.config.get("model", {}).get("num_experts")
        return value if isinstance(value, int) else None

    def metrics(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Rows of metrics.jsonl of these kinds, in file order."""
        return read_metrics(self.path / METRICS, *kinds)

    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 where there is none."""
        return max((int(step) for row in self.metrics("train") if (step := finite(row.get("step")))), default=0)

    def results(self, split: str = "test") -> dict[int, Mapping[str, Any]]:
        """Results without an attack, by k: those of `split`, or of the first split where it has no such."""
        rows = [row for row in self.evaluation.get("results", ()) if isinstance(row, dict) and not row.get("attack")]
        splits = [row.get("split") for row in rows]
        wanted = split if split in splits else (splits[0] if splits else None)
        return {int(row["top_k"]): row for row in rows if row.get("split") == wanted and finite(row.get("top_k"))}


def label(router: Any) -> str:
    """A router setting (a spec, or a list of specs) as one spec."""
    return " ".join(("|".join(map(str, router)) if isinstance(router, list | tuple) else str(router)).split())


def read_run(path: Path) -> RunRecord:
    """Reads a run directory; RunError where it is none."""
    refuse_model(path)
    config = read_object(path / CONFIG)
    if not config:
        raise RunError(f"{path}: no run directory (it has no {CONFIG})")
    router = label((config.get("model") or {}).get("router", "-"))
    evaluation = read_object(path / EVALUATION)
    return RunRecord(path, router, config.get("seed", 0), config, read_object(path / ENVIRONMENT), evaluation)
