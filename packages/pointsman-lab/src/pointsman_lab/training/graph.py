"""A training step as a CUDA graph, for models so small that launching kernels bounds them.

A graph replays kernels on fixed addresses; no Python runs. In it are the batch, if the corpus lies on the device,
forward, backward, the gradient's norm, clipping and Adam, and the memories that the next step reads. A number on the
device says whether loss or gradient of this or an earlier step are not finite: then weights, Adam's state and memories
stay as they are until the host reads it. Outside are numbers that the host knows (learning rate, the batch's place,
random seed), and what Python does: routers' `step_end` and what they gather for it, the layers' losses, and what a
monitor sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.delivery import deliveries
from pointsman.routers.frame.router import Router
from pointsman_lab.models.capture import CudaRecorder, Recorder, cause, instead, noted
from pointsman_lab.models.memory import Memory
from pointsman_lab.training.config import RunConfig

WARM_UP = 3  # steps with each k before its graph: libraries choose kernels and get workspaces, caches fill
GROUPED_MM = (9, 10)  # major compute capabilities on which `grouped_mm` does not wait for its offsets on the host

Batches = Sequence[tuple[Tensor, Tensor]]
Memories = Sequence[Memory | None]
Observe = Callable[[], AbstractContextManager[None]]


class PassResult(NamedTuple):
    """What forward and backward of all micro-batches leave, besides gradients.

    Attributes:
        figures: [2], the mean loss and the norm of the whole gradient.
        memories: one for each micro-batch.
    """

    figures: Tensor
    memories: list[Memory | None]


Pass = Callable[[Batches, Memories, Observe], PassResult]
"""Forward and backward of the micro-batches, each forward inside an `Observe` of its own."""

Finish = Callable[[Tensor], Tensor]
"""Clips the gradient and changes the weights, given `PassResult.figures`; if those or earlier ones are not finite it
changes nothing. Returns a bool tensor []: whether they are not. Nothing waits for the device."""

Draw = Callable[[], Batches]
"""The step's micro-batches."""


class GraphedStep:
    """A `Pass` that runs as a graph wherever it can.

    Steps whose memory is not yet full (the first of an epoch) run eagerly, and so do the first `WARM_UP` others with
    each k. A schedule of k never goes back, so only the graph of the present k is kept.

    Args:
        model: what `run` trains.
        run: the pass itself.
        finish: what follows it.
        memory_length: of a full memory.
        recorder: what captures and replays.
        resident: whether `draw` computes batches on the device, from a number there: then the graph does so.

    Attributes:
        replayed: whether the last step ran as a graph. Others have to be read at once: what they return is not held
            back when they are not finite.
    """

    def __init__(
        self, model: nn.Module, run: Pass, finish: Finish, memory_length: int, recorder: Recorder, resident: bool
    ) -> None:
        self.model, self.run, self.finish, self.recorder = model, run, finish, recorder
        self.memory_length, self.resident = memory_length, resident
        self.replayed = False
        self._k, self._warm = 0, 0
        self._graph: _Graph | None = None

    def __call__(self, k: int, draw: Draw, memories: Memories, observe: Observe) -> PassResult:
        """The step with this k; gradients must be None before. The next call may write over the memories that it
        returns."""
        full = [memory for memory in memories if memory is not None and memory.length == self.memory_length]
        if k != self._k:
            self._k, self._warm, self._graph = k, 0, None
        self.replayed = len(full) == len(memories) and self._warm >= WARM_UP
        if not self.replayed:
            self._warm += len(full) == len(memories)
            return self.recorder.run(lambda: self._eager(draw(), memories, observe))
        if self._graph is None:
            self._graph = _Graph(self, draw, full)
        return self._graph.replay(draw, full, observe)

    def _eager(self, batches: Batches, memories: Memories, observe: Observe) -> PassResult:
        passed = self.run(batches, memories, observe)
        self.finish(passed.figures)
        return passed


