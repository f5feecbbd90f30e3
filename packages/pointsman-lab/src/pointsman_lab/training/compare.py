"""A paired comparison of routers: one directory that grows by rows and seeds.

Every run of a comparison has the same data in the same order, the same schedule of k and the same kernels. Runs of one
seed have the same dropout masks (steps seed the generator from (seed, step)) and, outside the router and where shapes
agree, the same initial weights. One seed is trained for all routers before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pointsman._errors import RunError, Stopped
from pointsman.parallel.layout import Layout
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame.registry import has_one_k, split_specs
from pointsman_lab._files import alone
from pointsman_lab._values import typed_value
from pointsman_lab.models.config import build_model
from pointsman_lab.processes import available_cores, one_after_another
from pointsman_lab.progress import Progress, Quiet, Stop
from pointsman_lab.registry import OLDEST, family
from pointsman_lab.runs.compact import restore
from pointsman_lab.runs.comparison import Comparison, read_comparison, read_plan, required_plan, write_node, write_plan
from pointsman_lab.runs.imports import (
    check_imported,
    check_origin,
    import_named,
    named_before,
    origin_of,
    unlike_origin,
)
from pointsman_lab.runs.paths import COMPARISON, EVALUATION, run_path
from pointsman_lab.training.commands import whole_commands
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.config import settings as all_settings
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.jobs import Hosts, Work, do_all
from pointsman_lab.training.settings import flat, without_effect
from pointsman_lab.training.state import Diverged, Interrupted
from pointsman_lab.training.task import Task, check_models, check_ranks, pretraining_task
from pointsman_lab.training.trainer import train

SMALL_MODEL = 4_000_000  # parameters; a step of `tiny` (0.7 million) takes as long with one thread as with two
ANY_VOCABULARY = 10**9  # settings are read before the data: larger than any
OF_A_RUN = ("router", "seed", "top_k")
PROTOCOL = ("eval_batch_size", "eval_segment_length", "eval_memory_length", "eval_tokens", "eval_split", "beam")
"""Settings that may change between two calls, but not between the rows of a table."""
OF_A_ROW = "eval_top_k"
"""What may differ between rows, but not between the seeds of one: a cell has all of them."""


@dataclass(frozen=True)
class Plan:
    """What a comparison directory holds or will hold.

    Attributes:
        base: the settings of every run but router and seed.
        routers: specs in the table's order.
        seeds: in order.
        command: the words that asked for it last, for the page.
        tuned: router -> {"row": what was asked for, setting: its own value} (`compare --tune`).
    """

    base: RunConfig
    routers: tuple[str, ...]
    seeds: tuple[int, ...]
    command: str = ""
    tuned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def config(self, router: str, seed: int) -> RunConfig:
        """The settings of one run."""
        own = {key: value for key, value in self.tuned.get(router, {}).items() if key not in ("row", "router_lr_scale")}
        base = self.base.with_overrides(own) if own else self.base
        return replace(base, model=replace(base.model, router=router), seed=seed)

    def settings(self) -> dict[str, Any]:
        """Everything but routers and seeds, as JSON."""
        values = self.base.to_dict()
        values.pop("seed")
        left_out = {*self.base.model.of_the_data, *OF_A_RUN}
        model = {key: value for key, value in values["model"].items() if key not in left_out}
        return {**values, "model": model}


def merged(plan: Plan, out: Path) -> Plan:
    """The plan together with what the directory holds already: rows and seeds are added, never taken away.

    Raises:
        RunError: the directory holds a comparison with other settings; the message names them.
    """
    before = read_plan(out)
    if before is None:
        if out.exists() and any(not entry.name.startswith(".") for entry in out.iterdir()):
            raise RunError(f"{out} is not empty and holds no comparison; choose another --out")
        return plan
    ours, theirs = flat(plan.settings()), flat(_today(before["settings"], out / COMPARISON))
    free = without_effect(plan.base.model.family)
    keys = [key for key in ours | theirs if key not in free]
    differing = [key for key in keys if ours.get(key) != theirs.get(key)]
    if differing:
        told = "; ".join(f"{key} is {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in differing)
        raise RunError(f"{out} holds a comparison with other settings: {told}; choose another --out")
    routers = tuple(dict.fromkeys([*before["routers"], *plan.routers]))
    seeds = tuple(sorted({*before["seeds"], *plan.seeds}))
    differing = [key for key in PROTOCOL if ours.get(key) != theirs.get(key)]
    others = [(router, seed) for router in before["routers"] for seed in before["seeds"]
              if router not in plan.routers or seed not in plan.seeds]  # fmt: skip
    if not differing and ours.get(OF_A_ROW) != theirs.get(OF_A_ROW):
        done = read_comparison(out).runs
        rows = [router for router in plan.routers if not has_one_k(router)]
        differing, others = [OF_A_ROW], [one for one in others if one[0] in rows and one in done]
    if differing and others:
        told = "; ".join(f"{key} is {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in differing)
        named = "; ".join(f"{router}, seed {seed}" for router, seed in others)
        told += f"; choose another --out, or name its other rows and seeds as well ({named})"
        raise RunError(f"{out} is evaluated in another way: {told}: they are then evaluated anew")
    held = {**before.get("tuned", {}), **plan.tuned}
    commands = [*str(before.get("command", "")).splitlines(), plan.command]
    command = whole_commands(commands, {row: held.get(row, {}).get("row", "") for row in routers}, len(seeds))
    return replace(plan, routers=routers, seeds=seeds, tuned=held, command=command)


def compare(
    plan: Plan,
    out: Path,
    *,
    device: str = "cpu",
    jobs: int | None = None,
    hosts: Hosts | None = None,
    progress: Progress,
    ended: Callable[[], object] = lambda: None,
    stop: Stop | None = None,
    data_progress: Callable[[str, int, int], None] | None = None,
    ranks: Ranks = ALONE,
    layout: Layout | None = None,
    pass_over: bool = False,
) -> Plan:
    """Trains and evaluates what is missing of a comparison: one seed for all routers before the next.

    Args:
        plan: the routers and seeds asked for; those that the directory holds already stay in its table.
        out: the comparison's directory; an interrupted comparison goes on where it was.
        jobs: how many runs go on at a time. Each has one thread then, and with more than one job a process of its own:
            any number of jobs gives the same bits. None: one run after another in this process, with all its threads.
        hosts: trains there, with the same bits as one job; `jobs` is 1.
        ended: called when a run has its evaluation.
        stop: asks to save and end.
        data_progress: told of reading and tokenizing the data.
        ranks: who shares each batch of each run, one run after another; every rank calls with the same arguments.
        layout: how they divide each model; None: in shards.
        pass_over: says which run diverges, leaves it without an evaluation, and goes on, in place of an error.

    Returns:
        The plan of the whole directory.

    Raises:
        RunError: other settings live in the directory, another process works in it, or what `train` raises.
        Stopped: `stop` was set; everything is saved.
    """
    for router in plan.routers:
        split_specs(router)
    if not ranks.first:
        progress, data_progress = Quiet(), None
    if ranks.count > 1:
        check_ranks(plan.base, ranks)
    whole = ranks.by_first(lambda: merged(plan, out))
    plan = replace(plan, tuned=whole.tuned)
    task = one_after_another(ranks, lambda: pretraining_task(plan.base, data_progress))
    task.check(plan.base)
    check_models([plan.config(router, 0) for router in plan.routers], task, layout or Layout(ranks.count))
    check_imported(plan.routers, plan.base.model.dim, plan.base.model.num_experts)
    every = [(router, seed) for seed in plan.seeds for router in plan.routers]

    def finished(router: str, seed: int) -> bool:  # its checkpoints need not be there any more
        run = RunDirectory(run_path(out, router, seed))
        return run.exists and task.is_current(run.read_json(EVALUATION), plan.config(router, seed))

    with ExitStack() as held:

        def begin() -> tuple[Plan, list[tuple[int, str, int]]]:
            held.enter_context(alone(out))
            now = merged(plan, out)  # with the rows that others have added while this process read the data
            _begin(plan, now, out, task)
            return now, [(number, *one) for number, one in enumerate(every, 1) if not finished(*one)]

        whole, todo = ranks.by_first(begin)
        titles = [f"{number}/{len(every)} {router}, seed {seed}" for number, router, seed in todo]
        runs = [(plan.config(router, seed), run_path(out, router, seed)) for _, router, seed in todo]
        base = replace(plan.base, imports=tuple(named_before(plan.base.imports)))
        origins = {router: origin_of(router) for router in plan.routers}
        setup = partial(_trainer, base, device, data=task.fingerprint, origins=origins, pass_over=pass_over)
        do_all(
            runs, titles, setup, partial(setup, task, ranks, layout), jobs, progress=progress,
            ended=lambda _: ended(), stop=stop, hosts=hosts,
            began=lambda number, node: write_node(out, *todo[number][1:], node),
        )  # fmt: skip
    return whole


def _begin(plan: Plan, whole: Plan, out: Path, task: Task) -> None:
    """Writes the plan of a directory that no other process works in."""
    restore(out)  # runs that another machine has finished
    before = read_plan(out) or {}
    if before.get("data", task.fingerprint) != task.fingerprint:
        raise RunError(f"{out} holds a comparison on other data: {plan.base.data} has changed; choose another --out")
    if before:
        for run in check_runs(out).runs.values():
            check_origin(run.path, run.environment.get("origin"), run.router)
    write_plan(
        out, settings=whole.settings(), routers=whole.routers, seeds=whole.seeds, command=whole.command,
        data=task.fingerprint, tuned=whole.tuned,
    )  # fmt: skip


def check_runs(out: Path) -> Comparison:
    """The comparison; RunError where a run has other settings than it, or another router than its row's other seeds."""
    plan, comparison = required_plan(out), read_comparison(out)
    of = str(plan["settings"]["model"].get("family", OLDEST))
    free, kinds = without_effect(of) | {"seed", *(f"model.{key}" for key in OF_A_RUN)}, all_settings(of)
    origins: dict[str, Any] = {}
    for (router, _), run in comparison.runs.items():
        tuned = plan.get("tuned", {}).get(router, {})
        own = {key: typed_value(value, kinds[key], key) for key, value in tuned.items() if key in kinds}
        own = {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}
        wanted, has = {**flat(plan["settings"]), **own}, flat(run.config)
        for key in (key for key in wanted if key in has and key not in free):
            if wanted[key] != has[key]:
                raise RunError(f"{run.path}: {key} is {has[key]!r} there, {wanted[key]!r} in the comparison")
        origin = run.environment.get("origin") or {}
        if origin and unlike_origin(origins.setdefault(router, origin), origin):
            raise RunError(f"{run.path}: {', '.join(origin)}: not what it was for the other seeds of {router!r}")
    return comparison


