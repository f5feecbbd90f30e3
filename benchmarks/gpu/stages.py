"""The stages of `benchmarks/gpu`, each a function that records figures as it finds them."""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops import kernels as on_gpu
from pointsman.ops.kernels import Kernels, using
from tools.bench.peers import IMPLEMENTATIONS, LIMIT, Case, Implementation

ROOT = Path(__file__).parents[2]
WARM, ROUNDS = 0.5, 20
SHAPES = (  # tokens, dim, hidden_dim, experts, k
    (4096, 1024, 2048, 16, 2), (11264, 256, 512, 16, 2), (11264, 256, 512, 16, 16), (32768, 1024, 2048, 16, 2),
    (32768, 1024, 512, 64, 8), (32768, 2048, 768, 128, 8), (32768, 2048, 4096, 64, 2), (65536, 1024, 4096, 32, 1),
)  # fmt: skip
DECODING = (1, 1024, 2048, 64, 8), (8, 1024, 2048, 64, 8), (1, 2048, 768, 128, 8), (64, 1024, 2048, 64, 8)
"""Without gradients; as GB/s of the chosen experts' weights."""
TINY = ((24, 16, 32, 4, 2),)
TINY_DECODING = ((2, 16, 32, 4, 2),)
PEERS = ("eight lines", "transformers grouped_mm", "transformers batched_mm", "scattermoe")


