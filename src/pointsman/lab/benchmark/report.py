"""The benchmark's results as Markdown, JSON and a plot."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch

from pointsman import __version__
from pointsman._files import replacing, write_whole
from pointsman.lab.benchmark.cases import Case
from pointsman.lab.benchmark.implementations import IMPLEMENTATIONS, LIMITS
from pointsman.lab.benchmark.run import Benchmark, Result, StepResult, Times
from pointsman.ops.kernels import measure_kernels


def machine() -> dict[str, str]:
    """Versions, processor, threads and kernels, on which the figures depend."""
    info = {
        "pointsman": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": ", ".join(f"{name}={value}" for name, value in measure_kernels().to_dict().items()),
    }
    if torch.cuda.is_available():
        info["GPU"] = torch.cuda.get_device_name()
    return info


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    here = Path(__file__).resolve().parent
    words = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


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
    if benchmark.results:
        lines += ["## Summary", "", "| case | over the limit | best peer | speed over it |", "|---|---|---|---|"]
    for result in benchmark.results:
        best = result.best_peer()
        peer = "- | -" if best is None else f"{best[0]} | {best[1]:.2f}"
        lines.append(f"| {result.case.label} | {_ratio(result.times['pointsman'], result)} | {peer} |")
    for dtype, share in benchmark.router.items():
        lines += ["", f"The router takes {share:.1%} of the layer in configuration a, k 2, {dtype}."]
    for result in benchmark.results:
        lines += ["", f"## {result.case.label}", "", *rate(result), *table(result)]
    if benchmark.steps:
        lines += [
            "",
            "## Training steps of HyperRouter's small Transformer-XL",
            "",
            "22 x 512 tokens after a memory of 512; forward, backward, clipping and Adam; one process for each way; "
            "they take turns. Memory is the peak reserved on the device for a process.",
        ]
    for steps in benchmark.steps:
        lines += ["", f"k {steps.k}:", "", *step_table(steps)]
    if benchmark.growth:
        lines += ["", "## Growth around configuration a (forward + backward, float32)"]
    for axis, points in benchmark.growth.items():
        lines += ["", f"| {axis} | ms | over the limit |", "|---|---|---|"]
        lines += [f"| {point.value} | {point.milliseconds:.1f} | {point.ratio:.2f} |" for point in points]
    return "\n".join(lines) + "\n"


def rate(result: Result) -> list[str]:
    """The limit's measured rate, and our layer's share of it."""
    ours, limit = result.times["pointsman"], result.limit
    if not result.case.train or not ours.total or not limit.total:
        return []
    teraflops = result.case.operations / (limit.milliseconds * 1e9)
    share = f"{1 / ours.ratio(limit):.0%} of {teraflops:.3g} TFLOP/s, the limit's rate"
    return [f"pointsman, forward + backward: {share}.", ""]


def step_table(steps: StepResult) -> list[str]:
    """Steps a second, a line for each way."""
    eager = steps.times["eager"]
    lines = ["| way | ms a step | steps a second | times eager | GPU memory MB |", "|---|---|---|---|---|"]
    for way, times in steps.times.items():
        if times.error is not None or not times.total:
            lines.append(f"| {way} | {times.error or '-'} | - | - | - |")
            continue
        speed = f"{1 / times.ratio(eager):.2f}" if eager.total else "-"
        memory = "-" if times.memory is None else f"{times.memory / 2**20:.0f}"
        lines.append(f"| {way} | {times.milliseconds:.2f} | {1e3 / times.milliseconds:.1f} | {speed} | {memory} |")
    return lines


def table(result: Result) -> list[str]:
    """One case, a line for each implementation."""
    lines = ["| implementation | forward ms | over the limit |"]
    ruler = "|---|---|---|"
    if result.case.train:
        lines = ["| implementation | forward ms | over the limit | forward + backward ms | over the limit | peak MB |"]
        ruler = "|---|---|---|---|---|---|"
    lines.append(ruler)
    for name, times in result.times.items():
        if times.error is not None or not times.total:
            lines.append(f"| {name} | {times.error or '-'} |" + " - |" * (ruler.count("|") - 3))
            continue
        forward = 1e3 * sorted(times.forward)[len(times.forward) // 2]
        cells = [name, f"{forward:.{2 if forward >= 1 else 3}f}", _ratio(times, result, "forward")]
        if result.case.train:
            memory = "-" if times.memory is None else f"{times.memory / 2**20:.0f}"
            cells += [f"{times.milliseconds:.2f}", _ratio(times, result), memory]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _ratio(times: Times, result: Result, name: str = "total") -> str:
    return f"{times.ratio(result.limit, name):.2f}" if times.total and result.limit.total else "-"


def write(benchmark: Benchmark, folder: Path) -> list[Path]:
    """Writes layer.md, layer.json and, where matplotlib is installed, layer.svg."""
    record = {"machine": machine(), **asdict(benchmark)}
    written = [
        write_whole(folder / "layer.md", markdown(benchmark)),
        write_whole(folder / "layer.json", json.dumps(record, indent=1) + "\n"),
    ]
    if not benchmark.results:
        return written
    with contextlib.suppress(ImportError):  # matplotlib is an extra
        written.append(plot(benchmark, folder / "layer.svg"))
    return written


_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def _short(case: Case) -> str:
    if case.name == "gpu":
        return f"d {case.dim}, h {case.hidden_dim}, N {case.num_experts}, k {case.k}"
    return f"{case.name}, k {case.k}, {case.tokens}, {_SHORT[case.dtype]}"


def plot(benchmark: Benchmark, path: Path) -> Path:
    """Bars: every implementation's time over the limit, case by case; curves: growth."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    axes_count = 1 + len(benchmark.growth)
    figure, axes = pyplot.subplots(
        axes_count, 1, figsize=(11, 3 + 2.4 * axes_count), squeeze=False, layout="constrained"
    )
    bars = axes[0, 0]
    seen = {name for result in benchmark.results for name in result.times if name not in LIMITS}
    names = [name for name in IMPLEMENTATIONS if name in seen]
    width = 0.8 / len(names)
    for offset, name in enumerate(names):
        heights = []
        for result in benchmark.results:
            times = result.times.get(name)
            heights.append(times.ratio(result.limit) if times and times.total and result.limit.total else 0.0)
        bars.bar([x + offset * width for x in range(len(heights))], heights, width, label=name)
    bars.axhline(1, color="black", linewidth=0.8)
    bars.set_yscale("log")
    bars.set_ylabel("time over the limit")
    labels = [_short(result.case) for result in benchmark.results]
    bars.set_xticks([x + 0.4 for x in range(len(labels))], labels, fontsize=7, rotation=60, ha="right")
    if benchmark.results[0].case.name != "gpu":
        bars.set_xlabel("case, k, tokens, type")
    bars.legend(fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    for axis, (name, points) in zip(axes[1:, 0], benchmark.growth.items(), strict=True):
        axis.plot([point.value for point in points], [point.milliseconds for point in points], marker="o")
        axis.plot(
            [point.value for point in points], [point.milliseconds / point.ratio for point in points], linestyle="--"
        )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(name)
        axis.set_ylabel("ms (dashed: limit)")
    with replacing(path) as aside:
        figure.savefig(aside, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return path
