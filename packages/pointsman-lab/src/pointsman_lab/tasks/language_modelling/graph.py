"""An evaluation's forward as a CUDA graph, one for each k: on a GPU, segments are short and launches take the time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman_lab.models.capture import Recorder, cause, noted
from pointsman_lab.models.memory import Memory

WARM_UP = 2  # segments with a full memory before the capture

Run = Callable[[Tensor, Tensor, Memory | None], tuple[Tensor, Memory | None]]
"""(inputs, targets, memory) -> the loss of each target, and the next memory. Nothing in it waits for the device."""

Watch = Callable[[], AbstractContextManager[Any]]


class GraphedForward:
    """A `Run` that is a graph wherever it can: segments of full length behind a full memory.

    What it returns is the graph's own and written over by the next call.

    Args:
        model: what `run` evaluates.
        watch: observes the model's routers; entered around each forward.
        length, memory_length: of whole segments and of a full memory.
    """

    def __init__(
        self, model: torch.nn.Module, run: Run, watch: Watch, length: int, memory_length: int, recorder: Recorder
    ) -> None:
        self.run, self.watch, self.recorder = run, watch, recorder
        self.length, self.memory_length = length, memory_length
        self.routers = [router for _, router in named_routers(model)]
        self._warm = 0
        self._routed: list[Callable[[], None]] = []
        self._replay: Callable[[], None] | None = None

    def __call__(self, inputs: Tensor, targets: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        full = memory is not None and memory.length == self.memory_length and inputs.shape[1] == self.length
        if not full or self._warm < WARM_UP:
            self._warm += full
            with self.watch():
                return self.recorder.run(lambda: self.run(inputs, targets, memory))
        assert memory is not None
        if self._replay is None:
            self._capture(inputs, targets, memory)
        assert self._replay is not None
        given = [inputs, targets, *memory.to_tensors().values()]
        for own, new in zip(self._given, given, strict=True):
            if own is not new:
                own.copy_(new)
        self._replay()
        with self.watch() if self._routed else nullcontext():
            for announce in self._routed:
                announce()
        return self._losses, self._memory

    def _capture(self, inputs: Tensor, targets: Tensor, memory: Memory) -> None:
        inputs, targets, self._memory = inputs.clone(), targets.clone(), memory.map(torch.clone)
        self._given = [inputs, targets, *self._memory.to_tensors().values()]

        def whole() -> Tensor:
            losses, after = self.run(inputs, targets, self._memory)
            assert after is not None
            for own, new in zip(self._given[2:], after.to_tensors().values(), strict=True):
                own.copy_(new)
            return losses

        try:
            with noted(self.routers) as self._routed:
                self._replay, self._losses = self.recorder.capture(whole)
        except RuntimeError as error:  # not run eagerly instead: generators and pools are left in the midst of it
            told = f"cuda_graph=true: this evaluation cannot be captured: {cause(error)}"
            raise RunError(f"{told}; cuda_graph=false runs without") from error
