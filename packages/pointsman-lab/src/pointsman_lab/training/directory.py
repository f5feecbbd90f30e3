"""The directory of one run: who may work in it, and its JSON files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman.routers.frame.registry import has_one_k
from pointsman_lab._files import is_taken, read_text, read_whole_json, within, write_whole
from pointsman_lab._values import finite, name_fault
from pointsman_lab.registry import read_vocabulary
from pointsman_lab.runs.checkpoints import Checkpoint, CheckpointError, open_checkpoint, steps_of
from pointsman_lab.runs.imports import check_origin
from pointsman_lab.runs.paths import CHECKPOINTS, COMPARISON, CONFIG, ENVIRONMENT, METRICS, VOCABULARY
from pointsman_lab.runs.record import read_metrics, refuse_model
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.settings import flat, without_effect

ELSEWHERE = "choose another --out, or move this folder away"


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = within(self.path, CHECKPOINTS)

    @property
    def exists(self) -> bool:
        return (self.path / CONFIG).exists()

    def config(self) -> RunConfig:
        """The run's settings; RunError also where the code of its router has changed since."""
        refuse_model(self.path)
        file = self.path / CONFIG
        try:
            config = RunConfig.from_json(read_text(file), str(file))
        except (FileNotFoundError, NotADirectoryError):
            if (self.path / COMPARISON).is_file():
                runs = self.path / "runs" / "ROUTER" / "seed-S"
                raise RunError(f"{self.path} is a comparison, not a run: name one of its runs, {runs}") from None
            raise RunError(f"{self.path} is no run directory: it has no {CONFIG}") from None
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror or error}") from None
        check_origin(self.path, (self.read_json(ENVIRONMENT) or {}).get("origin"), config.model.router)
        return config

    def claim(self, config: RunConfig, *, resume: bool) -> None:
        """Writes config.json: from now on this is the directory of the run with these settings."""
        self.check(config, resume=resume)
        write_whole(self.path / CONFIG, config.to_json())

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Checks that the run with these settings may work here; writes nothing."""
        if fault := name_fault(str(self.path)):
            raise RunError(f"{str(self.path)!r}: {fault}")
        if self.exists:
            if differing := self.config().differing(config):
                told = "; ".join(f"{name} is {here!r} there, {ours!r} here" for name, (here, ours) in differing.items())
                raise RunError(f"{self.path} holds a run of another configuration: {told}; {ELSEWHERE}")
            if not resume:
                done = max(steps_of(self.checkpoints), default=0)
                there = f"{self.path} holds this run already, saved at step {done} of {config.steps}"
                raise RunError(f"{there}: --resume (of finetune: the same command) goes on, another --out starts anew")
        elif steps_of(self.checkpoints):
            foreign = f"has checkpoints but no {CONFIG}: it is damaged or foreign"
            raise RunError(f"{self.path} {foreign}; {ELSEWHERE}")
        elif self.path.is_dir() and any(not entry.name.startswith(".") for entry in self.path.iterdir()):
            raise RunError(f"{self.path} is not empty and holds no run; {ELSEWHERE}")

    def check_kept(self) -> None:
        """RunError where the claimed directory is not there any more: what is written now could not be resumed."""
        taken = is_taken(self.path)
        told = "another process works there" if taken else f"it has no {CONFIG}"
        if taken or not self.exists:
            raise RunError(f"{self.path} was removed or renamed while the run trained: {told}; nothing more is saved")

    def foreign(self, config: RunConfig, checkpoint: Checkpoint) -> str | None:
        """Why a checkpoint is another run's, by its settings; None if it may be this one's. Data have a fingerprint."""
        saved, free = flat(checkpoint.state.get("config", {})), without_effect(config.model.family) | {"data", "format"}
        for name, value in flat(config.to_dict()).items():
            if name not in free and saved.get(name, value) != value:
                return f"its {name} is {saved[name]!r}, not {value!r} as in {CONFIG}"
        return None

    def open(self, config: RunConfig, step: int) -> Checkpoint:
        """The checkpoint of this step; CheckpointError where it is damaged or another run's."""
        checkpoint = open_checkpoint(self.checkpoints / f"step-{step}")
        if told := self.foreign(config, checkpoint):
            raise CheckpointError(f"checkpoint {checkpoint.path} is foreign: {told}")
        return checkpoint

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        write_whole(self.path / name, json.dumps(values, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of this run; None where it is missing or damaged."""
        return read_whole_json(self.path / name)

    def vocabulary(self) -> Any:
        """What the run's token ids or labels stand for: what its task reads from vocabulary.json."""
        file = self.path / VOCABULARY
        try:
            text = read_text(file)
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror or error}") from None
        try:
            return read_vocabulary(text)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged: {error}") from None

    def metrics(self, *kinds: str) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl of these kinds; all rows where no kind is given."""
        return list(read_metrics(self.path / METRICS, *kinds))

    def chosen_step(self, config: RunConfig, last: int) -> int:
        """Whose weights are evaluated of a run saved at step `last`: that step's, or with choose="best-valid" those of
        the largest validation figure, the first of equals. A run that is killed and resumed chooses the same.

        Raises:
            CheckpointError: metrics.jsonl has lost a validation.
        """
        if config.choose == "last":
            return last
        k, every = validated_k(config), max(1, config.validate_every or last)
        rows = [row for row in self.metrics("valid") if row.get("top_k") == k]
        had = {row.get("step") for row in rows}
        if lost := next((step for step in range(every, last, every) if step not in had), None):
            told = f"has no validation of step {lost} at k = {k}: nothing says which step's weights are the best"
            raise CheckpointError(f"{self.path / METRICS} {told}")
        rows = [row for row in rows if finite(row.get("value")) is not None]
        rows = [row for row in rows if (step := finite(row.get("step"))) is not None and step <= last]
        return max(rows, key=lambda row: (row["value"], -row["step"]))["step"] if rows else last


def validated_k(config: RunConfig) -> int:
    """The k that weights are chosen by: that of training, of a schedule the last; of a baseline its experts."""
    return config.model.num_experts if has_one_k(config.model.router) else config.top_k_schedule.high
