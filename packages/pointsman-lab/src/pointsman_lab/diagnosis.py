"""Diagnoses saved models: a run, a checkpoint, a comparison, a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pointsman._errors import RunError, did_you_mean
from pointsman.control import named_routers
from pointsman.ops.kernels import using
from pointsman_lab._files import within
from pointsman_lab.evaluation.diagnose import diagnose, plain_reader
from pointsman_lab.evaluation.passes import eval_top_k
from pointsman_lab.finetuning.consistency import consistency_over_training, finetunings_of
from pointsman_lab.progress import Progress, Quiet

if TYPE_CHECKING:
    from pointsman_lab.training.run import Run
    from pointsman_lab.training.task import Task


FILE = "diagnostics.json"
MOST_HISTORY = 4
READING = ("eval_batch_size", "eval_segment_length", "eval_memory_length")


@dataclass(frozen=True)
class Settings:
    """Settings of a diagnosis.

    Attributes:
        data: a corpus in the form of `--data`; None: the run's own.
        split: "train", "valid" or "test"; None: the one that a run reports, of a Hugging Face model "test".
        tokens: the number of targets: of a run in evenly spaced segments, of a Hugging Face model the first; None: all.
        top_k: values of k whose routing is compared with that at the model's own k; None: the run's, for a model none.
        device: where models run.
        changes: changed settings of a run's evaluation (names in `READING`), in the form of --set.
    """

    data: str | None = None
    split: str | None = None
    tokens: int | None = 50_000
    top_k: Sequence[int] | None = None
    device: str = "cpu"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.changes:
            if name not in READING:
                raise RunError(f"--set {name}: not a setting of a diagnosis: {did_you_mean(name, READING)}")


def diagnose_path(
    target: Path | str,
    against: Sequence[Path | str] = (),
    settings: Settings | None = None,
    watch: Progress | None = None,
) -> dict[str, Any]:
    """Diagnoses a run directory, one of its checkpoints (`…/checkpoints/step-N`), a comparison directory, or a model.

    A run: `diagnose` on its data at its own k, with its earlier checkpoints as history and `against` (runs or
    checkpoints with the same vocabulary, layers and experts); with several runs also "consistency_over_training" from
    their metrics, and of a run with fine-tunings "finetunings", their consistency. A comparison: every router's first
    seed against its other seeds, under "routers", and the "entropy_ratio" of each router to the first one. A Hugging
    Face model: its own gates.

    Returns:
        JSON values: those of `diagnose` with "source", "protocol" and "tokens_text" (listed id -> its text); for a
        comparison {"format", "comparison", "routers": {spec: …}, "entropy_ratio": {spec: {layer: …}}}.

    Raises:
        RunError: there is nothing to diagnose, or the runs cannot be compared.
    """
    settings, watch, path = settings or Settings(), watch or Quiet(), Path(target)
    if (path / "comparison.json").is_file():
        if against:
            raise RunError(f"{path} is a comparison, which compares its own runs; leave --against out")
        return _of_comparison(path, settings, watch)
    if ((path / "config.json").is_file() and (path / "checkpoints").is_dir()) or _step_of(path) is not None:
        return _of_run(path, [Path(one) for one in against], settings, watch)
    if path.exists() and not (path / "config.json").is_file():
        raise RunError(f"{path}: neither a run, nor a checkpoint step-N, nor a comparison, nor a Hugging Face model")
    if against:
        raise RunError("--against compares runs and their checkpoints, not Hugging Face models")
    return _of_hugging_face(str(target), settings, watch)


def _step_of(path: Path) -> int | None:
    """N of `RUN/checkpoints/step-N`, else None."""
    begin, _, step = path.name.partition("step-")
    return int(step) if path.parent.name == "checkpoints" and not begin and step.isdigit() else None


def _open(path: Path, device: str) -> Run:
    from pointsman_lab.finetuning.run import open_run

    step = _step_of(path)
    folder = path if step is None else path.parent.parent
    return open_run(folder, step=step, device=device)


def _of_run(path: Path, against: Sequence[Path], settings: Settings, watch: Progress) -> dict[str, Any]:
    from pointsman_lab.training.directory import RunDirectory

    run = _open(path, settings.device)
    others = {_label(one, against, path): _open(one, settings.device) for one in against}
    if not any(True for _ in named_routers(run.model)):
        raise RunError(f"{path}: a dense model has no router")
    for label, other in others.items():
        if other.vocabulary.digest != run.vocabulary.digest:
            raise RunError(f"{label} and {path} have different vocabularies")
    task, config = _task_of(run, settings.data), run.config.with_overrides(settings.changes)
    split = settings.split or task.reported_split(config)
    seen = task.observed(config, split, settings.tokens, torch.device(settings.device))
    own = min(router.top_k for _, router in named_routers(run.model))
    wanted = eval_top_k(run.model, config.eval_top_k) if settings.top_k is None else settings.top_k
    top_k = [k for k in wanted if k not in (None, own)]
    watch.phase("diagnose", seen.count)
    try:
        with using(run.config.kernels):
            found = diagnose(
                run.model,
                seen.batches,
                against={label: other.model for label, other in others.items()},
                history=_history(run, settings) if _step_of(path) is None else {},
                top_k=top_k,
                reader=seen.reader,
                advance=lambda done: watch.advance(done, {}),
            )
    except ValueError as mistake:
        raise RunError(str(mistake)) from None
    found["source"] = {"run": str(path), "step": run.step, "router": config.model.router, "seed": config.seed}
    found["protocol"] = {**seen.protocol, "top_k": own}
    if seen.groups:
        found["groups"] = list(seen.groups)
    found["tokens_text"] = _texts(found, lambda ids: str(run.vocabulary.decode(ids)))
    if others:
        rows = [RunDirectory(one.path).metrics("routing") for one in (run, *others.values())]
        found["consistency_over_training"] = consistency_over_training(rows)
    if tuned := finetunings_of(run.path):
        found["finetunings"] = tuned
    return found


def _task_of(run: Run, data: str | None) -> Task:
    """What a run learned: in pre-training, or in fine-tuning."""
    if not run.finetuning:
        return run.task(data)
    from pointsman_lab.finetuning.run import finetuned_task

    if data is not None:
        raise RunError(f"--data {data}: {run.path} is fine-tuned, which is read on its own task; leave --data out")
    return finetuned_task(run)


def _label(path: Path, among: Sequence[Path], own: Path) -> str:
    """The shortest end of a path that is unique among the others, and is not that of the run that they stand beside."""
    if [one.resolve() for one in among].count(path.resolve()) > 1:
        raise RunError(f"--against names {path} twice")
    parts = path.parts
    for count in range(1, len(parts) + 1):
        label = "/".join(parts[-count:])
        if sum(label == "/".join(other.parts[-count:]) for other in (*among, own)) == 1:
            return label
    return str(path)


def _history(run: Run, settings: Settings) -> dict[str, nn.Module]:
    """The run's earlier valid checkpoints, evenly spaced, oldest first."""
    from pointsman_lab.runs.checkpoints import CheckpointError, steps_of

    steps = sorted(step for step in steps_of(within(run.path, "checkpoints")) if step < run.step)
    if len(steps) > MOST_HISTORY:
        steps = [steps[round(place)] for place in np.linspace(0, len(steps) - 1, MOST_HISTORY)]
    models: dict[str, nn.Module] = {}
    for step in steps:
        with suppress(CheckpointError):
            models[f"step-{step}"] = _open(within(run.path, "checkpoints") / f"step-{step}", settings.device).model
    return models