class _Graph:
    """One captured step: its buffers, its result, and what Python did on the way."""

    def __init__(self, step: GraphedStep, draw: Draw, memories: Sequence[Memory]) -> None:
        model = step.model
        self._batches = [] if step.resident else [(inputs.clone(), targets.clone()) for inputs, targets in draw()]
        self._memories = [memory.map(torch.clone) for memory in memories]
        self._parameters = list(model.parameters())
        # the graph reads these where they lie now, also after the model has replaced one (a longer table of positions)
        others = (value for module in model.modules() for value in vars(module).values())
        self._read = [*self._parameters, *model.buffers(), *(other for other in others if isinstance(other, Tensor))]
        self._routed: list[list[Callable[[], None]]] = []  # for each micro-batch, what calls its routers' hooks
        self._gathered: list[Callable[[], None]] = []
        routers = [router for _, router in named_routers(model)]

        @contextmanager
        def note() -> Iterator[None]:
            with noted(routers) as routed:
                self._routed.append(routed)
                yield

        def gather(router: Router) -> Callable[..., None]:
            return lambda statistics: self._gathered.append(lambda: router.gather(statistics))

        try:
            with instead(routers, "gather", gather):
                self._replay, self._passed = step.recorder.capture(lambda: self._whole(step, draw, note))
        except RuntimeError as error:  # not run eagerly instead: generators and pools are left in the midst of it
            told = f"cuda_graph=true: this step cannot be captured: {cause(error)}"
            raise RunError(f"{told}; cuda_graph=false runs without") from error
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._losses = [(one, one.last) for one in deliveries(model).values()]

    def _whole(self, step: GraphedStep, draw: Draw, observe: Observe) -> PassResult:
        """The step, whose memories take the place of those before it."""
        passed = step.run(draw() if step.resident else self._batches, self._memories, observe)
        bad = step.finish(passed.figures)
        after = [memory for memory in passed.memories if memory is not None]
        for own, new in zip(_tensors([], self._memories), _tensors([], after), strict=True):
            own.copy_(torch.where(bad, own, new))
        return PassResult(passed.figures, list(self._memories))

    def replay(self, draw: Draw, memories: Sequence[Memory], observe: Observe) -> PassResult:
        batches = draw() if self._batches else []
        for buffer, tensor in zip(_tensors(self._batches, self._memories), _tensors(batches, memories), strict=True):
            if buffer is not tensor:
                buffer.copy_(tensor)
        self._replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for delivery, losses in self._losses:
            delivery.last = losses
        for gather in self._gathered:
            gather()
        for routed in self._routed:
            with observe():
                for announce in routed:
                    announce()
        return self._passed


def _tensors(batches: Batches, memories: Sequence[Memory]) -> list[Tensor]:
    held = [tensor for pair in batches for tensor in pair]
    return held + [tensor for memory in memories for tensor in memory.to_tensors().values()]


def cuda_recorder(
    config: RunConfig, device: torch.device, routers: Iterable[Router] = (), *, fixed_shapes: bool
) -> CudaRecorder:
    """A recorder for a run of these settings with these routers; `fixed_shapes`: all its batches have the same.

    Raises:
        RunError: what no graph can capture, in one line.
    """
    model = config.model
    changing = ", ".join(sorted({router.spec for router in routers if router.changes_with_step}))
    for cannot, why in (
        (changing, f"the router {changing} does another thing from some step on"),
        (not fixed_shapes, "batches differ in length"),
        (model.attention_dropout, "model.attention_dropout draws its masks from a number on the host"),
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
    if capability[0] not in GROUPED_MM and config.gpu_kernels != "triton":
        told = ".".join(map(str, capability))
        raise RunError(
            f"cuda_graph=true: {device} has compute capability {told}; the experts need 9 or 10, or gpu_kernels=triton"
        )
    return CudaRecorder(device)
