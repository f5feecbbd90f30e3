"""Other packages' kernels for the experts on a GPU, by name (`Kernels(gpu="liger")`); no timing ever chooses them.

Both take gated experts with SiLU, without biases and dropout. They want the weights of gate and input in one tensor,
which is made anew at each call: a layer that is to be fast with them costs one pass over these weights more.

- `liger`: `liger_kernel.ops.LigerFusedMoEFunction` (Hsu et al. 2024, Liger Kernel), Triton. Its routing may wait for
  the host once a call, so a step with it may not be captured as a graph.
- `sonicmoe`: `sonicmoe.functional.moe_general_routing_inputs` (Guo et al. 2025, SonicMoE), bfloat16, Hopper or newer.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from pointsman.ops.feed_forward import ExpertParameters

LIGER, SONICMOE = "liger", "sonicmoe"
MODULES = {LIGER: ("liger_kernel", "liger-kernel"), SONICMOE: ("sonicmoe", "sonic-moe")}
"""Name -> module, and what pip installs."""


def unsuited(
    name: str,
    hidden: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
    major: int,
) -> str | None:
    """Why a package's kernels cannot be used for these experts, on this major compute capability; None if they can."""
    module, package = MODULES[name]
    if importlib.util.find_spec(module) is None:
        return f"the package {package} is not installed: pip install {package}"
    p = parameters
    for cannot, why in (
        (p.w_gate is None or activation != "silu", "its experts are gated, with SiLU"),
        (any(bias is not None for bias in (p.b_in, p.b_out, p.b_gate)), "its experts have no biases"),
        (dropout > 0, "it has no dropout"),
        (name == SONICMOE and hidden.dtype != torch.bfloat16, "it computes in bfloat16"),
        (name == SONICMOE and major < 9, "it needs compute capability 9.0"),
    ):
        if cannot:
            return why
    return None


def apply(name: str, hidden: Tensor, weight: Tensor, expert: Tensor, parameters: ExpertParameters) -> Tensor:
    """The experts' combined output [tokens, dim]; hidden [tokens, dim], weight and expert [tokens, k].

    An expert that is none becomes expert 0 with weight 0: these kernels leave nothing out.
    """
    none = (expert < 0) | (expert >= len(parameters.w_in))
    expert, weight = expert.masked_fill(none, 0).to(torch.int32), weight.masked_fill(none, 0)
    return _CALLS[name](hidden, weight, expert, parameters)


def _liger(hidden: Tensor, weight: Tensor, expert: Tensor, p: ExpertParameters) -> Tensor:
    function: Any = importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction
    assert p.w_gate is not None
    both = torch.cat([p.w_gate, p.w_in], 1)  # [E, 2 H, dim], the gate first
    output: Tensor = function.apply(hidden, both, p.w_out, expert, weight.to(hidden.dtype))
    return output


def _sonicmoe(hidden: Tensor, weight: Tensor, expert: Tensor, p: ExpertParameters) -> Tensor:
    package: Any = importlib.import_module("sonicmoe.functional")
    kind: Any = importlib.import_module("sonicmoe.enums").ActivationType
    assert p.w_gate is not None
    experts, width, dim = p.w_in.shape
    both = torch.stack([p.w_gate, p.w_in], 2).view(experts, 2 * width, dim)  # a row of the gate, one of the input, …
    tokens, k = expert.shape
    token = torch.arange(tokens, dtype=torch.int32, device=hidden.device).repeat_interleave(k, output_size=tokens * k)
    stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else None
    output: Tensor = package.moe_general_routing_inputs(
        hidden, weight.reshape(-1).float(), token, expert.reshape(-1), both.permute(1, 2, 0), None,
        p.w_out.permute(1, 2, 0), None, experts, stream, kind.SWIGLU, not torch.is_grad_enabled(),
    )[0]  # fmt: skip
    return output


_CALLS = {LIGER: _liger, SONICMOE: _sonicmoe}
