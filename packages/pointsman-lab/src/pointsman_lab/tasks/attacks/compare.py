"""Attacks on all runs of a comparison, or on all its fine-tuned runs of one task."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman._files import find, read_whole_json, write_whole
from pointsman_lab.finetuning.run import load_finetuned
from pointsman_lab.progress import Progress, Stop
from pointsman_lab.runs.comparison import required_plan, saved_runs
from pointsman_lab.runs.paths import FINETUNE, finetuned_runs, run_path, slug
from pointsman_lab.tasks.attacks.attacks import Attack
from pointsman_lab.tasks.attacks.runs import Budget, finetuned_under_attack, run_under_attack
from pointsman_lab.tasks.classification.task import texts_of
from pointsman_lab.tasks.language_modelling.task import corpus_of, eval_protocol
from pointsman_lab.training.run import load_run


def comparison_under_attack(
    out: Path,
    attacks: Sequence[Attack],
    *,
    variant: str | None = None,
    data: str | None = None,
    split: str | None = None,
    top_k: Sequence[int] | None = None,
    budget: Budget = "run",
    device: str = "cpu",
    progress: Progress,
    stop: Stop | None = None,
) -> str:
    """Evaluates every run of a comparison that has a checkpoint under these attacks; skips existing results.

    The results of a run go to attacks-KIND-DATA-SPLIT.json in its folder, those of a fine-tuned run to
    attacks-KIND.json, or attacks-KIND-SPLIT.json of another part than the reported one.

    Args:
        variant: a task's folder name: attack the runs fine-tuned on it instead of the language models, and ignore
            `data`.
        split: None: "test" of the corpus, or the part that the task reports.
        data, top_k, budget: as of `run_under_attack`.

    Returns:
        The name of the files, without ".json".

    Raises:
        RunError: no comparison, no run with a checkpoint, or nothing fine-tuned on this task.
    """
    plan = required_plan(out)
    if not attacks or len({attack.kind for attack in attacks}) > 1:
        raise RunError("attacks of one kind are needed, at one rate or several")
    paths = [run_path(out, router, seed) for router, seed in saved_runs(out, plan, progress.note)]
    if variant is not None:
        paths = _finetuned(paths, variant)
    name = f"attacks-{attacks[0].kind}"
    for place, path in enumerate(paths, 1):
        progress.note(f"{place}/{len(paths)} {path.relative_to(out)}")
        load = load_run if variant is None else load_finetuned
        run = load(path, device=device, note=progress.note)
        asked: dict[str, Any] = {
            "attacks": [attack.to_dict() for attack in attacks],
            "top_k": list(top_k or run.config.eval_top_k),
            "checkpoint": f"step-{run.step}",
        }
        tokens = run.config.eval_tokens if budget == "run" else budget
        attacked: Callable[..., dict[str, Any]]
        if variant is not None:
            asked |= {"budget": tokens, "fingerprint": run.finetuning.get("fingerprint")}
            if split and split != texts_of(run).reported:
                asked["split"] = split
                name += f"-{split}" if place == 1 else ""
            attacked = partial(finetuned_under_attack, split=split)
        else:
            corpus, part = corpus_of(run, data), split or "test"
            if place == 1:
                name += f"-{slug(corpus.name)}-{part}"
            asked |= {"data": data or run.config.data, "split": part, "fingerprint": corpus.fingerprint}
            asked["protocol"] = eval_protocol(run.config, tokens).to_dict()
            attacked = partial(run_under_attack, data=data, split=part)
        file = path / f"{name}.json"
        if (read_whole_json(file) or {}).get("asked") != asked:
            found = attacked(run, attacks, top_k=top_k, budget=budget, watch=progress, stop=stop)
            write_whole(file, json.dumps({**found, "asked": asked}, indent=2) + "\n")
    return name


def _finetuned(runs: Sequence[Path], variant: str) -> list[Path]:
    """The folders of these runs fine-tuned on this task."""
    found = [path for run in runs for path in finetuned_runs(run, variant, having=FINETUNE)]
    if not found:
        known = {folder.name for run in runs for folder in find(run, "finetune/*")}
        if not known:
            raise RunError(f"task {variant!r}: no run was fine-tuned yet; `pointsman compare --task` does it")
        raise RunError(f"task {variant!r}: no run was fine-tuned on it: {did_you_mean(variant, known)}")
    return found
