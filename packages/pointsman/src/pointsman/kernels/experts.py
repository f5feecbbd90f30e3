"""Which kernels the experts use on a GPU: our Triton kernels, torch's grouped_mm, or ours around it.

The order is a timing's (`measured`), made once for a device and recorded with a run's other choices
(`ops.kernels.Kernels.gpu`). Without the package `triton` there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pointsman.kernels import grouped_mm, other_kernels
from pointsman.kernels.choice import TORCH, TRITON, fastest_that_runs, with_triton, without_triton
from pointsman.kernels.choice import capability as _capability
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import active_gpu, as_constant

GROUPED_MM_ON = (9, 10)  # major compute capabilities on which grouped_mm does not loop over the experts
SHAPE = 8192, 1024, 2048, 16, 2  # of the timing: tokens, dim, hidden_dim, experts, k
FEW = 4, 1024, 2048, 64, 8  # of the timing for decoding
MOST_FEW = 64  # assignments that the kernels for decoding take


def apply(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
) -> Tensor:
    """The experts' combined output on the kernels that are active; arguments are those of `grouped_mm.apply`.

    Raises:
        ValueError: another package's kernels are asked for by name, and cannot be used here.
    """
    if (named := active_gpu()) in other_kernels.MODULES:
        major = _capability(hidden.device)[0] if hidden.is_cuda else 0
        why = "experts choose tokens here" if token is not None else None
        why = why or other_kernels.unsuited(named, hidden, parameters, activation, dropout, major)
        if why:
            raise ValueError(f"kernels: gpu={named!r}: {why}")
        return other_kernels.apply(named, hidden, weight, expert, parameters)
    if token is None and not dropout and _few(hidden, weight, expert, parameters):
        from pointsman.kernels.triton import decode

        return decode.apply(hidden, weight, expert, parameters, activation)
    if token is None and (way := _way(hidden, parameters)) != "grouped_mm":
        from pointsman.kernels.triton import function

        return function.apply(hidden, weight, expert, parameters, activation, dropout, way)
    return grouped_mm.apply(hidden, weight, token, expert, parameters, activation, dropout)


def _few(hidden: Tensor, weight: Tensor, expert: Tensor, parameters: ExpertParameters) -> bool:
    """Whether the kernels for decoding take these assignments."""
    if not takes_few(hidden, expert.numel()):
        return False
    given = (hidden, weight, *parameters)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return False
    weights = (parameters.w_in, parameters.w_out, parameters.w_gate)  # read where they lie: each expert's contiguous
    return all(one is None or one.stride()[1:] == (one.shape[2], 1) for one in weights)


def takes_few(hidden: Tensor, assignments: int) -> bool:
    """Whether so few assignments without gradients have kernels of their own on the device of `hidden`."""
    return assignments <= MOST_FEW and with_triton("gpu_decode", hidden, measured_few)


def _way(hidden: Tensor, parameters: ExpertParameters) -> str:
    chosen = active_gpu()
    if chosen == "grouped_mm" or not hidden.is_cuda:
        return "grouped_mm"
    if chosen == "auto":
        chosen = str(as_constant(measured, hidden.device))
    _, hidden_dim, dim = parameters.w_in.shape
    if chosen == "mixed" and (hidden_dim % 8 or dim % 8 or hidden.dtype != torch.bfloat16):
        chosen = "triton"  # grouped_mm wants rows of whole 16 bytes, and waits for the host in other dtypes
    return "grouped_mm" if chosen != "grouped_mm" and without_triton(_capability(hidden.device)) else chosen


@cache
def measured(device: torch.device) -> str:
    """The fastest of "fused", "triton", "mixed" and "grouped_mm" on a CUDA device, forward and backward in bfloat16.

    What cannot run is named in a warning and left out.
    """
    capability = _capability(device)
    if without_triton(capability):
        return "grouped_mm"
    ways: dict[str, Callable[[], object]] = {}
    for name in ("fused", "triton", "mixed", "grouped_mm"):
        if name != "mixed" or capability[0] in GROUPED_MM_ON:
            ways[name] = candidate(name, device)
    return fastest_that_runs("GPU kernels", ways, "grouped_mm")


@cache
def measured_few(device: torch.device) -> str:
    """The faster for a few assignments in bfloat16: "triton", kernels of their own, or "torch", those of many."""
    if without_triton(_capability(device)):
        return TORCH
    ways = {name: candidate_few(name, device) for name in (TRITON, TORCH)}
    return fastest_that_runs("kernels for decoding", ways, TORCH)


Drawn = tuple[Tensor, Tensor, Tensor, ExpertParameters]


def _draw(device: torch.device, shape: tuple[int, int, int, int, int]) -> Drawn:
    """Hidden states, weights, experts and parameters of a layer of this shape, in bfloat16."""
    tokens, dim, hidden_dim, num_experts, k = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)
        return drawn.mul_(size[-1] ** -0.5).requires_grad_()

    parameters = ExpertParameters(draw(num_experts, hidden_dim, dim), draw(num_experts, dim, hidden_dim))
    scores = torch.rand(tokens, num_experts, device=device, generator=generator)
    values, expert = scores.topk(k, -1)
    return draw(tokens, dim), values.requires_grad_(), expert, parameters


def candidate(name: str, device: torch.device, shape: tuple[int, int, int, int, int] = SHAPE) -> Callable[[], object]:
    """Forward and backward of a layer of this shape on the kernels of this name, until the device has finished."""
    from pointsman.kernels.triton import function

    hidden, weight, expert, parameters = _draw(device, shape)
    gradient, leaves = hidden.detach().flip(0), [hidden, weight, parameters.w_in, parameters.w_out]

    def run() -> object:
        with torch.enable_grad():
            if name == "grouped_mm":
                output = grouped_mm.apply(hidden, weight, None, expert, parameters, "relu", 0.0)
            else:
                output = function.apply(hidden, weight, expert, parameters, "relu", 0.0, name)
            found = torch.autograd.grad(output, leaves, gradient)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    return run


def candidate_few(name: str, device: torch.device, shape: tuple[int, int, int, int, int] = FEW) -> Callable[[], object]:
    """Forward without gradients of a few tokens, on kernels of their own ("triton") or on those of many."""
    from pointsman.kernels.triton import decode, function

    hidden, weight, expert, parameters = _draw(device, shape)
    way = _way(hidden, parameters)

    def run() -> object:
        with torch.no_grad():
            if name == TRITON:
                output = decode.apply(hidden, weight, expert, parameters, "relu")
            elif way == "grouped_mm":
                output = grouped_mm.apply(hidden, weight, None, expert, parameters, "relu", 0.0)
            else:
                output = function.apply(hidden, weight, expert, parameters, "relu", 0.0, way)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return output

    return run
