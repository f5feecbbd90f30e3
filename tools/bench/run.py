"""Runs the cases: one process for each implementation; the processes take turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pointsman._errors import RunError
from pointsman.routers.frame.registry import list_routers
from tools.bench.cases import Case, cases, growth, router_cases, steps
from tools.bench.implementations import IMPLEMENTATIONS, LIMITS, OWN
from tools.bench.process import Process, ask_all
from tools.bench.steps import SETTINGS, WAYS, Settings

SECONDS = 3.0  # for one case
LEAST = 5  # the smallest number of rounds
WARM_UP = {"float32": 1.0, "bfloat16": 8.0}  # seconds at most; in bf16 torch builds a kernel for each row count
ROUNDS = {True: 15, False: 60}  # the largest number of rounds, for training and for decoding (short calls)
TOO_SLOW = 8  # a peer that takes this many times as long as the best peer gets no rounds
STEP_ROUNDS = 15
ROUTER_ROUNDS = 15
PAUSE = 0.02  # seconds between calls, until the threads of the previous call sleep


@dataclass
class Times:
    """One implementation's measurements, in seconds and bytes, round by round."""

    forward: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    memory: float | None = None
    error: str | None = None

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.total)

    def ratio(self, other: Times, name: str = "total") -> float:
        """The median over common rounds of this time divided by the other's in the same round."""
        mine: list[float] = getattr(self, name)
        theirs: list[float] = getattr(other, name)
        return statistics.median([one / two for one, two in zip(mine, theirs, strict=False)])


@dataclass
class Result:
    """One case, all implementations."""

    case: Case
    times: dict[str, Times]

    @property
    def limit(self) -> Times:
        return next(self.times[name] for name in LIMITS if name in self.times)

    def peers(self) -> dict[str, Times]:
        return {name: times for name, times in self.times.items() if name not in OWN and times.total}

    def best_peer(self) -> tuple[str, float] | None:
        """The best peer, and its time divided by ours; None if either is missing."""
        ours = self.times["pointsman"]
        ratios = {name: times.ratio(ours) for name, times in self.peers().items()} if ours.total else {}
        return min(ratios.items(), key=lambda pair: pair[1], default=None)


def names_for(case: Case, peers: Sequence[str] | None) -> list[str]:
    """The implementations of a case: ours, its limits, and the installed peers that support it."""
    return [
        name
        for name, implementation in IMPLEMENTATIONS.items()
        if implementation.installed and implementation.suits(case) and (name in OWN or peers is None or name in peers)
    ]


def run_case(case: Case, names: Sequence[str], seconds: float) -> Result:
    """Measures a case in as many rounds as fit into `seconds`: from `LEAST` (1 if they take very long) to `ROUNDS`.

    A peer that takes `TOO_SLOW` times as long as the best peer after warm-up keeps its time from the warm-up; one that
    takes 4 times as long leaves after the first round, one that takes twice as long after 3 rounds.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(Process(name)) for name in names]
        built = ask_all({process: ("build", [process.name, case]) for process in processes})
        times = {process.name: Times(error=answer.get("error")) for process, answer in built.items()}
        contenders = _warm_up(processes, times, _warm_up_seconds(case))
        start = time.monotonic()
        for turn in range(ROUNDS[case.train]):
            passed = time.monotonic() - start
            if (turn >= LEAST and passed > seconds) or (turn and passed > 4 * seconds):
                break
            contenders = _competitive(contenders, times, 2 if turn >= 3 else 4 if turn else math.inf)
            for process in contenders:
                _measure(process, times[process.name], turn)
        _measure_memory([process for process in contenders if process.name not in LIMITS], times)
    return Result(case, times)


def _warm_up(processes: Sequence[Process], times: Mapping[str, Times], seconds: float) -> Sequence[Process]:
    """Warm-up calls until they get no faster (`Worker.warm`). Returns the processes that continue."""
    for process in processes:
        if times[process.name].error is None:
            _note(times[process.name], process.ask("warm", seconds))
    contenders = _competitive(processes, times, TOO_SLOW)
    for process in contenders:
        times[process.name].forward.clear()
        times[process.name].total.clear()
    return contenders


def _competitive(processes: Sequence[Process], times: Mapping[str, Times], factor: float) -> list[Process]:
    """The processes that are always measured, and the peers that take at most `factor` times the best peer's time."""
    peers = {name: statistics.median(one.total) for name, one in times.items() if name not in OWN and one.total}
    if not peers:
        return list(processes)
    fastest = min(peers.values())
    return [process for process in processes if peers.get(process.name, 0.0) <= factor * fastest]


def _measure(process: Process, times: Times, turn: int) -> None:
    if times.error is not None:
        return
    time.sleep(PAUSE)
    _note(times, process.ask("measure", 10 * turn))


def _note(times: Times, answer: Mapping[str, Any]) -> None:
    times.error = answer.get("error")
    if times.error is None:
        times.total.append(answer["total"])
        if "forward" in answer:
            times.forward.append(answer["forward"])


