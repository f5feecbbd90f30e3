"""Our routers in torchtitan's MoE (0.3), in the place of `TokenChoiceTopKRouter`.

    config.moe.router = Router.Config.like(config.moe.router, "xmoe:balance=0.01")
    config.moe.load_balance_coeff = None     # the bias of torchtitan's own router

torchtitan divides the main loss by the tokens of the whole step and sums gradients over micro-batches and ranks, so the
router's losses must be divided by their number: `set_loss_scale(model, 1 / (accumulation * data-parallel degree))`,
where the degree is that of shards times replicas times context.
Call `pointsman.engines.common.step_end(model)` after each optimizer step. Tensor parallelism is not supported.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module

from pointsman.engines.common import carried, deliver
from pointsman.ops.drawing import redraw
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
            raise ValueError(f"{ENGINE}: _debug_force_load_balance is TokenChoiceTopKRouter's; the spec says all")
        self.num_experts, self.top_k = config.num_experts, config.top_k
        sizes = {"dim": config.dim, "num_experts": config.num_experts, "top_k": config.top_k}
        self._built = partial(carried, ENGINE, config.spec, **sizes)
        self.router = self._built()
        self.loss_scale: Tensor
        self.register_buffer("loss_scale", torch.ones(()), persistent=False)

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, dim] -> weights [B, T, k], experts [B, T, k], probabilities [B, T, E].

        Raises:
            ValueError: torchtitan's own balancing bias is on.
        """
        if expert_bias_E is not None:
            raise ValueError(f"{ENGINE}: set load_balance_coeff=None: this router's balance is said in its spec")
        routing: Routing = self.router(x_BLD)
        weights, shape = deliver(routing.weights, self.router, routing, self.loss_scale), x_BLD.shape[:2]
        return tuple(one.reshape(*shape, -1).contiguous() for one in (weights, routing.experts, routing.probs))  # type: ignore[return-value]

    def parallelize(self, parallel_dims: Any) -> None:
        """Tells torchtitan that every rank holds the whole router.

        Raises:
            ValueError: tensor parallelism, or the backend that makes every tensor a DTensor.
        """
        if parallel_dims.tp_enabled:
            raise ValueError(f"{ENGINE}: tensor parallelism divides a sequence, which this router sees whole")
        if parallel_dims.spmd_backend == "full_dtensor":
            raise ValueError(f"{ENGINE}: spmd_backend='full_dtensor': allowed: 'spmd_types', 'partial_dtensor'")
        super().parallelize(parallel_dims)
        if parallel_dims.spmd_backend == "spmd_types":
            layout = dense_param_placement(tp=spmd.R)
            names = [axis.value for axis in layout.axes()]
            with set_current_spmd_mesh(parallel_dims.get_optional_mesh(names, include_singleton_axes=True)):
                for tensor in [*self.parameters(), *self.buffers()]:
                    spmd.assert_type(tensor, layout.axis_types, layout.partition_spec)

    def _init_self_parameters(self) -> None:
        """Draws the router's weights anew: after `to_empty` there are none."""
        redraw(self.router, self._built())

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
