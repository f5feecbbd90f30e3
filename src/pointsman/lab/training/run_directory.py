"""The run directory: who the run is, where it ran, what it measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman._files import disk_errors, open_own, read_json_or_none, read_text, within, write_whole
from pointsman.lab.data import Corpus, Vocabulary, load_corpus
from pointsman.lab.data.download import Progress as DownloadProgress
from pointsman.lab.training.checkpoint import steps_of
from pointsman.lab.training.config import NO_EFFECT_ON_TRAINING, RunConfig, differing_settings

CONFIG, ENVIRONMENT, METRICS, EVALUATION = "config.json", "environment.json", "metrics.jsonl", "evaluation.json"
VOCABULARY, CHECKPOINTS, TENSORBOARD = "vocabulary.json", "checkpoints", "tensorboard"


class RunDirectory:
    """The files of one run.

    Attributes:
        path: the folder.
        checkpoints: its folder of checkpoints.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = within(self.path, CHECKPOINTS)

    @property
    def exists(self) -> bool:
        return (self.path / CONFIG).exists()

    def config(self) -> RunConfig:
        """The run's settings.

        Raises:
            RunError: there is no run here, or its config.json is damaged.
        """
        file = self.path / CONFIG
        try:
            return RunConfig.from_json(read_text(file), str(file))
        except (FileNotFoundError, NotADirectoryError):
            if (self.path / "comparison.json").is_file():
                runs = self.path / "runs" / "ROUTER" / "seed-S"
                raise RunError(f"{self.path} is a comparison, not a run: name one of its runs, {runs}") from None
            raise RunError(f"{self.path} is no run directory: it has no {CONFIG}") from None
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror or error}") from None

    def claim(self, config: RunConfig, *, resume: bool) -> None:
        """Makes this the directory of the run with these settings.

        Raises:
            RunError: what `check` raises; the folder cannot be written.
        """
        self.check(config, resume=resume)
        write_whole(self.path / CONFIG, config.to_json())

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Whether the run with these settings may work here; writes nothing.

        Raises:
            RunError: a run with other settings lives here (names them), or one with the same and `resume` is false;
                something else lives here.
        """
        if self.exists:
            differing = {
                name: values
                for name, values in differing_settings(self.config(), config).items()
                if name not in NO_EFFECT_ON_TRAINING
            }
            if differing:
                told = "; ".join(f"{name} is {here!r} there, {ours!r} here" for name, (here, ours) in differing.items())
                raise RunError(f"{self.path} holds a run of another configuration: {told}; choose another --out")
            if not resume:
                done = max(steps_of(self.checkpoints), default=0)
                raise RunError(
                    f"{self.path} holds this run already, saved at step {done} of {config.steps}: "
                    "--resume goes on, another --out starts anew"
                )
        elif steps_of(self.checkpoints):
            raise RunError(
                f"{self.path} has checkpoints but no {CONFIG}: it is damaged or foreign; choose another --out"
            )
        elif self.path.is_dir() and any(not entry.name.startswith(".") for entry in self.path.iterdir()):
            raise RunError(f"{self.path} is not empty and holds no run; choose another --out")

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        write_whole(self.path / name, json.dumps(values, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of this run; None where it is missing or not whole."""
        return read_json_or_none(self.path / name)

    def vocabulary(self) -> Vocabulary:
        """What the run's token ids stand for."""
        file = self.path / VOCABULARY
        try:
            text = read_text(file)
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror or error}") from None
        try:
            return Vocabulary.from_json(text)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged: {error}") from None

    def metrics(self, *kinds: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of these kinds (all without any), a cut-off last one left out."""
        return [row for row in read_metrics(self.path / METRICS) if not kinds or row.get("kind") in kinds]


class Metrics:
    """metrics.jsonl: one JSON object a line, opened for appending after everything beyond `step` was cut off."""

    def __init__(self, file: Path, step: int) -> None:
        kept = [json.dumps(row) for row in read_metrics(file) if row["step"] <= step]
        self.rows = [json.loads(line) for line in kept]
        self._file = file
        write_whole(file, "".join(line + "\n" for line in kept))
        self._opened = os.fdopen(open_own(file, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with disk_errors(self._file, "lines of metrics were not written"):
            for row in rows:
                self.rows.append(dict(row))
                self._opened.write(json.dumps(row) + "\n")
            self._opened.flush()

    def sync(self) -> None:
        """What was written outlives a machine that stops: before a checkpoint that follows it."""
        with disk_errors(self._file, "lines of metrics were not written"):
            os.fsync(self._opened.fileno())

    def has(self, kind: str, step: int) -> bool:
        return any(row["kind"] == kind and row["step"] == step for row in reversed(self.rows))

    def close(self) -> None:
        with disk_errors(self._file, "lines of metrics were not written"):
            self._opened.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file."""
    try:
        lines = read_text(file, errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off when the machine stopped
        if isinstance(row, dict) and isinstance(row.get("step"), int) and "kind" in row:
            rows.append(row)
    return rows


def environment(device: torch.device, kernels: Mapping[str, str]) -> dict[str, Any]:
    """Versions, machine and kernels: what decides about a run's last bits, and what a reader of its times needs."""
    packages: dict[str, str | None] = {}
    for name in ("pointsman", "torch", "numpy", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "format": 1,
        "python": sys.version.split()[0],
        "packages": packages,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "kernels": dict(kernels),
        "commit": _commit(),
    }


DECIDES_BITS = ("packages", "machine", "processor", "threads", "device", "device_name")
"""What must agree for a resumed run to equal an unbroken one bit for bit."""


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _commit() -> str | None:
    """The commit of the source that runs, if it is a checkout."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def open_corpus(spec: str, *, vocabulary: Vocabulary | None = None, progress: DownloadProgress | None = None) -> Corpus:
    """`load_corpus` with the folder that POINTSMAN_DATA names."""
    folder = os.environ.get("POINTSMAN_DATA")
    return load_corpus(spec, data_dir=Path(folder) if folder else None, vocabulary=vocabulary, progress=progress)
