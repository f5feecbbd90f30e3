"""The worker process of one implementation: the requests it answers."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.experts.cpu.function import forget
from pointsman.routers.frame.registry import build_router
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing, RoutingContext
from tools.bench.cases import Case
from tools.bench.implementations import IMPLEMENTATIONS, LIMITS

VOCABULARY = 256
AWAKE = 0.02  # seconds of work before a measurement
WARM, MOST_WARM, BLOCK = 1_000_000_000, 64, 4  # of warm-up: the first seed, the largest number of calls, calls a block
SHORT, MOST = 0.02, 9  # short calls are repeated for this many seconds, at most this often
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Worker:
    """A layer and its measurements."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        torch.manual_seed(0)
        dtype = getattr(torch, case.dtype)
        self.layer: Callable[[Tensor], Tensor]
        self.module: nn.Module
        with torch.device(case.device):
            self.layer, self.module = IMPLEMENTATIONS[name].build(case)
        self.module.to(case.device, dtype)
        self.module.train(case.train)
        self.routers: dict[str, Router] = {}

    def hidden(self, seed: int, tokens: int | None = None) -> Tensor:
        generator = torch.Generator(self.case.device).manual_seed(seed)
        shape = tokens or self.case.tokens, self.case.dim
        return torch.randn(shape, generator=generator, device=self.case.device).to(getattr(torch, self.case.dtype))

    def measure(self, seed: int) -> dict[str, float]:
        """Seconds of a call on new tokens, forward and forward + backward: the median over several short calls."""
        self._awake(seed)
        start, calls = time.perf_counter(), [self.once(seed)]
        while len(calls) < MOST and time.perf_counter() - start < SHORT:
            calls.append(self.once(seed + 1_000_000 * len(calls)))
        if self.case.device != "cpu":
            self.module.zero_grad()  # frees the gradients' memory for the other processes
        return {name: statistics.median(call[name] for call in calls) for name in calls[0]}

    def warm(self, seconds: float) -> dict[str, float]:
        """Calls on new tokens until they get no faster, for at most `seconds`; returns the times of the last calls.

        In bf16 libraries build a kernel for each new row count of an expert, of which there may be hundreds. Only the
        first calls of a long-running program pay for that.
        """
        start, calls, before = time.perf_counter(), [], float("inf")
        for seed in range(WARM, WARM + MOST_WARM):
            calls.append(self.once(seed))
            if time.perf_counter() - start > seconds:
                break
            if not len(calls) % BLOCK:
                last = statistics.median(call["total"] for call in calls[-BLOCK:])
                if last > 0.95 * before:
                    break
                before = last
        return {name: statistics.median(call[name] for call in calls[-BLOCK:]) for name in calls[0]}

    def once(self, seed: int) -> dict[str, float]:
        """Seconds of one call on new tokens."""
        hidden = self.hidden(seed)
        if self.name in LIMITS or not self.case.train:
            with torch.no_grad():
                start = self._now()
                self.layer(hidden)
                seconds = self._now() - start
            return {"forward": seconds, "total": 3 * seconds if self.case.train else seconds}
        gradient = self.hidden(seed + 1)
        hidden.requires_grad_()
        self.module.zero_grad()
        start = self._now()
        output = self.layer(hidden)
        forward = self._now()
        output.backward(gradient)  # type: ignore[no-untyped-call]
        end = self._now()
        return {"forward": forward - start, "total": end - start}

    def router(self, request: tuple[str, int]) -> dict[str, float]:
        """Seconds of the router `request[0]` alone, forward and backward, losses included; `request[1]` is the seed.

        Tokens are in sequences of 512, or in one shorter one, with token ids and a state of the layer below where the
        router reads them.
        """
        spec, seed = request
        self._awake(seed)
        if spec not in self.routers:
            router = build_router(
                spec, dim=self.case.dim, num_experts=self.case.num_experts, top_k=self.case.k, vocab_size=VOCABULARY
            )
            self.routers[spec] = router.to(self.case.device, getattr(torch, self.case.dtype))
        router = self.routers[spec]
        if not router.fixed_k:
            router.top_k = self.case.k
        length = 512 if self.case.tokens % 512 == 0 else self.case.tokens
        hidden = self.hidden(seed).view(-1, length, self.case.dim).requires_grad_()
        context = RoutingContext(
            token_ids=(hidden.detach()[..., 0].float().abs() * 1000).long() % VOCABULARY,
            below={name: hidden.detach()[..., :1].expand(*hidden.shape[:2], width).contiguous()
                   for name, width in router.score.below.items()},
        )  # fmt: skip
        router.zero_grad()
        start = self._now()
        routing: Routing = router(hidden, context)
        results = [routing.weights, *routing.combine.weights().values(), *routing.losses.values()]
        results = [result for result in results if result.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        return {"router": self._now() - start}

    def memory(self, seed: int) -> dict[str, float]:
        """Peak bytes of one call without the weights (Linux and CUDA).

        On a CPU an earlier call on the same tokens has built the kernels for their row counts. All other memory that
        layers and the allocator keep between calls is freed before.
        """
        if self.case.device != "cpu":
            torch.cuda.reset_peak_memory_stats(self.case.device)
            before = torch.cuda.memory_allocated(self.case.device)
            self.once(seed)
            return {"memory": torch.cuda.max_memory_allocated(self.case.device) - before}
        if not _CLEAR.exists():
            return {}
        self.once(seed)
        self.module.zero_grad()
        forget()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        _CLEAR.write_text("5")  # resets the peak
        before = _status("VmRSS")
        self.once(seed)
        return {"memory": _status("VmHWM") - before}

    def _awake(self, seed: int) -> None:
        """Wakes the processor; a GPU by a call on other tokens, which also reallocates its memory."""
        awake()
        if self.case.device != "cpu":
            self.once(seed + 2)

    def _now(self) -> float:
        if self.case.device != "cpu":
            torch.cuda.synchronize(self.case.device)
        return time.perf_counter()


def awake() -> None:
    """Keeps every thread busy for a moment, because a sleeping core may take up to 10 ms to wake."""
    square, end = torch.ones(512, 512), time.perf_counter() + AWAKE
    while time.perf_counter() < end:
        torch.mm(square, square)


def _status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def serve(pipe: Connection) -> None:
    """Answers each request (name, value) with a dictionary, until the other end closes.

    ("build", [name, case]) creates a `Worker`, ("train", [way, device, settings]) a `steps.Steps`; every other
    request calls that method of it with `value`.
    """
    worker: Any = None
    while True:
        try:
            request, value = pipe.recv()
        except EOFError:
            return
        try:
            if request == "build":
                worker = Worker(*value)
                answer: dict[str, Any] = {}
            elif request == "train":
                from tools.bench.steps import Steps  # not needed for a layer

                worker, answer = Steps(*value), {}
            else:
                answer = getattr(worker, request)(value)
        except Exception as error:
            answer, worker = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}, None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # frees memory for the other processes
        pipe.send(answer)
