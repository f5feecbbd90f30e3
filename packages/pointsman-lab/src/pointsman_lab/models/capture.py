"""Capturing a model's work as a CUDA graph, and calling again the hooks of routers that a replay does not call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pointsman.routers.frame.router import Router
from pointsman.routing import Routing, RoutingContext

Made = TypeVar("Made")


class Recorder(Protocol):
    """What captures and replays."""

    def run(self, function: Callable[[], Made]) -> Made:
        """Runs a function as it is, where captures happen."""

    def capture(self, function: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        """A function that computes it anew, in place, and the result; undefined until that was called."""


class CudaRecorder:
    """Captures on a stream of its own, as CUDA graphs must."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, function: Callable[[], Made]) -> Made:
        outer = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            made = function()
        outer.wait_stream(self.stream)
        return made

    def capture(self, function: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        gc.collect()  # what a dead cycle held would otherwise be freed in the midst of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            made = function()
        return graph.replay, made


def cause(error: BaseException) -> str:
    """The first line of the error that the others followed."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).partition("\n")[0]


@contextmanager
def noted(routers: Sequence[Router]) -> Iterator[list[Callable[[], None]]]:
    """Inside, notes each forward of these routers: a function that calls its hooks as if it had just routed."""
    routed: list[Callable[[], None]] = []
    handles = [router.register_forward_hook(_noting(routed)) for router in routers]
    try:
        yield routed
    finally:
        for handle in handles:
            handle.remove()


def _noting(routed: list[Callable[[], None]]) -> Callable[..., None]:
    def hook(router: Router, given: tuple[Any, ...], routing: Routing) -> None:
        hidden, context = (*given, None)[:2]
        if context is not None:
            context = replace(context, attention=None, past=None)  # they would keep the step's autograd history
        routed.append(partial(_announce, router, hidden.detach(), context, routing.detach()))

    return hook


def _announce(router: Router, hidden: Tensor, context: RoutingContext | None, routing: Routing) -> None:
    """Calls the router's forward hooks as if it had just routed."""
    with instead([router], "forward", lambda _: lambda *given: replace(routing)):
        router(hidden, context)


@contextmanager
def instead(routers: Sequence[Router], name: str, function: Callable[[Router], Callable[..., Any]]) -> Iterator[None]:
    """Inside, each router has `function(router)` as the method of this name."""
    for router in routers:
        vars(router)[name] = function(router)
    try:
        yield
    finally:
        for router in routers:
            del vars(router)[name]
