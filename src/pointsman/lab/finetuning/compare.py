"""Fine-tuning every row of a comparison: one seed for all tasks and routers before the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pointsman._errors import Stopped
from pointsman._files import alone
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.lab.finetuning.run import finetune, finetuned_path, open_task
from pointsman.lab.finetuning.settings import Finetuning
from pointsman.lab.progress import Progress, Stop
from pointsman.lab.runs.comparison import required_plan, saved_runs
from pointsman.lab.runs.paths import COMPARISON, run_path
from pointsman.lab.training.compare import Watcher
from pointsman.lab.training.kernels import recorded_kernels
from pointsman.lab.training.progress import Interrupted

REPEAT = 1000
"""The fine-tuning seed of repeat j from pre-training seed s is s + 1000 j."""


def compare_tasks(
    out: Path,
    tasks: Sequence[Finetuning],
    *,
    routers: Sequence[str] | None = None,
    repeats: int = 1,
    device: str = "cpu",
    progress: Progress,
    watcher: Watcher | None = None,
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
        watcher: told when a run begins, and when it has its evaluation.
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
    with alone(out):
        for place, (settings, router, seed, own_seed) in enumerate(todo, 1):
            if watcher:
                watcher.begins(place, len(todo), f"{router} on {settings.variant}", own_seed, progress)
            try:
                result = finetune(
                    run_path(out, router, seed),
                    settings.for_router(router),
                    seed=own_seed,
                    out=finetuned_path(run_path(out, router, seed), settings, own_seed),
                    data=loaded[settings.task],
                    device=device,
                    kernels=kernels,
                    progress=progress,
                    monitor=RoutingMonitor,
                    stop=stop,
                )
            except Interrupted as saved:
                raise Stopped(
                    f"stopped in {saved.out} after step {saved.step}; saved: the same command goes on"
                ) from None
            if watcher and not result.already_finished:
                watcher.ended(router, own_seed)
