"""Forward and backward of a training step as a CUDA graph, for models so small that launching kernels bounds them.

A graph replays kernels on fixed addresses; no Python runs. So inputs and memories are copied into buffers of the
graph's own first, what it computed is handed on afterwards, and so is what Python did on the way: gradients, the
layers' losses, what routers gather for `step_end`, and what a monitor sees. The check for numbers that are not finite,
clipping, Adam and `step_end` stay outside: the check has to come before a weight changes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.lab.models.transformer_xl import Memory
from pointsman.lab.training.config import RunConfig
from pointsman.layer import MoE
from pointsman.routers.router import Router
from pointsman.routing import Routing, RoutingContext

WARM_UP = 3  # steps with each k before its graph: libraries choose kernels and get workspaces, caches fill
GROUPED_MM = (9, 10)  # major compute capabilities on which `grouped_mm` does not wait for its offsets on the host

Batches = Sequence[tuple[Tensor, Tensor]]
Memories = Sequence[Memory | None]
Observe = Callable[[], AbstractContextManager[None]]


class Passed(NamedTuple):
    """What forward and backward of all micro-batches leave, besides gradients.

    Attributes:
        figures: [2], the mean loss and the norm of the whole gradient.
        memories: one for each micro-batch.
    """

    figures: Tensor
    memories: list[Memory | None]


Pass = Callable[[Batches, Memories, Observe], Passed]
"""Forward and backward of the micro-batches, each forward inside an `Observe` of its own."""


class Recorder(Protocol):
    """What captures and replays."""

    def run(self, function: Callable[[], Passed]) -> Passed:
        """Runs a function as it is, where captures happen."""

    def capture(self, function: Callable[[], Passed]) -> tuple[Callable[[], None], Passed]:
        """A function that computes it anew, in place, and the result; undefined until that was called."""


class CudaRecorder:
    """Captures on a stream of its own, as CUDA graphs must."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, function: Callable[[], Passed]) -> Passed:
        outer = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            passed = function()
        outer.wait_stream(self.stream)
        return passed

    def capture(self, function: Callable[[], Passed]) -> tuple[Callable[[], None], Passed]:
        gc.collect()  # what a dead cycle held would otherwise be freed in the midst of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            passed = function()
        return graph.replay, passed


class GraphedStep:
    """A `Pass` that runs as a graph wherever it can.

    Steps whose memory is not yet full (the first of an epoch) run eagerly, and so do the first `WARM_UP` others with
    each k. A schedule of k never goes back, so only the graph of the present k is kept.

    Args:
        model: what `run` trains.
        run: the pass itself.
        memory_length: of a full memory.
        recorder: what captures and replays.
    """

    def __init__(self, model: nn.Module, run: Pass, memory_length: int, recorder: Recorder) -> None:
        self.model, self.run, self.memory_length, self.recorder = model, run, memory_length, recorder
        self._k, self._warm = 0, 0
        self._graph: _Graph | None = None

    def __call__(self, k: int, batches: Batches, memories: Memories, observe: Observe) -> Passed:
        """The step with this k; gradients must be None before. Memories that it returns stay as they are."""
        full = [memory for memory in memories if memory is not None and memory.length == self.memory_length]
        if k != self._k:
            self._k, self._warm, self._graph = k, 0, None
        if len(full) < len(memories) or self._warm < WARM_UP:
            self._warm += len(full) == len(memories)
            return self.recorder.run(lambda: self.run(batches, memories, observe))
        if self._graph is None:
            self._graph = _Graph(self.model, self.run, self.recorder, batches, full)
        return self._graph.replay(batches, full, observe)