def _trainer(
    base: RunConfig, device: str, task: Task | None = None, ranks: Ranks = ALONE, layout: Layout | None = None,
    *, data: str, origins: Mapping[str, Mapping[str, str]], pass_over: bool = False,
) -> Work:  # fmt: skip
    """Trains and evaluates (settings, directory), or continues it; a worker, without `task`, reads the data itself.

    Data and routers' files that are no more what the command read, `data` and `origins`, are refused.
    """
    if task is None:
        for name in base.imports:
            import_named(name)
        task = pretraining_task(base)
        if task.fingerprint != data:
            raise RunError(f"{base.data} has changed since this command read it: bring it back as it was")

    def work(run: tuple[RunConfig, Path], progress: Progress, stop: Stop | None) -> None:
        config, path = run
        check_origin(path, origins[config.model.router], config.model.router)
        try:
            train(
                config, path, resume=RunDirectory(path).exists, device=device, task=task,
                progress=progress, stop=stop, ranks=ranks, layout=layout,
            )  # fmt: skip
        except Interrupted as saved:
            raise Stopped(f"stopped in {path} after step {saved.step}; saved: the same command goes on") from None
        except Diverged as error:
            if not pass_over:
                raise
            progress.note(f"passed over: router {config.model.router}, seed {config.seed}: {error}")

    return work


def default_jobs(config: RunConfig, device: str) -> int | None:
    """As many jobs as cores for a small model on a CPU, which more threads would make no faster; otherwise None."""
    with torch.device("meta"):
        layers = build_model(config.model).layers
    small = sum(parameter.numel() for parameter in layers.parameters()) <= SMALL_MODEL
    return available_cores() if small and torch.device(device).type == "cpu" else None


def _today(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Settings that an earlier version wrote, as this one would: what is new since then has its default."""
    model = {**settings.get("model", {}), "router": "smoe"}
    if family(model.get("family", OLDEST)).reads_tokens:
        model["vocab_size"] = ANY_VOCABULARY
    return Plan(RunConfig.from_dict({**settings, "model": model}, str(file)), (), ()).settings()