def _measure_memory(processes: Sequence[Process], times: Mapping[str, Times]) -> None:
    """Runs last, because it frees what a process keeps between calls."""
    for process in processes:
        if times[process.name].error is None:
            times[process.name].memory = process.ask("memory", 0).get("memory")


def _warm_up_seconds(case: Case) -> float:
    """Decoding has few row counts, so that few kernels are built; a GPU's kernels do not depend on them."""
    return WARM_UP[case.dtype if case.train and case.device == "cpu" else "float32"]


def run_routers(case: Case, specs: Sequence[str], rounds: int = ROUTER_ROUNDS) -> dict[str, float]:
    """Each router's forward and backward, over those of the whole layer with the router `smoe`: medians over rounds."""
    shares: dict[str, list[float]] = {spec: [] for spec in specs}
    with Process("pointsman") as process:
        process.ask("build", ["pointsman", case])
        process.ask("warm", WARM_UP[case.dtype])
        for turn in range(-1, rounds):  # the first round builds the routers
            whole = process.ask("measure", 10 * turn + 10)
            for spec, found in shares.items():
                router = process.ask("router", (spec, 10 * turn + 10))
                for answer in (router, whole):
                    if "error" in answer:
                        raise RunError(f"the share of router {spec!r} was not measured: {answer['error']}")
                if turn >= 0:
                    found.append(router["router"] / whole["total"])
    return {spec: statistics.median(found) for spec, found in shares.items()}


@dataclass
class StepResult:
    """Training steps at one k: way -> seconds per step (`total`), and peak bytes on the device."""

    k: int
    times: dict[str, Times]


def run_steps(
    k: int, device: str, rounds: int = STEP_ROUNDS, settings: Settings = SETTINGS, ways: Sequence[str] = WAYS
) -> StepResult:
    """Measures training steps; the ways take turns."""
    times = {way: Times() for way in ways}
    with ExitStack() as stack:
        processes = [stack.enter_context(Process(way)) for way in ways]
        for process in processes:
            answer = process.ask("train", [process.name, device, {**settings, "train_top_k": str(k)}])
            times[process.name].error = answer.get("error")
        for turn in range(rounds):
            for process in processes:
                _measure(process, times[process.name], turn)
        _measure_memory(processes, times)
    return StepResult(k, times)


@dataclass
class Point:
    """One point of a growth curve: our time, in milliseconds, and its ratio to the limit."""

    value: int
    milliseconds: float
    ratio: float


def run_growth(begins: Callable[[str], bool]) -> dict[str, list[Point]]:
    """Each axis alone around configuration a; half a second for a point. `begins` may leave an axis out."""
    curves: dict[str, list[Point]] = {}
    for axis, points in growth().items():
        if not begins(f"growth: {axis}"):
            continue
        curves[axis] = []
        for value, case in points.items():
            times = run_case(case, ("pointsman", "limit"), 0.5).times
            ours, limit = times["pointsman"], times["limit"]
            curves[axis].append(Point(value, ours.milliseconds, ours.ratio(limit)))
    return curves


@dataclass
class Benchmark:
    """Everything one run measured.

    Attributes:
        routers: dtype -> router -> share of configuration a.
        left_out: measurements for which no time was left.
    """

    results: list[Result]
    routers: dict[str, dict[str, float]]
    growth: dict[str, list[Point]]
    steps: list[StepResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run(
    device: str = "cpu",
    quick: bool = False,
    peers: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    announce: Callable[[str], None] = lambda text: None,
    seconds: float = math.inf,
) -> Benchmark:
    """Runs the whole benchmark: about a minute if `quick`, otherwise several.

    Args:
        device: "cpu", or a CUDA device.
        quick: configuration a and one token of decoding only, and no growth.
        peers: names of peers to compare with; None: all that are installed.
        names: names of cases; None: all, and the curves of growth.
        announce: called with the name of the next measurement.
        seconds: after so many no further measurement begins.
    """
    end = time.monotonic() + seconds
    benchmark = Benchmark([], {}, {})

    def begins(name: str, place: str = "") -> bool:
        if time.monotonic() >= end:
            benchmark.left_out.append(name)
            return False
        announce(place + name)
        return True

    chosen = cases(device, quick, names)
    for index, case in enumerate(chosen):
        if begins(case.label, f"{index + 1}/{len(chosen)}  "):
            benchmark.results.append(run_case(case, names_for(case, peers), SECONDS))
    for case in router_cases(device, names):
        if begins(f"routers: {case.label}"):
            rounds = 5 if quick else ROUTER_ROUNDS
            benchmark.routers[case.dtype] = run_routers(case, list_routers(), rounds=rounds)
    for k in steps(device, quick, names):
        if begins(f"training steps: k {k}"):
            benchmark.steps.append(run_steps(k, device))
    if not quick and device == "cpu" and names is None:
        benchmark.growth = run_growth(begins)
    return benchmark
