"""Triton's kernels outside the experts on a GPU: against float64 on a CPU, and the same bits twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops.kernels import Kernels, using
from pointsman.ops.visible import Prepared
from pointsman.routers.mutual.streaming import inform
from tests.library.kernels.relative import draw, padding, reference, through_the_kernels
from tests.library.kernels.tools import needs_triton
from tests.library.routers.mutual.test_streaming import explicit, tensors, visibilities

pytestmark = [
    needs_triton,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTH, PAST = 211, 113


def alike(calls: Callable[[], tuple[list[Tensor], list[Tensor]]], tolerance: float) -> None:
    """What the kernels give is what float64 gives, and the same bits twice."""
    (found, exact), (again, _) = calls(), calls()
    for mine, theirs, twice in zip(found, exact, again, strict=True):
        assert torch.equal(mine, twice)
        mine, theirs = mine.cpu().double(), theirs.cpu().double()
        error, size = (mine - theirs).norm(), theirs.norm() + theirs.numel() ** 0.5
        assert error <= tolerance * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [20, 64, 128])
def test_attention_on_a_device(dtype: torch.dtype, width: int) -> None:
    plain = draw(length=LENGTH, memory=PAST, width=width, dtype=dtype)
    mask = padding(2, LENGTH + PAST, "left")

    def run() -> tuple[list[Tensor], list[Tensor]]:
        inputs = [tensor.detach().cuda().requires_grad_() for tensor in plain]
        output = through_the_kernels(inputs, 0.1, mask.cuda())
        exact = [tensor.detach().double().requires_grad_() for tensor in plain]
        right = reference(*exact, 0.1, mask)
        theirs = torch.autograd.grad(right, exact, torch.ones_like(right))
        return [output, *torch.autograd.grad(output, inputs, torch.ones_like(output))], [right, *theirs]

    alike(run, 1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("kind", visibilities(1, 2, 3))
def test_mixing_on_a_device(kind: str) -> None:
    visible = visibilities(3, LENGTH, LENGTH + PAST)[kind]
    plain = tensors(3, LENGTH, LENGTH + PAST, torch.float32)
    count = 6 if visible.causal else 4
    real, entropy = (None if one is None else one.cuda() for one in (visible.real, visible.entropy))

    def run() -> tuple[list[Tensor], list[Tensor]]:
        inputs = [tensor.detach().cuda().requires_grad_() for tensor in plain[:count]]
        if count == 6:  # rows of positions are aligned on a GPU
            inputs[5] = F.pad(inputs[5].detach(), (0, 0, 0, 7)).requires_grad_()
        there = visible._replace(real=real, entropy=entropy)
        found = inform(Prepared, tuple(inputs[:5]), tuple(inputs[5:]), there, normalization=True)
        exact = [tensor.detach().double().requires_grad_() for tensor in plain[:count]]
        right = explicit(Prepared(*exact), visible)
        mine = list(torch.autograd.grad(found[0].sum() + found[1].sum(), inputs))
        theirs = list(torch.autograd.grad(right[0].sum() + right[1].sum(), exact))
        if count == 6:
            mine[5] = mine[5][:, : theirs[5].shape[1]]
        return [*found, *mine], [*right, *theirs]

    with using(Kernels(gpu="triton")):
        alike(run, 1e-4)
