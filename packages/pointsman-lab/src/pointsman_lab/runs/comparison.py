"""Comparison directories: comparison.json, and the runs of every router and seed side by side."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import read_json, write_whole
from pointsman_lab.runs.checkpoints import steps_of
from pointsman_lab.runs.compact import restored_aside
from pointsman_lab.runs.paths import CHECKPOINTS, COMPARISON, CONFIG, run_path, runs_in
from pointsman_lab.runs.record import RunRecord, label, read_run

FORMAT = 1


def write_plan(out: Path, **plan: Any) -> None:
    """Writes comparison.json, with what `with_shown` and `write_node` added to it before.

    Args:
        plan: "settings" of every run, without router and seed; "routers", specs in the table's order; "seeds", in
            order; "command", the command line that asked for it last; "data", the fingerprint of their corpus; "tuned",
            settings of single rows, which `compare --tune` chose, if any.
    """
    kept = {key: value for key, value in (read_plan(out) or {}).items() if key in ("shown", "nodes") and value}
    plan = {key: value for key, value in plan.items() if value or key != "tuned"}
    save_plan(out, {"format": FORMAT, **plan, **kept})


def save_plan(out: Path, plan: Mapping[str, Any]) -> None:
    """Writes comparison.json as it is given."""
    write_whole(out / COMPARISON, json.dumps(plan, indent=2) + "\n")


def write_node(out: Path, router: str, seed: int, node: str) -> None:
    """Adds to comparison.json that this node of a cluster trains a run, from now on."""
    if node:
        plan = dict(required_plan(out))
        nodes, run = dict(plan.get("nodes") or {}), f"{router}, seed {seed}"
        nodes[run] = [*nodes.get(run, ()), node]
        save_plan(out, {**plan, "nodes": nodes})


def with_shown(
    plan: Mapping[str, Any], names: Sequence[str], baseline: str | None, columns: Sequence[str]
) -> dict[str, Any]:
    """comparison.json with how tables and page show it; what is not given stays as it was.

    Args:
        plan: the content of comparison.json.
        names: ROW=TEXT, for rows that are called otherwise; ROW= takes the name back. A row that `--tune` gave another
            spec is also known by the one that it had.
        baseline: the row that differences are taken against.
        columns: titles of the table's columns; `all`: each of them again.

    Raises:
        RunError: there is no such row; the titles are checked when the table is made.
    """
    shown = dict(plan.get("shown") or {})
    called = dict(shown.get("names") or {})
    rows = [label(spec) for spec in plan["routers"]]
    before = {label(one.get("row", spec)): label(spec) for spec, one in plan.get("tuned", {}).items()}
    of = {**{asked: row for asked, row in before.items() if row in rows}, **{row: row for row in rows}}
    for text in names:
        name = max((one for one in of if text.startswith(f"{one}=")), key=len, default=None)
        if name is None:
            raise RunError(f"--names {text!r}: allowed is ROW=TEXT: {did_you_mean(text.rpartition('=')[0], of)}")
        called[of[name]] = text[len(name) + 1 :] or of[name]
    if len({called.get(row, row) for row in rows}) < len(rows):
        raise RunError("--names: two rows would have the same name")
    if baseline is not None and baseline not in of:
        raise RunError(f"--baseline {baseline!r}: {did_you_mean(baseline, of)}")
    shown["names"] = {row: name for row, name in called.items() if name != row}
    if baseline:
        shown["baseline"] = of[baseline]
    if list(columns) == ["all"]:
        shown.pop("columns", None)
    elif columns:
        shown["columns"] = list(columns)
    return {**plan, "shown": shown}


def read_plan(out: Path) -> Mapping[str, Any] | None:
    """The content of comparison.json; None without one, RunError where it is damaged or of another format."""
    file = out / COMPARISON
    values = read_json(file)
    if values is not None and values.get("format") != FORMAT:
        raise RunError(f"{file}: not a comparison of format {FORMAT}")
    return values


def required_plan(out: Path) -> Mapping[str, Any]:
    """`read_plan`; RunError also where there is no comparison."""
    plan = read_plan(out)
    if plan is None:
        raise RunError(f"{out} holds no comparison: train its routers first")
    return plan


def saved_runs(
    out: Path, plan: Mapping[str, Any], note: Callable[[str], None], routers: Sequence[str] | None = None
) -> list[tuple[str, int]]:
    """(router, seed) of a comparison's runs that have saved weights, one seed for all routers before the next.

    RunError where the comparison has no such row, or no run has saved weights.
    """
    for router in routers or ():
        if router not in plan["routers"]:
            raise RunError(f"{out} has no row {router!r}: {did_you_mean(router, plan['routers'])}")
    wanted = [(router, seed) for seed in plan["seeds"] for router in routers or plan["routers"]]
    found = [one for one in wanted if steps_of(run_path(out, *one) / CHECKPOINTS)]
    if not found:
        told = "train the routers in another folder, by `pointsman compare` with --out"
        raise RunError(f"{out}: no run has a checkpoint (a record holds no weights): {told}")
    if len(found) < len(wanted):
        without = ", ".join(f"{router} (seed {seed})" for router, seed in wanted if (router, seed) not in found)
        note(f"passed over, without a checkpoint: {without}")
    return found


@dataclass(frozen=True)
class Comparison:
    """Runs side by side: a comparison directory, or several run directories.

    Attributes:
        path: the comparison's directory, or that of the only run.
        settings: everything but the routers.
        routers: specs in order. seeds: in order.
        runs: (router, seed) -> run; missing where it has not begun.
        single: whether this is one run and no comparison.
        command: the command line that made it; "" where it is not known.
        planned: whether it is a comparison directory.
        shown: how tables and page show it: names, baseline, columns (`with_shown`).
        nodes: "ROUTER, seed S" -> the nodes of a cluster that trained it, one after another.
        tuned: row -> {"row": what was asked for, setting: the value that `compare --tune` chose for it}.
    """

    path: Path
    settings: Mapping[str, Any]
    routers: Sequence[str]
    seeds: Sequence[int]
    runs: Mapping[tuple[str, int], RunRecord]
    single: bool = False
    command: str = ""
    planned: bool = True
    shown: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tuned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def of(self, router: str) -> list[RunRecord]:
        """The runs of one router that have begun, in the order of seeds."""
        return [self.runs[router, seed] for seed in self.seeds if (router, seed) in self.runs]

    def missing(self) -> list[tuple[str, int]]:
        """(router, seed) of all runs without an evaluation."""
        done = {key for key, run in self.runs.items() if run.done}
        return [(router, seed) for router in self.routers for seed in self.seeds if (router, seed) not in done]


def read_comparison(path: Path) -> Comparison:
    """Reads a run directory or a comparison directory, whose runs a record may hold; RunError where it is neither."""
    path = Path(path)
    if not path.exists():
        raise RunError(f"{path}: no such directory")
    plan = read_plan(path)
    if plan is None:
        if (path / CONFIG).is_file():
            return gather([read_run(path)])
        raise RunError(f"{path}: neither a run directory ({CONFIG}) nor a comparison ({COMPARISON})")
    folders = [path, *([aside] if (aside := restored_aside(path)) else [])]
    routers, seeds = [label(spec) for spec in plan.get("routers", ())], [int(seed) for seed in plan.get("seeds", ())]
    runs: dict[tuple[str, int], RunRecord] = {}
    for folder, run in ((at, read_run(place)) for at in folders for place in runs_in(at, "runs/*")):
        key = run.router, run.seed
        if run.router in routers and run.seed in seeds and (key not in runs or run.path == run_path(folder, *key)):
            runs[key] = run  # of copies in other folders the one in its own
    command, shown = str(plan.get("command", "")), plan.get("shown") or {}
    return Comparison(
        path, plan.get("settings", {}), routers, seeds, runs, command=command, shown=shown,
        nodes=plan.get("nodes") or {}, tuned=plan.get("tuned") or {},
    )  # fmt: skip


def gather(runs: Sequence[RunRecord]) -> Comparison:
    """Several runs as an unplanned comparison; RunError where two have the same router and seed.

    Audits of models of one class get the name of their folder in their label.
    """
    named: dict[tuple[str, int], RunRecord] = {}
    labels = Counter(run.router for run in runs)
    for run in runs:
        if run.is_audit and labels[run.router] > 1:
            run = replace(run, router=f"{run.router} ({run.path.resolve().name})")
        if (run.router, run.seed) in named:
            other = named[run.router, run.seed].path
            raise RunError(f"{other} and {run.path}: two runs with router {run.router!r} and seed {run.seed}")
        named[run.router, run.seed] = run
    first = runs[0]
    common = {key: value for key, value in first.config.items() if all(run.config.get(key) == value for run in runs)}
    routers, seeds = list(dict.fromkeys(router for router, _ in named)), sorted({seed for _, seed in named})
    return Comparison(first.path, common, routers, seeds, named, single=len(runs) == 1, planned=False)


def read(path: Path | Sequence[Path]) -> Comparison:
    """A directory, or several run directories, as one comparison; RunError where they are none, or damaged."""
    paths = [Path(path)] if isinstance(path, str | Path) else list(map(Path, path))
    if not paths:
        raise RunError("report: name at least one run or comparison directory")
    if len(paths) == 1:
        return read_comparison(paths[0])
    for one in paths:
        if (one / COMPARISON).is_file():
            own = ", ".join(str(found.path) for found in read_comparison(one).runs.values())
            raise RunError(f"{one} is a comparison: name it alone, or of its runs those to report: {own or 'none yet'}")
    return gather([read_run(one) for one in paths])
