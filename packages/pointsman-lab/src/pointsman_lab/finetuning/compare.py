"""Fine-tuning every row of a comparison: one seed for all tasks and routers before the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pointsman._errors import Stopped
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.ops.kernels import Kernels
from pointsman_lab._files import alone
from pointsman_lab.finetuning.run import finetune, finetuned_path, open_task
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.progress import Progress, Stop
from pointsman_lab.runs.comparison import required_plan, saved_runs
from pointsman_lab.runs.directory import RunDirectory
from pointsman_lab.runs.paths import COMPARISON, EVALUATION, REPEAT, run_path
from pointsman_lab.training.compare import default_jobs
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.failures import Interrupted
from pointsman_lab.training.jobs import Hosts, Work, do_all
from pointsman_lab.training.kernels import recorded_kernels


def compare_tasks(
    out: Path,
    tasks: Sequence[Finetuning],
    *,
    routers: Sequence[str] | None = None,
    repeats: int = 1,
    device: str = "cpu",
    jobs: int | None = None,
    hosts: Hosts | None = None,
    progress: Progress,
    ended: Callable[[], object] = lambda: None,
    stop: Stop | None = None,
) -> None:
    """Fine-tunes every router and seed of a comparison on these tasks; what is done is left as it is.

    One seed is fine-tuned for all tasks and routers before the next. Rows of one seed see the same batches in the same
    order and start from the same head.

    Args:
        out: a comparison directory whose runs are trained.
        tasks: tasks with their settings.
        routers: only these rows; default: all that have saved weights.
        repeats: fine-tunings of each pre-trained run.
        jobs: how many fine-tunings go on at a time, as of `training.compare.compare`.
        hosts: as of `training.compare.compare`.
        ended: called when a fine-tuning has its evaluation.
        stop: asks to save and end.

    Raises:
        RunError: no comparison, another process works in it, or what `finetune` raises.
        Stopped: `stop` was set; everything is saved.
    """
    plan = required_plan(out)
    kernels = recorded_kernels(plan["kernels"], out / COMPARISON) if plan.get("kernels") else None
    loaded = {settings.task: open_task(settings.task) for settings in tasks}  # before anything is trained
    runs = saved_runs(out, plan, progress.note, routers)
    todo = [
        (settings, router, seed, seed + REPEAT * repeat)
        for repeat in range(repeats)
        for seed in dict.fromkeys(seed for _, seed in runs)
        for settings in tasks
        for router, own in runs
        if own == seed
    ]
    places = [finetuned_path(run_path(out, router, seed), settings, own) for settings, router, seed, own in todo]
    finished = {number for number, place in enumerate(places) if (place / EVALUATION).exists()}
    titles = [
        f"{number}/{len(todo)} {router} on {settings.variant}, seed {own}"
        for number, (settings, router, _, own) in enumerate(todo, 1)
    ]

    def one_ended(number: int) -> None:
        if number not in finished:
            ended()

    setup = partial(_tuner, out, kernels, device)
    with alone(out):
        do_all(
            todo, titles, setup, partial(setup, loaded), jobs, progress=progress, ended=one_ended, stop=stop,
            hosts=hosts,
        )  # fmt: skip


def jobs_of(out: Path, device: str) -> int | None:
    """`default_jobs` for the models of a comparison."""
    plan = required_plan(out)
    runs = [run_path(out, router, seed) for seed in plan["seeds"] for router in plan["routers"]]
    first = next((run for run in map(RunDirectory, runs) if run.exists), None)
    return None if first is None else default_jobs(first.config(RunConfig), device)


def _tuner(out: Path, kernels: Kernels | None, device: str, loaded: Mapping[str, Any] | None = None) -> Work:
    """Fine-tunes a row, or continues; a worker, without `loaded`, reads each task's data itself."""
    read = dict(loaded or {})

    def work(one: tuple[Finetuning, str, int, int], progress: Progress, stop: Stop | None) -> None:
        settings, router, seed, own_seed = one
        if settings.task not in read:
            read[settings.task] = open_task(settings.task)
        run = run_path(out, router, seed)
        try:
            finetune(
                run, settings.for_router(router), seed=own_seed, out=finetuned_path(run, settings, own_seed),
                data=read[settings.task], device=device, kernels=kernels, progress=progress, monitor=RoutingMonitor,
                stop=stop,
            )  # fmt: skip
        except Interrupted as saved:
            raise Stopped(f"stopped in {saved.out} after step {saved.step}; saved: the same command goes on") from None

    return work
