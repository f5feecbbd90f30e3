"""Kernels in Triton's interpreter: in a process of its own, in which TRITON_INTERPRET is 1 from the start.

`test_experts.py` above starts it; by hand: TRITON_INTERPRET=1 pytest tests/library/kernels/triton
"""

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the experts' kernels, in the order in which they are launched."""
    from pointsman.kernels.triton import fused, products

    names: list[str] = []

    class Noted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            names.append(self.name)
            return self.kernel[grid]

    for module in (fused, products):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Noted(name, getattr(module, name)))
    return names


@pytest.fixture
def undefined_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN, or a number far outside."""
    plain_empty, plain_like = Tensor.new_empty, torch.empty_like

    def spoiled(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**20))

    monkeypatch.setattr(Tensor, "new_empty", lambda *given, **named: spoiled(plain_empty(*given, **named)))
    monkeypatch.setattr(torch, "empty_like", lambda *given, **named: spoiled(plain_like(*given, **named)))
