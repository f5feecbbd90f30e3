"""Our routers in Megatron-core's MoE layer (0.16): `MoESubmodules(experts=…, router=router("xmoe:balance=0.01"))`.

The layer's dispatcher, experts and parallelism stay Megatron's. What the router computes is ours: k is
`moe_router_topk`, the balance loss and all else is said in the spec. Settings of `TransformerConfig` that would have no
effect are refused. Call `pointsman.engines.common.step_end(model)` after each optimizer step.

S tokens of a sequence, B sequences, E experts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from pointsman.engines.common import carried, deliver, dense
from pointsman.routing import Routing, RoutingContext

OTHERS = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_expert_capacity_factor": None,
    "moe_input_jitter_eps": None,
    "moe_router_force_load_balancing": False,
    "moe_enable_routing_replay": False,
}
"""Settings of Megatron's own router, and the value with which each does nothing."""


class PointsmanRouter(Router):  # type: ignore[misc]
    """A router of ours, in the place of `TopKRouter`.

    Args:
        spec: the router's spec, `balance` and all else in it.

    Raises:
        ValueError: Megatron's layer cannot carry the router, or the configuration has a setting of `TopKRouter`, which
            would have no effect.
    """

    def __init__(self, config: Any, pg_collection: Any = None, *, spec: str) -> None:
        MegatronModule.__init__(self, config)  # not Router's, whose weight nothing would train
        for name, nothing in OTHERS.items():
            value = getattr(config, name, nothing)
            if value != nothing and not (name == "moe_router_load_balancing_type" and not config.moe_aux_loss_coeff):
                raise ValueError(f"Megatron-core: {name}={value!r} is TopKRouter's: set {nothing!r}; the spec says all")
        self.num_experts, self.topk, self.layer_number = config.num_moe_experts, config.moe_router_topk, None
        shared = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.parts = config.context_parallel_size * shared
        self.expert_bias = self.local_tokens_per_expert = self.global_tokens_per_expert = None
        free = config.moe_token_dispatcher_type == "allgather"  # the others count k assignments for each token
        sizes = {"dim": config.hidden_size, "num_experts": self.num_experts, "top_k": self.topk}
        self.router = carried("Megatron-core", spec, **sizes, ragged=free, dropped=free)
        for parameter in self.router.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        if torch.cuda.is_available() and not config.use_cpu_initialization:
            self.router.to(torch.cuda.current_device())

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[S, B, dim] -> combine weights [S B, E] and the choice [S B, E] bool.

        Args:
            padding_mask: [S, B] bool, True for padding, as Megatron's code (not its docstring) has it.
        """
        hidden = input.transpose(0, 1)
        real = None if padding_mask is None else ~padding_mask.transpose(0, 1)
        routing: Routing = self.router(hidden, RoutingContext(padding_mask=real))
        probs, chosen = (
            one.view(*hidden.shape[:2], -1).transpose(0, 1).reshape(-1, self.num_experts) for one in dense(routing)
        )
        tokens: float | Tensor = 1 / self.parts  # the gradients of a sequence's parts are added up
        if self.config.calculate_per_token_loss:  # and are divided by the tokens later
            tokens = len(probs) if real is None else real.sum()
        routing = replace(routing, losses={name: loss * tokens for name, loss in routing.losses.items()})
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device=probs.device)
        # Megatron's schedule writes the main loss's scale into this tensor between forward and backward
        return deliver(probs, self.router, routing, MoEAuxLossAutoScaler.main_loss_backward_scale), chosen

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError("PointsmanRouter routes from hidden states: call it")


def router(spec: str) -> Callable[..., PointsmanRouter]:
    """The builder for `MoESubmodules.router`."""
    return partial(PointsmanRouter, spec=spec)
