"""A saved run, opened again: its settings, its model and what its tokens stand for."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman_lab.data.download import DataProgress
from pointsman_lab.models.config import build_model
from pointsman_lab.runs.checkpoints import CheckpointError, steps_of, whole_checkpoint
from pointsman_lab.runs.comparison import read_plan, saved_runs
from pointsman_lab.runs.paths import FINETUNE, VOCABULARY, run_path
from pointsman_lab.training.checkpoint import fitting_model
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.task import Task, pretraining_task

TRIES = 20
"""How often a run is opened whose training goes on, and removes old checkpoints meanwhile."""


@dataclass(frozen=True)
class Run:
    """A saved run.

    Attributes:
        path: the run directory.
        config: its settings; `with using(run.config.kernels):` computes the bits of its training.
        step: the step of the checkpoint that the weights are from.
        model: with these weights, in evaluation mode.
        vocabulary: what token ids or labels stand for.
        finetuning: the content of finetune.json; empty for a pre-trained run.
        data: the fingerprint of what it was trained on; None where its checkpoint does not say.
    """

    path: Path
    config: RunConfig
    step: int
    model: Any
    vocabulary: Any
    finetuning: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None

    @property
    def context(self) -> int:
        """The longest text that the model is meant for: the setting of a decoder, else what it has been run with."""
        config = self.config
        meant = getattr(config.model, "context_length", None)
        trained = config.segment_length + config.memory_length
        return int(meant or max(trained, config.eval_segment_length + config.eval_memory_length))

    @property
    def last_top_k(self) -> int:
        """k of the last step of training."""
        return self.config.top_k_schedule(max(self.config.steps - 1, 0))

    @property
    def sparse(self) -> bool:
        """Whether the model has a router."""
        return any(True for _ in named_routers(self.model))

    def autocast(self) -> torch.autocast:
        """The precision that the settings ask for, on the model's device."""
        return autocast(self.config, next(self.model.parameters()).device)

    def task(self, spec: str | None = None, progress: DataProgress | None = None) -> Task:
        """What the run was trained on, or other data, in the run's vocabulary.

        Raises:
            RunError: its own data, with their training part, are not those of its training.
        """
        config = self.config if spec is None else self.config.with_overrides({"data": spec})
        task = pretraining_task(config, progress, self.vocabulary)
        if spec is None and task.whole and self.data not in (None, task.fingerprint):
            differ = "its data here are not those of its training: files are other or missing"
            raise RunError(f"{self.path}: {differ}; with --data {config.data} they are read as other data")
        return task


def load_run(
    path: Path | str,
    *,
    step: int | None = None,
    device: str = "cpu",
    note: Callable[[str], None] | None = None,
    build: Callable[[RunConfig], Any] = lambda config: build_model(config.model),
    finetuning: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """Opens a run directory: the weights of its last whole checkpoint, or of the one at `step`.

    With choose="best-valid" those that its validations chose up to the last one.

    Args:
        note: told of damaged checkpoints that were passed over.
        build: of a fine-tuned run (`finetuning.open_run`). finetuning: likewise.

    Raises:
        RunError: it is no run directory, a fine-tuned run's, has no whole checkpoint, or its vocabulary is damaged.
        CheckpointError: the checkpoint asked for is damaged or foreign.
    """
    directory = RunDirectory(path)
    if not finetuning and (directory.path / FINETUNE).is_file():
        raise RunError(f"{path} is a fine-tuned run: give the pre-trained one")
    config = directory.config()
    for left in reversed(range(TRIES)):
        latest = steps_of(directory.checkpoints)[:1]
        try:
            if step is None:
                checkpoint = whole_checkpoint(directory.checkpoints, note, partial(directory.foreign, config))
                chosen = directory.chosen_step(config, checkpoint.step)
                checkpoint = checkpoint if chosen == checkpoint.step else directory.open(config, chosen)
            else:
                checkpoint = directory.open(config, step)
            model = fitting_model(partial(build, config), config.model.num_layers, checkpoint)
            break
        except (CheckpointError, OSError):
            if step is not None or not left or steps_of(directory.checkpoints)[:1] == latest:
                raise
    vocabulary = directory.vocabulary()
    if checkpoint.state.get("vocabulary", vocabulary.digest) != vocabulary.digest:
        raise RunError(f"{directory.path / VOCABULARY} is damaged: it is not the vocabulary of step-{checkpoint.step}")
    model = model.to(torch.device(device)).eval()
    return Run(directory.path, config, checkpoint.step, model, vocabulary, finetuning, checkpoint.state.get("data"))


def runs_at(path: Path, device: str, note: Callable[[str], None]) -> Iterator[Run]:
    """The run at `path`, or one after the other every run with saved weights of the comparison there."""
    plan = read_plan(path)
    if plan is None:
        yield load_run(path, device=device, note=note)
        return
    runs = [run_path(path, router, seed) for router, seed in saved_runs(path, plan, note)]
    for place, run in enumerate(runs, 1):
        note(f"{place}/{len(runs)} {run.relative_to(path)}")
        yield load_run(run, device=device, note=note)
