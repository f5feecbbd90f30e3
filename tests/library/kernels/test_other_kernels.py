"""Other packages' kernels by name: what they are handed, and one clear line where they cannot be used."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.kernels import experts as on_gpu
from pointsman.kernels import other_kernels
from pointsman.ops.kernels import Kernels, using


class Liger(torch.nn.Module):
    """What Liger's function computes, by its documented arguments: gate and input in one weight, the gate first."""

    @staticmethod
    def apply(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert index.dtype == torch.int32
        output = torch.zeros_like(x)
        for slot in range(index.shape[1]):
            gate, up = torch.einsum("td,thd->th", x, gate_up[index[:, slot].long()]).chunk(2, -1)
            rows = torch.einsum("th,tdh->td", F.silu(gate) * up, down[index[:, slot].long()])
            output = output + weights[:, slot, None] * rows
        return output


def sonic(x: Tensor, scores: Tensor, token: Tensor, expert: Tensor, w1: Tensor, b1: None, w2: Tensor, b2: None,
          experts: int, stream: Any, activation: str, inference: bool) -> tuple[Tensor, None]:  # fmt: skip
    """What SonicMoE's function computes: weights [2 H, dim, E] with rows of gate and input in turn, [dim, H, E]."""
    assert activation == "swiglu"
    assert scores.dtype == torch.float32
    assert token.dtype == expert.dtype == torch.int32
    assert token.tolist() == sorted(token.tolist())
    assert w1.shape == (2 * w2.shape[1], x.shape[1], experts)
    output = torch.zeros_like(x)
    for row, one, weight in zip(token.tolist(), expert.tolist(), scores, strict=True):
        product = w1[:, :, one] @ x[row]
        addition = weight * (w2[:, :, one] @ (F.silu(product[::2]) * product[1::2]))
        output = output.index_add(0, torch.tensor([row]), addition[None])
    return output, None


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that do what ours expects of them."""
    given: dict[str, dict[str, Any]] = {
        "liger_kernel": {}, "liger_kernel.ops": {"LigerFusedMoEFunction": Liger}, "sonicmoe": {},
        "sonicmoe.functional": {"moe_general_routing_inputs": sonic},
        "sonicmoe.enums": {"ActivationType": types.SimpleNamespace(SWIGLU="swiglu")},
    }  # fmt: skip
    for name, contents in given.items():
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", [other_kernels.LIGER, other_kernels.SONICMOE])
def test_what_they_are_handed(problem: Callable[..., Any], name: str) -> None:
    case = problem(tokens=9, gated=True, activation="silu", bias=False, dropped=0.3)
    case.check(lambda p: other_kernels.apply(name, p.hidden, p.weights, p.routing.experts, p.parameters))


def refused(case: Any, name: str, dropout: float = 0.0) -> str:
    given = case.hidden, case.weights, None, case.routing.experts, case.parameters, case.activation, dropout
    with using(Kernels(gpu=name)), pytest.raises(ValueError, match=f"^kernels: gpu='{name}': ") as error:
        on_gpu.apply(*given)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.usefixtures("packages")
def test_what_they_cannot_do_is_said(problem: Callable[..., Any]) -> None:
    gated = {"tokens": 4, "gated": True, "activation": "silu", "bias": False}
    assert refused(problem(tokens=4, bias=False), "liger").endswith("its experts are gated, with SiLU")
    assert refused(problem(**{**gated, "bias": True}), "liger").endswith("no biases")
    assert refused(problem(**gated), "liger", 0.1).endswith("no dropout")
    assert refused(problem(**gated), "sonicmoe").endswith("bfloat16")


def test_a_package_that_is_not_installed_is_named(problem: Callable[..., Any]) -> None:
    for name, (module, package) in other_kernels.MODULES.items():
        if not __import__("importlib.util").util.find_spec(module):
            assert refused(problem(tokens=4), name).endswith(f"{package} is not installed: pip install {package}")


def test_no_timing_chooses_them() -> None:
    assert Kernels().gpu == "auto"
    with pytest.raises(ValueError, match="did you mean"):
        Kernels(gpu="sonicmo")
