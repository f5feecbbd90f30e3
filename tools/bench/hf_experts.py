"""experts_implementation="pointsman" against eager and grouped_mm: the experts of a Mixtral block on this CPU.

    python -m tools.bench.hf_experts [--seconds 8] [--out benchmarks/results/hf-experts.md]

Every implementation runs in a process of its own; they take turns on the same new tokens and routing, in at least 5
rounds, at most 25, until `--seconds` a case have passed. A time is the median over rounds, a ratio the median of the
ratios round by round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tools.bench.process import Process
from tools.bench.report import machine
from tools.bench.run import PAUSE
from tools.bench.worker import awake

IMPLEMENTATIONS = ("eager", "grouped_mm", "pointsman")
SHAPES = {  # dim, hidden, experts, k, tokens
    "small": (256, 512, 8, 2, 512),
    "tall": (512, 1024, 16, 2, 1024),
    "many experts": (512, 256, 64, 8, 1024),
    "decode": (512, 1024, 16, 2, 1),
}
CASES = [
    *(
        (shape, "float32", backward)
        for shape in SHAPES
        for backward in (False, True)
        if shape != "decode" or not backward
    ),
    ("small", "bfloat16", True),
    ("decode", "bfloat16", False),
]
TINY = (16, 16, 4, 2, 8)
LEAST, MOST, WARM_UP = 5, 25, 3


class Experts:
    """What a worker measures: one implementation, one case."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, backward: bool) -> None:
        import transformers

        import pointsman.hf  # noqa: F401 - registers the implementation

        self.dim, hidden, self.experts, self.k, self.tokens = shape
        self.dtype, self.backward = getattr(torch, dtype), backward
        config = transformers.MixtralConfig(
            hidden_size=self.dim,
            intermediate_size=hidden,
            num_local_experts=self.experts,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=32,
            experts_implementation=name,
        )
        torch.manual_seed(0)
        self.module = transformers.MixtralForCausalLM(config).model.layers[0].mlp.experts.to(self.dtype)
        assert self.module.config._experts_implementation == name

    def seconds(self, seed: int) -> float:
        torch.manual_seed(seed)
        hidden = torch.randn(self.tokens, self.dim).to(self.dtype).requires_grad_(self.backward)
        weights, index = torch.softmax(torch.randn(self.tokens, self.experts), -1).topk(self.k, -1)
        weights, gradient = weights.to(self.dtype), torch.randn(self.tokens, self.dim).to(self.dtype)
        self.module.zero_grad()
        awake()
        start = time.perf_counter()
        with torch.set_grad_enabled(self.backward):
            output = self.module(hidden, index, weights)
            if self.backward:
                output.backward(gradient)
        return time.perf_counter() - start


def work(pipe: Connection) -> None:
    """Answers ("build", [name, shape, dtype, backward]) and ("measure", seed)."""
    experts: Any = None
    while True:
        try:
            request, value = pipe.recv()
        except EOFError:
            return
        try:
            if request == "build":
                experts = Experts(*value)
                answer: dict[str, Any] = {}
            else:
                answer = {"seconds": experts.seconds(value)}
        except Exception as error:  # the table says so, and the others go on
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        pipe.send(answer)


@dataclass
class Times:
    seconds: list[float] = field(default_factory=list)
    error: str | None = None

    def shown(self) -> str:
        return f"{1e3 * statistics.median(self.seconds):.2f}" if self.error is None else self.error

    def over(self, other: Times) -> str:
        if self.error or other.error:
            return "-"
        return f"{statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True)):.2f}"


def start(name: str) -> Process:
    return Process(name, work)


def run_case(
    processes: dict[str, Process], shape: tuple[int, ...], dtype: str, backward: bool, seconds: float
) -> dict[str, Times]:
    times = {name: Times() for name in processes}
    for name, process in processes.items():
        times[name].error = process.ask("build", [name, shape, dtype, backward]).get("error")
    begin = time.monotonic()
    for turn in range(WARM_UP + MOST):
        if turn >= WARM_UP + LEAST and time.monotonic() - begin > seconds:
            break
        for name, process in processes.items():
            one = times[name]
            if one.error is None:
                time.sleep(PAUSE)
                answer = process.ask("measure", turn)
                one.error = answer.get("error")
                if one.error is None and turn >= WARM_UP:
                    one.seconds.append(answer["seconds"])
    for name in processes:  # a process that ended must not take the next case with it
        if times[name].error is not None:
            processes[name].close()
            processes[name] = start(name)
    return times


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--seconds", type=float, default=8.0, help="a case, beside at least 5 rounds")
    flags.add_argument("--out", type=Path, default=Path("benchmarks/results/hf-experts.md"))
    flags.add_argument("--tiny", action="store_true", help="tiny shapes: only to see that it runs")
    values = flags.parse_args()
    measure(values.seconds, values.out, values.tiny)


def measure(seconds: float, out: Path, tiny: bool) -> None:
    lines = ["# Experts of a Mixtral block: eager, grouped_mm, pointsman", ""]
    lines += [f"- {name}: {value}" for name, value in machine().items()]
    lines += [
        "",
        "`python -m tools.bench.hf_experts`; milliseconds and ratios are medians over interleaved rounds.",
        "",
    ]
    heads = ["case (dim, hidden, E, k, tokens)", "dtype", "pass", *(f"{name} ms" for name in IMPLEMENTATIONS)]
    heads += ["eager / pointsman", "grouped_mm / pointsman", "rounds"]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    processes = {name: start(name) for name in IMPLEMENTATIONS}
    for name, dtype, backward in CASES:
        shape = TINY if tiny else SHAPES[name]
        times = run_case(processes, shape, dtype, backward, seconds)
        ours = times["pointsman"]
        cells = [f"{name} {shape}", dtype, "forward + backward" if backward else "forward"]
        cells += [times[one].shown() for one in IMPLEMENTATIONS]
        cells += [times["eager"].over(ours), times["grouped_mm"].over(ours), str(len(ours.seconds))]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")  # what is done stays, whatever comes
    for process in processes.values():
        process.close()
    print(f"\n{out}")


if __name__ == "__main__":
    main()
