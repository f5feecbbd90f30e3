"""The benchmark's results as Markdown, JSON and a plot."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from pointsman import __version__
from pointsman._files import replacing, write_whole
from pointsman._grid import NONE, Grid, wrapped
from pointsman_lab.runs.environment import commit, processor
from tools.bench.cases import Case
from tools.bench.implementations import IMPLEMENTATIONS, LIMITS
from tools.bench.run import Benchmark, Result, StepResult, Times


def machine() -> dict[str, str]:
    """Versions, processor and threads, on which the figures depend."""
    info = {
        "pointsman": __version__,
        "commit": commit() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        info["GPU"] = torch.cuda.get_device_name()
    return info


def markdown(benchmark: Benchmark) -> str:
    """All tables."""
    lines = ["# The MoE layer against its limit and its peers", ""]
    lines += [f"- {name}: {value}" for name, value in machine().items()]
    lines += [
        "",
        "Each implementation runs in its own process; the processes take turns on the same new tokens. A time is the "
        "median over rounds, a ratio the median over the ratios of all rounds. The limit is a dense chain of the same "
        "matrix products at this machine's highest rate (forward and backward: three times the forward); in decoding "
        "it is reading the chosen experts' weights once. Memory is the peak of one call, without the weights and the "
        "kernels that libraries cache.",
        "",
    ]
    if benchmark.left_out:
        lines += [f"No time was left for: {'; '.join(benchmark.left_out)}.", ""]
    if benchmark.results:
        rows = []
        for result in benchmark.results:
            peer, speed = result.best_peer() or (NONE, None)
            speed_over = NONE if speed is None else f"{speed:.2f}"
            rows.append([result.case.label, _ratio(result.times["pointsman"], result), peer, speed_over])
        lines += ["## Summary", "", _markdown(["case", "over the limit", "best peer", "speed over it"], rows)]
    if benchmark.routers:
        lines += [
            "",
            "## Routers",
            "",
            "Each router's forward and backward with its losses, over those of the whole layer with `smoe` in "
            "configuration a, k 2.",
            "",
            router_table(benchmark.routers),
        ]
    for result in benchmark.results:
        lines += ["", f"## {result.case.label}", "", *rate(result), table(result)]
    if benchmark.steps:
        lines += [
            "",
            "## Training steps of HyperRouter's small Transformer-XL",
            "",
            "22 x 512 tokens after a memory of 512; forward, backward, clipping and Adam; one process for each way; "
            "they take turns. Memory is the peak reserved on the device for a process.",
        ]
    for steps in benchmark.steps:
        lines += ["", f"k {steps.k}:", "", step_table(steps)]
    if benchmark.growth:
        lines += ["", "## Growth around configuration a (forward + backward, float32)"]
    for axis, points in benchmark.growth.items():
        rows = [[str(point.value), f"{point.milliseconds:.1f}", f"{point.ratio:.2f}"] for point in points]
        lines += ["", _markdown([axis, "ms", "over the limit"], rows)]
    return "\n".join(lines) + "\n"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    return Grid(header, [row + [NONE] * (len(header) - len(row)) for row in rows], code=False).markdown()


def router_table(shares: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each router, a column for each dtype."""
    routers = list(next(iter(shares.values())))
    rows = [[router, *(f"{of_dtype[router]:.1%}" for of_dtype in shares.values())] for router in routers]
    return _markdown(["router", *shares], rows)


def rate(result: Result) -> list[str]:
    """The limit's measured rate, and our layer's share of it."""
    ours, limit = result.times["pointsman"], result.limit
    if not result.case.train or not ours.total or not limit.total:
        return []
    teraflops = result.case.operations / (limit.milliseconds * 1e9)
    share = f"{1 / ours.ratio(limit):.0%} of {teraflops:.3g} TFLOP/s, the limit's rate"
    return [f"pointsman, forward + backward: {share}.", ""]


