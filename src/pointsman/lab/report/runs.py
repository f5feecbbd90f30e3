"""Reading run and comparison directories: JSON in, plain values out; damaged files are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman._files import find, open_own, read_json


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} where there is no such file; RunError where it is damaged."""
    return read_json(path) or {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time; a last line that a killed run left unfinished is passed over."""
    if not path.is_file():
        return
    with open(open_own(path), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def number(value: Any) -> float | None:
    """`value` as a finite float; None for everything else, nan and infinities included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


@dataclass(frozen=True)
class Run:
    """One run directory.

    Attributes:
        path: the directory.
        router: the spec, as a row's label; several specs are joined by '|'.
        seed: of the run.
        config, environment, evaluation, diagnostics, explorer: the files of these names; {} where there is none yet.
    """

    path: Path
    router: str
    seed: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return bool(self.evaluation.get("results"))

    @property
    def diagnostics(self) -> dict[str, Any]:
        return read_object(self.path / "diagnostics.json")

    @property
    def explorer(self) -> dict[str, Any]:
        return read_object(self.path / "explorer.json")

    @property
    def steps(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def num_experts(self) -> int | None:
        value = self.config.get("model", {}).get("num_experts")
        return value if isinstance(value, int) else None

    def metrics(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Rows of metrics.jsonl of these kinds, in file order."""
        return (row for row in read_lines(self.path / "metrics.jsonl") if row.get("kind") in kinds)

    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 where there is none."""
        return max((int(step) for row in self.metrics("train") if (step := number(row.get("step")))), default=0)

    def results(self, split: str = "test") -> dict[int, Mapping[str, Any]]:
        """Clean results of the split by k; without that split, those of the first split that was evaluated."""
        rows = [row for row in self.evaluation.get("results", ()) if isinstance(row, dict) and not row.get("attack")]
        splits = [row.get("split") for row in rows]
        wanted = split if split in splits else (splits[0] if splits else None)
        return {int(row["top_k"]): row for row in rows if row.get("split") == wanted and number(row.get("top_k"))}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side: a comparison directory, or several run directories.

    Attributes:
        path: the comparison's directory, or that of the only run.
        settings: everything but the routers.
        routers: specs in order. seeds: in order.
        runs: (router, seed) -> run; missing where it has not begun.
        single: whether this is one run and no comparison.
        command: the words that asked for it, where they were kept.
        planned: whether it is a comparison directory.
    """

    path: Path
    settings: Mapping[str, Any]
    routers: Sequence[str]
    seeds: Sequence[int]
    runs: Mapping[tuple[str, int], Run]
    single: bool = False
    command: str = ""
    planned: bool = True

    def of(self, router: str) -> list[Run]:
        """The runs of one router that have begun, in the order of seeds."""
        return [self.runs[router, seed] for seed in self.seeds if (router, seed) in self.runs]

    def missing(self) -> list[tuple[str, int]]:
        """(router, seed) of all runs without an evaluation."""
        return [
            (router, seed)
            for router in self.routers
            for seed in self.seeds
            if not ((run := self.runs.get((router, seed))) and run.done)
        ]


def label(router: Any) -> str:
    """A router setting (a spec, or a list of specs) as one spec."""
    return "|".join(map(str, router)) if isinstance(router, list | tuple) else str(router)


def read_run(path: Path) -> Run:
    """Reads a run directory; RunError where it is none."""
    config = read_object(path / "config.json")
    if not config:
        raise RunError(f"{path}: no run directory (it has no config.json)")
    model = config.get("model")
    router = label(model.get("router", "-")) if isinstance(model, dict) else "-"
    seed = config.get("seed", 0)
    evaluation = read_object(path / "evaluation.json")
    return Run(path, router, int(seed), config, read_object(path / "environment.json"), evaluation)


def read_comparison(path: Path) -> Comparison:
    """Reads a run directory or a comparison directory; RunError where it is neither."""
    path = Path(path)
    if not path.exists():
        raise RunError(f"{path}: no such directory")
    plan = read_object(path / "comparison.json")
    if not plan:
        if (path / "config.json").is_file():
            return gather([read_run(path)])
        raise RunError(f"{path}: neither a run directory (config.json) nor a comparison (comparison.json)")
    routers, seeds = [label(spec) for spec in plan.get("routers", ())], [int(seed) for seed in plan.get("seeds", ())]
    runs: dict[tuple[str, int], Run] = {}
    for config in find(path, "runs/*/seed-*/config.json"):
        run = read_run(config.parent)
        if run.router in routers and run.seed in seeds:
            runs[run.router, run.seed] = run
    return Comparison(path, plan.get("settings", {}), routers, seeds, runs, command=str(plan.get("command", "")))


def gather(runs: Sequence[Run]) -> Comparison:
    """Several runs as an unplanned comparison; RunError where two have the same router and seed.

    Audits of one class of models go by the names of their folders, too.
    """
    assert runs
    runs = [
        replace(run, router=f"{run.router} ({run.path.resolve().name})")
        if (run.path / "audit.json").is_file() and sum(run.router == other.router for other in runs) > 1
        else run
        for run in runs
    ]
    named: dict[tuple[str, int], Run] = {}
    for run in runs:
        if (run.router, run.seed) in named:
            other = named[run.router, run.seed].path
            raise RunError(f"{other} and {run.path}: two runs with router {run.router!r} and seed {run.seed}")
        named[run.router, run.seed] = run
    first = runs[0]
    common = {key: value for key, value in first.config.items() if all(run.config.get(key) == value for run in runs)}
    routers = list(dict.fromkeys(run.router for run in runs))
    seeds = sorted({run.seed for run in runs})
    return Comparison(first.path, common, routers, seeds, named, single=len(runs) == 1, planned=False)


def read(path: Path | Sequence[Path]) -> Comparison:
    """A directory, or several run directories, as one comparison.

    Raises:
        RunError: no directory, neither a run nor a comparison, or a damaged file.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    if not paths:
        raise RunError("report: name at least one run or comparison directory")
    return read_comparison(paths[0]) if len(paths) == 1 else gather([read_run(one) for one in paths])


def page_path(out: Path | None, comparison: Comparison) -> Path:
    """Where the page goes: `out` itself if it is called .html, else `report.html` in it, or in the directory."""
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        return out
    return (out or comparison.path) / "report.html"