class _Graph:
    """One captured step: its buffers, its result, and what Python did on the way."""

    def __init__(
        self, model: nn.Module, run: Pass, recorder: Recorder, batches: Batches, memories: Sequence[Memory]
    ) -> None:
        own_batches = [(inputs.clone(), targets.clone()) for inputs, targets in batches]
        own_memories = [memory.map(torch.clone) for memory in memories]
        self._buffers = _tensors(own_batches, own_memories)
        self._parameters = list(model.parameters())
        # the graph reads these where they lie now, also after the model has replaced one (a longer table of positions)
        others = (value for module in model.modules() for value in vars(module).values())
        self._read = [*self._parameters, *model.buffers(), *(other for other in others if isinstance(other, Tensor))]
        self._routed: list[list[Callable[[], None]]] = []  # for each micro-batch, what calls its routers' hooks
        self._gathered: list[Callable[[], None]] = []
        routers = [router for _, router in named_routers(model)]

        @contextmanager
        def note() -> Iterator[None]:
            routed: list[Callable[[], None]] = []
            self._routed.append(routed)
            handles = [router.register_forward_hook(_noting(routed)) for router in routers]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

        def gather(router: Router) -> Callable[..., None]:
            return lambda statistics: self._gathered.append(lambda: router.gather(statistics))

        try:
            with _instead(routers, "gather", gather):
                self._replay, self._passed = recorder.capture(lambda: run(own_batches, own_memories, note))
        except RuntimeError as error:  # not run eagerly instead: generators and pools are left in the midst of it
            told = f"cuda_graph=true: this step cannot be captured: {_cause(error)}"
            raise RunError(f"{told}; cuda_graph=false runs without") from error
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._losses = [(module, module.last_losses) for module in model.modules() if isinstance(module, MoE)]

    def replay(self, batches: Batches, memories: Sequence[Memory], observe: Observe) -> Passed:
        for buffer, tensor in zip(self._buffers, _tensors(batches, memories), strict=True):
            buffer.copy_(tensor)
        self._replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for layer, losses in self._losses:
            layer.last_losses = losses
        for gather in self._gathered:
            gather()
        for routed in self._routed:
            with observe():
                for announce in routed:
                    announce()
        # copies: the next replay writes over the graph's own
        memories_now = [None if memory is None else memory.map(torch.clone) for memory in self._passed.memories]
        return Passed(self._passed.figures, memories_now)


def _cause(error: BaseException) -> str:
    """The first line of the error that the others followed."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).partition("\n")[0]


def _tensors(batches: Batches, memories: Sequence[Memory]) -> list[Tensor]:
    held = [tensor for pair in batches for tensor in pair]
    return held + [tensor for memory in memories for tensor in memory.to_tensors().values()]


def _noting(routed: list[Callable[[], None]]) -> Callable[..., None]:
    def hook(router: Router, given: tuple[Any, ...], routing: Routing) -> None:
        hidden, context = (*given, None)[:2]
        if context is not None:
            context = replace(context, attention=None, past=None)  # they would keep the step's autograd history
        routed.append(partial(_announce, router, hidden.detach(), context, routing.detach()))

    return hook


def _announce(router: Router, hidden: Tensor, context: RoutingContext | None, routing: Routing) -> None:
    """Calls the router's forward hooks as if it had just routed."""
    with _instead([router], "forward", lambda _: lambda *given: replace(routing)):
        router(hidden, context)


@contextmanager
def _instead(routers: Sequence[Router], name: str, function: Callable[[Router], Callable[..., Any]]) -> Iterator[None]:
    """Inside, each router has `function(router)` as the method of this name."""
    for router in routers:
        vars(router)[name] = function(router)
    try:
        yield
    finally:
        for router in routers:
            del vars(router)[name]


def cuda_recorder(config: RunConfig, device: torch.device, *, fixed_shapes: bool) -> CudaRecorder:
    """A recorder for a run of these settings; `fixed_shapes`: all its batches have the same.

    Raises:
        RunError: what no graph can capture, in one line.
    """
    model = config.model
    for cannot, why in (
        (not fixed_shapes, "batches differ in length"),
        (model.attention_dropout, "model.attention_dropout draws its masks from a number on the host"),
        (getattr(model, "adaptive_cutoffs", ()), "model.adaptive_cutoffs has shapes that depend on the tokens"),
        (model.experts == "base", "model.experts=base has shapes that depend on the routing"),
        ("balance_scope=step" in model.router, "balance_scope=step counts on from micro-batch to micro-batch"),
        (model.checkpoint_activations, "model.checkpoint_activations asks for the state of the random numbers"),
        (config.deterministic, "deterministic=true takes the plain experts, one after the other"),
        (config.precision == "float32", "with precision=float32 the experts wait for the device"),
        (device.type != "cuda", f"only a CUDA device has graphs, and the run is to be on {device}"),
    ):
        if cannot:
            raise RunError(f"cuda_graph=true: {why}")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in GROUPED_MM:
        told = ".".join(map(str, capability))
        raise RunError(f"cuda_graph=true: the experts need compute capability 9 or 10, and {device} has {told}")
    return CudaRecorder(device)