def step_table(steps: StepResult) -> str:
    """Steps a second, a line for each way."""
    eager = steps.times["eager"]
    rows = []
    for way, times in steps.times.items():
        cells = [way, times.error or NONE]
        if times.error is None and times.total:
            speed = f"{1 / times.ratio(eager):.2f}" if eager.total else NONE
            cells = [way, f"{times.milliseconds:.2f}", f"{1e3 / times.milliseconds:.1f}", speed, _megabytes(times)]
        rows.append(cells)
    return _markdown(["way", "ms a step", "steps a second", "times eager", "GPU memory MB"], rows)


def table(result: Result) -> str:
    """One case, a line for each implementation."""
    rows = []
    for name, times in result.times.items():
        cells = [name, times.error or NONE]
        if times.error is None and times.total:
            forward = 1e3 * sorted(times.forward)[len(times.forward) // 2]
            cells = [name, f"{forward:.{2 if forward >= 1 else 3}f}", _ratio(times, result, "forward")]
            if result.case.train:
                cells += [f"{times.milliseconds:.2f}", _ratio(times, result), _megabytes(times)]
        rows.append(cells)
    whole = ["forward + backward ms", "over the limit", "peak MB"] if result.case.train else []
    return _markdown(["implementation", "forward ms", "over the limit", *whole], rows)


def _megabytes(times: Times) -> str:
    return NONE if times.memory is None else f"{times.memory / 2**20:.0f}"


def _ratio(times: Times, result: Result, name: str = "total") -> str:
    return f"{times.ratio(result.limit, name):.2f}" if times.total and result.limit.total else NONE


def write(benchmark: Benchmark, folder: Path) -> list[Path]:
    """Writes layer.md, layer.json and, where matplotlib is installed, layer.svg."""
    record = {"machine": machine(), **asdict(benchmark)}
    written = [
        write_whole(folder / "layer.md", wrapped(markdown(benchmark))),
        write_whole(folder / "layer.json", json.dumps(record, indent=1) + "\n"),
    ]
    if not benchmark.results:
        return written
    with contextlib.suppress(ImportError):  # matplotlib is an extra
        written.append(plot(benchmark, folder / "layer.svg"))
    return written


_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def _short(case: Case) -> str:
    if case.name.startswith("gpu"):
        return f"d {case.dim}, h {case.hidden_dim}, N {case.num_experts}, k {case.k}"
    return f"{case.name}, k {case.k}, {case.tokens}, {_SHORT[case.dtype]}"


def plot(benchmark: Benchmark, path: Path) -> Path:
    """Bars: every implementation's time over the limit, case by case; curves: growth."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    count = 1 + len(benchmark.growth)
    figure, axes = pyplot.subplots(count, 1, figsize=(11, 3 + 2.4 * count), squeeze=False, layout="constrained")
    bars = axes[0, 0]
    seen = {name for result in benchmark.results for name in result.times if name not in LIMITS}
    names = [name for name in IMPLEMENTATIONS if name in seen]
    width = 0.8 / len(names)
    for offset, name in enumerate(names):
        pairs = [(result.times.get(name, Times()), result.limit) for result in benchmark.results]
        heights = [times.ratio(limit) if times.total and limit.total else 0.0 for times, limit in pairs]
        bars.bar([x + offset * width for x in range(len(heights))], heights, width, label=name)
    bars.axhline(1, color="black", linewidth=0.8)
    bars.set_yscale("log")
    bars.set_ylabel("time over the limit")
    labels = [_short(result.case) for result in benchmark.results]
    bars.set_xticks([x + 0.4 for x in range(len(labels))], labels, fontsize=7, rotation=60, ha="right")
    if not benchmark.results[0].case.name.startswith("gpu"):
        bars.set_xlabel("case, k, tokens, type")
    bars.legend(fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    for axis, (name, points) in zip(axes[1:, 0], benchmark.growth.items(), strict=True):
        values = [point.value for point in points]
        axis.plot(values, [point.milliseconds for point in points], marker="o")
        axis.plot(values, [point.milliseconds / point.ratio for point in points], linestyle="--")
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", xlabel=name, ylabel="ms (dashed: limit)")
    with replacing(path) as aside:
        figure.savefig(aside, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return path
