"""`pointsman compare`: trains several routers with equal settings and compares them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.cli.finetune import TASK_FLAGS, add_compare_flags, fine_tune_comparison, settings_of_comparison
from pointsman_lab.cli.options import Parser, choose_device, overrides, whole, words
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.cli.ranks import FLAGS as RANK_FLAGS
from pointsman_lab.cli.ranks import add_rank_flags, in_a_rank, joined, launched
from pointsman_lab.cli.runs import add_run_flags, run_config, use_recorded_imports, write_page
from pointsman_lab.runs.comparison import read_comparison, read_plan, required_plan, save_plan, with_shown
from pointsman_lab.runs.record import label

if TYPE_CHECKING:
    from pointsman.parallel.layout import Layout
    from pointsman_lab.training.compare import Plan
    from pointsman_lab.training.jobs import Hosts

EPILOG = """examples:
  pointsman compare --routers smoe,hyperrouter --data stdlib --preset tiny
  pointsman compare --routers smoe,xmoe --data enwik8 --seeds 3 --out runs/mine
  pointsman compare --routers xmoe+similarity --data enwik8 --seeds 3 \\
    --out runs/mine                                       # adds a row
  pointsman compare --task sst2,sst5 --out runs/mine      # fine-tunes every row
  pointsman compare --routers smoe --data enwik8 --processes 8  # a run on 8
  pointsman compare --routers smoe,xmoe --seeds 20 --cluster ray://head:6379
  pointsman compare --routers smoe,xmoe --tune learning_rate=5e-4..1.6e-2 \\
    --tune router_lr_scale=1,4,16 --out runs/fair

