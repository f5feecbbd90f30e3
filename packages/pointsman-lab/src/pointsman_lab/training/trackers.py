"""The lines of metrics.jsonl as scalars of TensorBoard, wandb and trackio, through their own libraries."""

import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, needing
from pointsman.diagnostics.monitor import scalars
from pointsman_lab._files import within
from pointsman_lab.runs.paths import TENSORBOARD

PROJECT = "pointsman"


class TensorBoard:
    """Event files in the run directory; what an interrupted run wrote beyond `step` is dropped by the viewer."""

    def __init__(self, folder: Path, step: int) -> None:
        with needing("tensorboard is not installed", "track"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(within(folder, TENSORBOARD)), purge_step=step + 1 if step else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class Library:
    """wandb or trackio: a run in the project "pointsman", which --resume continues.

    Both read their own environment variables (WANDB_MODE, WANDB_PROJECT, TRACKIO_DIR, …). A run that was stopped sends
    no step twice; one that was killed sends those since its last checkpoint again.
    """

    def __init__(self, name: str, folder: Path, label: str, settings: Mapping[str, Any]) -> None:
        library = find_library(name)
        key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        try:
            with redirect_stdout(sys.stderr):  # the tables of a command have standard output for themselves
                own: dict[str, Any] = {"name": f"{label} ({key})", "embed": False}
                if name == "wandb":
                    quiet = library.Settings(console="off")
                    own = {"name": label, "id": key, "dir": str(folder), "settings": quiet}
                self._run = library.init(project=PROJECT, resume="allow", config=dict(settings), **own)
        except Exception as error:  # each library has its own types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RunError(f"{name} does not begin: {reason}; without --track {name} nothing is sent") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def find_library(name: str) -> Any:
    """wandb or trackio; RunError where it is not installed."""
    with needing(f"{name} is not installed", "track"):
        return importlib.import_module(name)


def tracked(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Lines of metrics.jsonl of one step as tag -> value."""
    values: dict[str, Any] = dict(scalars([dict(row) for row in rows if row["kind"] == "routing"]))
    for row in rows:
        if row["kind"] == "train":
            names = ("loss", "bits", "top_k", "learning_rate", "gradient_norm", "tokens_per_second", "overhead")
            values |= {f"train/{name}": row[name] for name in names}
        elif row["kind"] == "valid":
            values[f"valid/{row['metric']}/k={row['top_k']}"] = row["value"]
    return {tag: value for tag, value in values.items() if value is not None}
