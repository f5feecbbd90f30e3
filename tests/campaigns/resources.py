"""Resources: memory, objects and descriptors stay the same over thousands of steps, routers and runs.

A program does one kind of work again and again. After half of it, to warm up, memory is measured, and again at the
end, each time after garbage was collected and free pages were handed back.
"""

import contextlib
import ctypes
import gc
import os
import resource
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fixtures
import torch
from frame import Campaign, Program, Wrong
from sequences import MIXERS, ROUTERS

import pointsman
from pointsman import MoE
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman_lab.runs.checkpoints import prune, write_folder

GROWTH = 3 << 20  # bytes that may be added: the allocator's own
OBJECTS = 300


class Resources(Campaign):
    name, unit, usual, limit = "resources", "steps", 4_000, 600.0

    def prepare(self, folder: Path) -> None:
        self.fixtures = folder
        with fixtures.inside(folder):
            fixtures.make_files(folder)
            fixtures.must("train", "--config", "small.toml", "--data", "text.txt", "--out", "run")

    def draw(self, random: Random) -> Program:
        work = random.choices(list(WORK), [WORK[name][1] for name in WORK])[0]
        return [{"work": work, "router": random.choice(ROUTERS) + random.choice(MIXERS), "steps": WORK[work][2]}]

    def check(self, program: Program, folder: Path) -> Counter[str]:
        shutil.copytree(self.fixtures, folder, dirs_exist_ok=True)
        counts = Counter[str]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in program:
                self._measure(step, folder)
                counts[self.unit] += step["steps"]
                counts[step["work"]] += step["steps"]
        return counts

    def _measure(self, step: dict[str, Any], folder: Path) -> None:
        torch.manual_seed(0)
        work = WORK[step["work"]][0](step["router"], folder)
        warm = step["steps"] // 2
        for _ in range(warm):
            next(work)
        before = measured()
        for _ in range(step["steps"] - warm):
            next(work)
        after = measured()
        told = ", ".join(f"{name} {before[name]:,} -> {after[name]:,}" for name in before)
        allowed = {"bytes": GROWTH, "objects": OBJECTS, "descriptors": 0, "threads": 0}
        for name, slack in allowed.items():
            if after[name] > before[name] + slack:
                raise Wrong(f"{step}: {name} grew: {told}")

    def simpler(self, step: Any) -> Iterator[Any]:
        if step["router"] != "smoe":
            yield {**step, "router": "smoe"}


def measured() -> dict[str, int]:
    """Resident memory, objects that the garbage collector knows, open descriptors, threads."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * resource.getpagesize(),
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def layer(router: str, **options: Any) -> MoE:
    return MoE(16, 16, 8, top_k=2, router=router, **options)


def training(router: str, folder: Path) -> Iterator[None]:
    """Steps of one layer, with other k and lengths."""
    one = layer(router)
    optimizer = torch.optim.Adam(one.parameters(), lr=1e-3)
    pointsman.track_steps(one, optimizer)
    for number in range(10**9):
        pointsman.set_top_k(one, 1 + number % 8)
        loss = one(torch.randn(2, 1 + number % 24, 16)).square().mean()
        pointsman.add_losses(loss, one).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def forgotten_losses(router: str, folder: Path) -> Iterator[None]:
    """Nobody ever calls `add_losses`."""
    one = layer("smoe:balance=0.1:z_loss=0.1")
    while True:
        one(torch.randn(2, 9, 16)).sum().backward()
        one.zero_grad()
        yield


def evaluation(router: str, folder: Path) -> Iterator[None]:
    one = layer(router).eval()
    for number in range(10**9):
        pointsman.set_top_k(one, 1 + number % 8)
        with torch.no_grad(), pointsman.record_routing(one):
            one(torch.randn(1 + number % 3, 1 + number % 40, 16))
        yield


def building(router: str, folder: Path) -> Iterator[None]:
    """Routers made, used once and dropped."""
    names = [*pointsman.list_routers(), router]
    for number in range(10**9):
        with contextlib.suppress(ValueError):  # one that needs token ids
            layer(names[number % len(names)])(torch.randn(1, 8, 16)).sum().backward()
        yield


def monitoring(router: str, folder: Path) -> Iterator[None]:
    """What the trainer keeps of the routing on the way."""
    one = torch.nn.Sequential(layer(router))
    monitor = RoutingMonitor(one, 2, 0)
    for number in range(1, 10**9):
        with monitor.observe(number):
            one(torch.randn(2, 8, 16))
        monitor.rows()
        yield


def checkpoints(router: str, folder: Path) -> Iterator[None]:
    for step in range(1, 10**9):
        write_folder(folder / "checkpoints", step, {"model.safetensors": bytes(1000)}, {"config": {}})
        prune(folder / "checkpoints", step, keep=2)
        yield


def runs(router: str, folder: Path) -> Iterator[None]:
    """Whole runs in one process, as the rows of a comparison are."""
    for number in range(10**9):
        words = ["train", "--config", "small.toml", "--data", "text.txt", "--router", router, "--out", "again"]
        fixtures.must(*words, "--set", f"eval_tokens={64 + number % 2}")
        shutil.rmtree("again")
        yield


def trainer(router: str, folder: Path) -> Iterator[None]:
    """Steps of our own loop, observed as a run is."""
    from pointsman_lab.training.run import load_run
    from pointsman_lab.training.state import TrainingState
    from pointsman_lab.training.task import pretraining_task

    config = load_run(folder / "run").config.with_overrides({"model.router": router, "steps": 100_000})
    state = TrainingState(config, pretraining_task(config), torch.device("cpu"))
    monitor = RoutingMonitor(state.model, 2, 0)
    while True:
        state.train_step(monitor)
        monitor.rows()
        yield


def refusals(router: str, folder: Path) -> Iterator[None]:
    lines = [["train", "--steps", "x"], ["evaluate", "nowhere"], ["export", "run", "--out", "run"], ["routers", "smo"]]
    for number in range(10**9):
        fixtures.called(lines[number % len(lines)])
        yield


WORK: dict[str, tuple[Callable[[str, Path], Iterator[None]], float, int]] = {
    "training": (training, 4, 2000), "trainer": (trainer, 2, 2000), "forgotten losses": (forgotten_losses, 1, 600),
    "evaluation": (evaluation, 3, 800), "building": (building, 2, 1200), "monitoring": (monitoring, 1, 400),
    "checkpoints": (checkpoints, 1, 200), "runs": (runs, 1, 24), "refusals": (refusals, 1, 200),
}  # fmt: skip
"""Name -> the work, how often it is drawn, and its steps."""