class Record:
    """Figures in a JSON file, written anew with each."""

    def __init__(self, file: Path, device: str, tiny: bool) -> None:
        self.file, self.device, self.tiny = file, torch.device(device), tiny
        self.figures: dict[str, Any] = {"device": device, "tiny": tiny, "summary": ""}

    def __setitem__(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self.file.write_text(json.dumps(self.figures, indent=1))
        print(name, value, flush=True)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def milliseconds(self, call: Callable[[], object], warm: float = WARM) -> float:
        """The median of calls, after a warm-up; on a GPU by its own clock."""
        rounds, end = (1, 0.0) if self.tiny else (ROUNDS, time.monotonic() + warm)
        call()
        while time.monotonic() < end:
            call()
        times = []
        for _ in range(rounds):
            if self.device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
            else:
                began = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)

    def measure(self, name: str, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Records the milliseconds of this call."""
        self[f"{name}_ms"] = self.milliseconds(partial(function, *arguments, **options))


def facts(record: Record) -> None:
    """Versions, the device, its copy bandwidth and its rate in a large product."""
    record["versions"] = {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda}
    record["triton"] = on_gpu.without_triton(None) or __import__("triton").__version__
    if record.device.type == "cuda":
        record["name"] = torch.cuda.get_device_name(record.device)
        record["capability"] = torch.cuda.get_device_capability(record.device)
    size = 1 << 10 if record.tiny else 1 << 30
    source = torch.empty(size, dtype=torch.uint8, device=record.device)
    target = torch.empty_like(source)
    record["copy_GB_per_s"] = 2 * size / 1e6 / record.milliseconds(lambda: target.copy_(source))
    side = 64 if record.tiny else 8192
    left, right = record.randn(side, side), record.randn(side, side)
    record["product_TFLOP_per_s"] = 2 * side**3 / 1e9 / record.milliseconds(lambda: left @ right)
    found = record.figures
    record["summary"] = f"{found['copy_GB_per_s']:.0f} GB/s, {found['product_TFLOP_per_s']:.0f} TFLOP/s"


def tests(record: Record) -> None:
    """The tests that need a GPU; warnings are listed, not errors."""
    paths = ["tests/library/kernels", "tests/library/contract", "tests/library/hf", "tests/lab/checkpoints"]
    paths += ["tests/tools/bench"]
    options = ["--collect-only"] if record.tiny else ["-n", "8"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", *options, *paths]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    record["output"] = ended.stdout[-20000:]
    record["code"] = ended.returncode
    went = "collected" if record.tiny else "passed"
    record["summary"] = went if ended.returncode == 0 else f"failed: pytest ended with {ended.returncode}"


def micro(record: Record) -> None:
    """Single operators behind estimates: aligned rows, grouped products, gathers, sorts."""
    rows = 8 if record.tiny else 2816
    for columns in (1024, 1025, 1032):
        left, right = record.randn(8, rows, 64), record.randn(8, columns, 64).mT
        record.measure(f"bmm_{columns}_columns", torch.matmul, left, right)
    for tokens, dim, hidden, experts, k in TINY if record.tiny else SHAPES[:5]:
        slots = tokens * k
        left, weight = record.randn(slots, dim), record.randn(experts, hidden, dim).mT
        ends = torch.linspace(slots / experts, slots, experts, device=record.device).to(torch.int32)
        record.measure(f"grouped_mm_{slots}x{dim}x{hidden}_of_{experts}", F.grouped_mm, left, weight, offs=ends)
        index = torch.randint(0, slots, (slots,), device=record.device)
        record.measure(f"index_select_{slots}x{dim}", torch.index_select, left, 0, index)
        places = index.view(tokens, k)
        record.measure(f"embedding_bag_{slots}x{dim}", F.embedding_bag, places, left, mode="sum", padding_idx=0)
        for dtype in (torch.int64, torch.uint8):
            record.measure(f"sort_{slots}_{str(dtype)[6:]}", torch.sort, (index % experts).to(dtype), stable=True)
    record["summary"] = f"bmm with 1025 columns: {record.figures['bmm_1025_columns_ms']:.3f} ms"


def ways() -> list[str]:
    return ["torch"] if on_gpu.without_triton(None) else ["triton", "torch"]


def layer(record: Record) -> None:
    """The experts and a router, forward and backward, and decoding: our kernels, peers, and the dense limit."""
    best = {True: [], False: []}
    dtype, device = str(record.dtype)[6:], str(record.device)
    for train, shapes in ((True, TINY if record.tiny else SHAPES), (False, TINY_DECODING if record.tiny else DECODING)):
        for shape in shapes:
            case = Case("x".join(map(str, shape)), *shape, dtype, train=train, device=device)
            limit = [LIMIT] if train else []  # decoding's is the device's copy rate, a figure of `facts`
            times = {name: timed(record, case, name) for name in (*ways(), *PEERS, *limit)}
            record[case.name] = times
            ours, theirs = (
                [best_of(times[name]) for name in names if "ms" in times[name]] for names in (ways(), PEERS)
            )
            best[train] += [min(theirs) / min(ours)] if ours and theirs else []
    said = [f"{statistics.median(found):.2f}" if found else "no peer ran" for found in best.values()]
    record["summary"] = f"best peer over ours, median: {said[0]}; decoding: {said[1]}"


def best_of(figures: dict[str, Any]) -> float:
    return min(figures["ms"], figures.get("graph_ms", figures["ms"]))


def timed(record: Record, case: Case, name: str) -> dict[str, Any]:
    """The figures of one implementation, or why there are none."""
    own = name in ways()
    implementation = IMPLEMENTATIONS["pointsman" if own else name]
    if not implementation.installed:
        return {"error": "not installed"}
    if not implementation.suits(case):
        return {"error": "does not take this case"}
    kernels = Kernels(gpu=name) if own and record.device.type == "cuda" else Kernels()
    try:
        return one_layer(record, case, implementation, kernels)
    except Exception as error:  # another package's, whatever it is, does not end the stage
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def one_layer(record: Record, case: Case, implementation: Implementation, kernels: Kernels) -> dict[str, Any]:
    """Milliseconds of a call, and of its replay as a CUDA graph (`graph_ms`): without what the host takes to start its
    kernels."""
    with record.device:
        function, module = implementation.build(case)
    module.to(record.device, record.dtype).train(case.train)
    leaves = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def call() -> None:
        hidden = record.randn(case.tokens, case.dim).requires_grad_(case.train)
        with torch.set_grad_enabled(case.train):
            output = function(hidden)
        if case.train:
            torch.autograd.grad(output, [hidden, *leaves], output, allow_unused=True)

    cuda = record.device.type == "cuda"
    with using(kernels):
        call()
        if cuda:
            torch.cuda.reset_peak_memory_stats(record.device)
        time_ = record.milliseconds(call)
        memory = torch.cuda.max_memory_allocated(record.device) / 1e9 if cuda else 0.0
        found: dict[str, Any] = replayed(record, call) if cuda else {}
    if implementation is IMPLEMENTATIONS[LIMIT]:  # of forward alone: backward takes twice as many products
        time_, found = 3 * time_, {name: 3 * one for name, one in found.items() if name == "graph_ms"}
    best = found.get("graph_ms", time_)
    found |= {"ms": time_, "TFLOP_per_s": case.operations / 1e9 / best, "memory_GB": memory}
    if not case.train:
        used = case.num_experts * (1 - (1 - case.k / case.num_experts) ** case.tokens)  # of uniform routing
        found["GB_per_s"] = used * 2 * case.dim * case.hidden_dim * record.dtype.itemsize / 1e6 / best
    return found


def replayed(record: Record, call: Callable[[], object]) -> dict[str, Any]:
    """A call captured in a CUDA graph: milliseconds of a replay, and what its kernels take, the longest first; or why
    it cannot be captured."""
    stream = torch.cuda.Stream(record.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:  # another package's, whatever it is
        return {"graph_error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    return {"graph_ms": record.milliseconds(graph.replay, 0.1), "kernels": kernels_of(graph.replay)}


def kernels_of(call: Callable[[], object], most: int = 12) -> dict[str, list[float]]:
    """Launches and milliseconds of the kernels that take longest, by name; "all" of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {"all": [0, 0.0]}
    for event in [one for one in seen.events() or () if one.device_type.name == "CUDA"]:
        for name in (event.name[:80], "all"):
            count, time_ = found.setdefault(name, [0, 0.0])
            found[name] = [count + 1, round(time_ + event.time_range.elapsed_us() / 1e3, 4)]
    return dict(sorted(found.items(), key=lambda pair: -pair[1][1])[: most + 1])


def compiled(record: Record) -> None:
    """A layer as it is, compiled, and compiled into CUDA graphs: where starting kernels takes longer than they run."""
    found = []
    for way, shape in product(ways(), TINY if record.tiny else SHAPES[:1]):
        case = Case("x".join(map(str, shape)), *shape, str(record.dtype)[6:], device=str(record.device))
        with record.device:
            _, layer = IMPLEMENTATIONS["pointsman"].build(case)
        layer.to(record.device, record.dtype)
        hidden = record.randn(case.tokens, case.dim).requires_grad_()
        gradient = torch.randn_like(hidden)
        for mode in ("eager", "default", "reduce-overhead"):
            torch._dynamo.reset()
            function = layer if mode == "eager" else torch.compile(layer, mode=mode)

            def step(f: Any = function, x: Tensor = hidden, g: Tensor = gradient) -> None:
                f(x).backward(g)

            with using(Kernels(gpu=way) if record.device.type == "cuda" else None):
                time_ = record.milliseconds(step)
            record[f"{case.name} {way} {mode}"] = {"ms": time_}
            found.append(f"{way} {mode}: {time_:.2f} ms")
    record["summary"] = "; ".join(found)


def steps(record: Record) -> None:
    """Training steps of HyperRouter's small model."""
    from tools.bench.steps import SETTINGS, Steps

    settings = {**SETTINGS, "preset": "tiny"} if record.tiny else SETTINGS
    found = []
    for way, k in product(ways() if record.device.type == "cuda" else ["torch"], (2,) if record.tiny else (2, 9, 16)):
        state = Steps(str(record.device), {**settings, "train_top_k": str(k), "gpu_kernels": way})
        name = f"k{k}" if way == "torch" else f"{way}_k{k}"
        record[name] = figures = {**state.measure(), **state.launches()}
        if record.device.type == "cuda":
            record[f"{name}_kernels"] = kernels_of(state.step, 25)
        found.append(f"{way} k {k}: {1e3 * figures['total']:.1f} ms")
        del state
    record["summary"] = "; ".join(found)


def run(record: Record) -> None:
    """Short schedules of HyperRouter's small model on enwik8: as many steps for each router as 20 minutes of training
    hold at the step's time that the stage `steps` measured, if it did."""
    routers, steps_ = ["smoe", "smoe-dropout", "hyperrouter", "frozen-scaled", "frozen-temperature"], 40000
    if (mean := mean_step(record)) is not None:
        record["mean_step_ms"] = 1e3 * mean
        if mean > 0.015:
            record["summary"] = f"no run: a step takes {1e3 * mean:.1f} ms"
            return
        routers = routers[1:4] if mean > 0.009 else routers
        steps_ = min(steps_, int(1.2 / (len(routers) * mean)) * 1000)
    sizes = ["--preset", "tiny", "--steps", "2", "--routers", "smoe", "--data", "stdlib", "--eval-tokens", "1000"]
    if not record.tiny:
        sizes = ["--preset", "small", "--steps", str(steps_), "--routers", ",".join(routers), "--data", "enwik8",
                 "--eval-tokens", "500000", "--top-k", "1,2,4,8,16"]  # fmt: skip
    out = str(record.file.with_suffix(""))
    command = [sys.executable, "-m", "pointsman_lab", "compare", *sizes, "--device", str(record.device), "--out", out]
    record["command"] = command
    record["code"] = code = subprocess.run(command, cwd=ROOT, check=False).returncode
    record["summary"] = f"see {out}" if code == 0 else f"failed: the comparison ended with {code}: see {out}.log"


def mean_step(record: Record) -> float | None:
    """Seconds a step, the mean over k from 2 to 16; None if the stage `steps` has not measured it here."""
    file = record.file.with_name("steps.json")
    found = json.loads(file.read_text()) if file.exists() else {}
    names = [f"k{k}" for k in (2, 9, 16)]
    if found.get("tiny") or not all("total" in found.get(name, {}) for name in names):
        return None
    return statistics.mean(found[name]["total"] for name in names)


STAGES = {stage.__name__: stage for stage in (facts, tests, micro, layer, compiled, steps, run)}

if __name__ == "__main__":
    stage_, file_, device_, tiny_ = sys.argv[1:]
    STAGES[stage_](Record(Path(file_), device_, bool(int(tiny_))))