def _texts(found: Mapping[str, Any], decode: Callable[[list[int]], str]) -> dict[str, str]:
    """The text of every token id that the specialisation tables list."""
    tops = [row for layer in found["layers"].values() for row in layer.get("specialisation", {}).get("top", [])]
    return {str(index): decode([index]) for index in sorted({pair[0] for row in tops for pair in row})}


def _of_comparison(path: Path, settings: Settings, watch: Progress) -> dict[str, Any]:
    from pointsman.routers.frame.registry import has_one_k
    from pointsman_lab.runs.checkpoints import steps_of
    from pointsman_lab.runs.comparison import read_plan
    from pointsman_lab.runs.paths import run_path

    plan = read_plan(path) or {}
    routers: dict[str, Any] = {}
    for router in plan["routers"]:
        runs = [run for seed in plan["seeds"] if steps_of((run := run_path(path, router, seed)) / "checkpoints")]
        if runs and not has_one_k(router):
            routers[router] = _of_run(runs[0], runs[1:], settings, watch)
    if not routers:
        raise RunError(f"{path}: no run with routers and a checkpoint yet")
    first, *_ = routers
    ratios = {router: _entropy_ratio(found, routers[first]) for router, found in routers.items()}
    return {"format": 1, "comparison": str(path), "routers": routers, "entropy_ratio": ratios}


def _entropy_ratio(one: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float | None]:
    from pointsman.diagnostics.base import ratio

    return {
        name: ratio(layer["entropy"]["mixed_mean"], baseline["layers"][name]["entropy"]["mixed_mean"])
        for name, layer in one["layers"].items()
        if name in baseline["layers"]
    }


def _of_hugging_face(name: str, settings: Settings, watch: Progress) -> dict[str, Any]:
    """A Hugging Face MoE with its own routers, or with each gate replaced by a router with the same routing."""
    from pointsman.hf import replace_routers
    from pointsman.hf.loading import load_model, load_tokenizer
    from pointsman_lab.checkpoints.text import refuse_unknown_tokens
    from pointsman_lab.data.corpus import open_text

    if settings.changes:
        raise RunError(f"--set {next(iter(settings.changes))}: only for runs, not for Hugging Face models")
    try:
        model, tokenizer = load_model(name, device=settings.device), load_tokenizer(name)
    except RunError as error:
        raise RunError(f"{name}: no run here, and {str(error).removeprefix(f'{name}: ')}") from None
    if not any(True for _ in named_routers(model)):  # else it was saved with routers
        replace_routers(model, "smoe")
    corpus = open_text(settings.data or "stdlib")
    split, budget = settings.split or "test", settings.tokens
    text = corpus.vocabulary.decode(corpus.split(split)[: None if budget is None else 6 * budget])
    ids = torch.tensor(tokenizer(text)["input_ids"][:budget])
    refuse_unknown_tokens(model, int(ids.max()))
    length = min(512, getattr(model.config, "max_position_embeddings", 512), len(ids))
    batches = ids[: len(ids) // length * length].view(-1, length).split(4)  # type: ignore[no-untyped-call]
    watch.phase("diagnose", len(batches))
    own = min(router.top_k for _, router in named_routers(model))
    found = diagnose(
        model,
        (batch.to(settings.device) for batch in batches),
        top_k=[k for k in settings.top_k or () if k != own],
        reader=plain_reader,
        advance=lambda done: watch.advance(done, {}),
    )
    found["source"] = {"model": name}
    found["protocol"] = {"data": corpus.description, "split": split, "tokens": len(ids) // length * length}
    found["tokens_text"] = _texts(found, lambda one: str(tokenizer.decode(one)))
    return found
