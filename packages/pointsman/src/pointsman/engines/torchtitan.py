"""Our routers in torchtitan's MoE (0.3), in the place of `TokenChoiceTopKRouter`.

    config.moe.router = Router.Config.like(config.moe.router, "xmoe:balance=0.01")
    config.moe.load_balance_coeff = None     # the bias of torchtitan's own router

torchtitan divides the main loss by the tokens of the whole step and sums gradients over micro-batches and ranks, so the
router's losses must be divided by their number: `set_loss_scale(model, 1 / (accumulation * data-parallel degree))`.
Call `pointsman.engines.common.step_end(model)` after each optimizer step. Tensor parallelism is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.module import Module

from pointsman.engines.common import carried, deliver
from pointsman.routing import Routing

ENGINE = "torchtitan"


class Router(Module):  # type: ignore[misc]
    """A router of ours, in the place of `TokenChoiceTopKRouter`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Sizes and spec; `gate` is the field of torchtitan's own that its sharding plan reads."""

        dim: int
        num_experts: int
        top_k: int
        spec: str
        gate: Any = None
        _debug_force_load_balance: bool = False

        @classmethod
        def like(cls, own: Any, spec: str) -> Any:
            """The configuration with the sizes of torchtitan's own."""
            sizes = {"dim": own.gate.in_features, "num_experts": own.num_experts, "top_k": own.top_k}
            return cls(**sizes, spec=spec, gate=own.gate)

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config._debug_force_load_balance:
            raise ValueError(
                f"{ENGINE}: _debug_force_load_balance is of TokenChoiceTopKRouter; this router chooses itself"
            )
        self.num_experts, self.top_k = config.num_experts, config.top_k
        sizes = {"dim": config.dim, "num_experts": config.num_experts, "top_k": config.top_k}
        self._built = partial(carried, ENGINE, config.spec, **sizes)
        self.router = self._built()
        self.loss_scale: Tensor
        self.register_buffer("loss_scale", torch.ones(()), persistent=False)

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, dim] -> weights [B, T, k], experts [B, T, k], probabilities [B, T, E].

        Raises:
            ValueError: torchtitan's own balancing bias is on, or the input is divided over ranks.
        """
        if expert_bias_E is not None:
            raise ValueError(f"{ENGINE}: set load_balance_coeff=None: this router's balance is said in its spec")
        if isinstance(x_BLD, DTensor):
            raise ValueError(f"{ENGINE}: tensor parallelism divides a sequence, which this router sees whole")
        routing: Routing = self.router(x_BLD)
        weights, shape = deliver(routing.weights, self.router, routing, self.loss_scale), x_BLD.shape[:2]
        return tuple(one.reshape(*shape, -1).contiguous() for one in (weights, routing.experts, routing.probs))  # type: ignore[return-value]

    def _init_self_parameters(self) -> None:
        """Draws the router's weights anew: after `to_empty` there are none."""
        fresh, device = self._built(), self.loss_scale.device
        own = {**dict(self.router.named_parameters()), **dict(self.router.named_buffers())}
        with torch.no_grad():
            for name, value in [*fresh.named_parameters(), *fresh.named_buffers()]:
                held = own[name]
                value = value.to(device=held.device if held.device.type != "meta" else device, dtype=held.dtype)
                if isinstance(held, DTensor):
                    value = distribute_tensor(value, held.device_mesh, held.placements)
                held.copy_(value)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.loss_scale = torch.ones((), device=buffer_device or self.loss_scale.device)


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """What the routers' losses are multiplied by: 1 / (accumulation steps * data-parallel degree).

    Raises:
        ValueError: the model has none of these routers.
    """
    found = [module for module in model.modules() if isinstance(module, Router)]
    if not found:
        raise ValueError(f"set_loss_scale: {type(model).__name__} has no pointsman.engines.torchtitan.Router")
    for module in found:
        module.loss_scale.fill_(scale)