After an interruption the same command continues. The table is also written as
CSV, Markdown, LaTeX and as a page.
"""


TRAINING_FLAGS = (
    "--seeds", "--data", "--tokenizer", "--preset", "--steps", "--train-top-k", "--k-schedule", "--eval-tokens",
    "--tensorboard", "--track", "--set", "--processes", "--tune",
    *RANK_FLAGS,
)  # fmt: skip


def parser() -> Parser:
    flags = Parser("compare", "Train several routers with equal settings and compare them at every k.", EPILOG)
    flags.add("--routers A,B,C", "router specs; `pointsman routers` lists them", type=words)
    flags.add("--seeds")
    told = "runs or fine-tunings at a time, one thread each (default: as many as cores where the model is small)"
    flags.add("--jobs N", told, type=whole(1))
    told = "runs as tasks of a cluster, a core or (--device cuda) a GPU each: ray, ray://HOST:PORT, slurm[://PARTITION]"
    flags.add("--cluster NAME", told)
    told = "choose this setting for each row by successive halving, on seeds of its own: KEY=A,B,C or KEY=LOW..HIGH"
    flags.add("--tune KEY=VALUES", told, action="append")
    flags.add("--names ROW=TEXT,…", "names of rows in tables and page: smoe=Plain,xmoe=X-MoE", type=words, default=[])
    flags.add("--baseline ROW", "the row that differences are taken against (the first)")
    told = "the table's columns, by their titles: k=1,k=8,entropy,seeds; all: each of them again"
    flags.add("--columns A,B", told, type=words, default=[])
    add_run_flags(flags)
    add_compare_flags(flags)
    add_rank_flags(flags)
    flags.common("the comparison's directory (default: runs/compare-DATA-PRESET)")
    return flags


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    showing = bool(values.names or values.baseline or values.columns)
    if showing and not values.routers and not values.task and values.out:
        without = (*TRAINING_FLAGS, *TASK_FLAGS, "--top-k", "--jobs", "--cluster")
        flags.without_effect(values, without, "without --routers: only tables and page are made again")
        print(shown(values))
        print(f"\n{write_page(values.out, explorer=True)}", file=sys.stderr)
        return 0
    if not values.routers and not (values.task and values.out):
        raise RunError("pointsman compare: --routers is missing: name one or more, as in --routers smoe,hyperrouter")
    if not values.task:
        flags.without_effect(values, TASK_FLAGS, "without --task")
    elif not values.routers:
        flags.without_effect(values, TRAINING_FLAGS, "without --routers: nothing is trained, only fine-tuned")
    else:
        for one in settings_of_comparison(values):  # a mistake is told before the training, not after it
            one.kind.find(one.task)
            one.check(run_config(values, "smoe"))
    from pointsman_lab.training.cluster import cluster

    if values.cluster:
        flags.without_effect(values, ["--jobs"], "with --cluster: as many runs go on as it has room for")
        flags.without_effect(values, ["--processes"], "with --cluster: each run has one process")
    device = (values.device or "cpu") if values.cluster else choose_device(values.device)
    if not values.routers:
        if showing:
            print(shown(values))
        with cluster(values.cluster, device, values.out) as hosts:
            fine_tune_comparison(values, values.out, device, hosts)
        print(write_page(values.out, explorer=True), file=sys.stderr)
        return 0
    if values.processes:
        flags.without_effect(values, ["--tune"], "with --processes: tune without it first")
        flags.without_effect(values, ["--jobs"], "with --processes: one run after another has all of them")
    from pointsman_lab.report.results import write_tables
    from pointsman_lab.training.compare import Plan, compare, default_jobs
    from pointsman_lab.training.task import check_on_ranks

    if values.out is None:
        data = run_config(values, "smoe").data
        values.out = Path("runs") / f"compare-{Path(data).name.replace(':', ',')}-{values.preset or 'tiny'}"
    if unread := [key for key in ("seed", "model.router") if key in overrides(values.set)]:
        raise RunError(f"pointsman compare: --set {unread[0]} has no effect: --seeds and --routers say it")
    use_recorded_imports(values, values.routers)
    command = shlex.join(["pointsman", "compare", *arguments])
    plan = Plan(run_config(values, "smoe"), tuple(values.routers), tuple(range(values.seeds)), command)
    known = read_plan(values.out) or {"routers": ()}
    rows = dict.fromkeys((*known["routers"], *plan.routers))
    # told before the training
    called = with_shown({**known, "routers": rows}, values.names, values.baseline, ())["shown"]["names"]
    check_columns(values, plan)

    def tables() -> None:
        with suppress(RunError):  # rows that wait for another evaluation stand in no table with those that have it
            write_tables(values.out)

    def check(count: int, layout: Layout) -> None:
        with Display() as display:
            check_on_ranks([plan.config(router, 0) for router in plan.routers], count, layout, display.data)

    code = launched(flags, values, device, "compare", arguments, check, again=())
    if code is None:
        with joined(values, device) as (ranks, layout, device), cluster(values.cluster, device, values.out) as hosts:
            display = Display()
            alone = values.jobs is None and ranks.count == 1 and hosts is None
            jobs = default_jobs(plan.base, device) if alone else values.jobs or (1 if hosts else None)
            if values.tune:
                plan = tuned_plan(plan, values.tune, called, values.out, device, jobs, hosts)
            with display if ranks.first else nullcontext(), stop_on_signals(tell=ranks.first) as stop:
                compare(
                    plan, values.out, device=device, jobs=jobs, hosts=hosts,
                    progress=display, ended=tables if ranks.first else lambda: None, stop=stop,
                    data_progress=display.data, ranks=ranks, layout=layout,
                )  # fmt: skip
    if code or in_a_rank():
        return code or 0
    print(shown(values) if showing else write_tables(values.out))
    if values.task:
        with cluster(values.cluster, device, values.out) as hosts:
            fine_tune_comparison(values, values.out, device, hosts)
    print(f"\n{write_page(values.out, explorer=True)}", file=sys.stderr)
    return 0


def check_columns(values: Any, plan: Plan) -> None:
    """Refuses titles that no column can have, before the training; `shown` refuses those that none has after it."""
    if values.columns in ([], ["all"]):
        return
    from pointsman_lab.report.tables import OTHERS

    before = read_comparison(values.out).runs.values() if read_plan(values.out) else ()
    ks = {*plan.base.eval_top_k, plan.base.model.num_experts}.union(*(run.results() for run in before))
    known = [*(f"k={k}" for k in sorted(ks)), *OTHERS]
    for name in values.columns:
        if name not in known:
            raise RunError(f"--columns {name}: {did_you_mean(name, known)}")


def tuned_plan(
    plan: Plan, told: Sequence[str], called: Mapping[str, str], out: Path, device: str, jobs: int | None,
    hosts: Hosts | None,
) -> Plan:  # fmt: skip
    """The plan with the settings that `--tune` finds; prints each row's curve."""
    from pointsman_lab.report.cell import metric
    from pointsman_lab.training.compare import compare
    from pointsman_lab.training.tune import tuned

    with Display() as display, stop_on_signals() as stop:

        def train(one: Plan, folder: Path) -> None:
            compare(
                one, folder, device=device, jobs=jobs, hosts=hosts, progress=display, stop=stop,
                data_progress=display.data, pass_over=True,
            )  # fmt: skip

        note, title = partial(print, file=sys.stderr), lambda row: called.get(label(row), row)
        return tuned(plan, told, out, train, print, lambda name: metric(name).lower_is_better, note, title)


def shown(values: Any) -> str:
    """The table as --names, --baseline and --columns show it from now on."""
    from pointsman_lab.report.results import write_tables
    from pointsman_lab.report.tables import ComparisonTable

    plan = with_shown(required_plan(values.out), values.names, values.baseline, values.columns)
    every = replace(read_comparison(values.out), shown={**plan["shown"], "columns": ()})
    for name in () if values.columns == ["all"] else values.columns:
        if name not in (known := ComparisonTable.of(every).header[1:]):
            raise RunError(f"--columns {name}: {did_you_mean(name, known)}")
    save_plan(values.out, {**required_plan(values.out), "shown": plan["shown"]})  # with rows of meanwhile
    return write_tables(values.out)
