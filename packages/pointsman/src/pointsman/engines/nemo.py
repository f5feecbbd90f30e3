"""Our routers in NeMo Automodel's MoE (0.7): `replace_gates(model, "xmoe:balance=0.01")`, before it is parallelised.

Experts, dispatchers and parallelism stay NeMo's. The router's losses take NeMo's own way (`MoEAuxLossAutoScaler`, whose
scale its recipes set). Call `pointsman.engines.common.step_end(model)` after each optimizer step.
"""

from typing import Any

import torch
from nemo_automodel.components.moe.layers import Gate, MoE
from nemo_automodel.components.moe.megatron.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from pointsman.engines.common import carried, deliver
from pointsman.ops.drawing import redraw
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing, RoutingContext

ENGINE = "NeMo Automodel"


class PointsmanGate(nn.Module):
    """A router of ours, in the place of `Gate`, with its number of experts and its k.

    Raises:
        ValueError: NeMo's layer cannot carry the router, or the gate has NeMo's own balancing, which would have no
            effect.
    """

    bias_update_factor = 0.0
    e_score_correction_bias = None
    router_replay = None
    _track_load_balance = False
    _last_expert_load: Tensor | None = None
    _last_aux_loss: Tensor | None = None

    def __init__(self, own: Gate, spec: str, seed: int = 0) -> None:
        super().__init__()
        for name in ("aux_loss_coeff", "bias_update_factor"):
            if getattr(own, name):
                raise ValueError(f"{ENGINE}: {name}={getattr(own, name)} is Gate's: set 0; the spec says it all")
        self.dim, self.n_experts, self.topk, self.spec = own.dim, own.n_experts, own.topk, spec
        self.router_weights_fp32, self.aux_loss_coeff = own.router_weights_fp32, 0.0
        self.seed = seed
        self.router = self._built().to(own.weight.device)

    def _built(self) -> Router:
        """The same on every rank: NeMo seeds them differently, and what is frozen in a router is never gathered."""
        sizes = {"dim": self.dim, "num_experts": self.n_experts, "top_k": self.topk}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # and of no device: those are not put back
            return carried(ENGINE, self.spec, **sizes, dropped=True)

    def forward(self, x: Tensor, token_mask: Tensor, cp_mesh: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """[tokens, dim] -> weights [tokens, k], experts [tokens, k], the sum of the losses.

        Args:
            token_mask: [tokens] bool, True for a real token.
        """
        routing: Routing = self.router(x[None], RoutingContext(padding_mask=token_mask[None]))
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0, device=x.device)
        parts = 1 if cp_mesh is None else cp_mesh.size()  # the gradients of a sequence's parts are added up
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale / parts
        weights = deliver(routing.weights, self.router, routing, scale)
        losses = torch.stack([*routing.losses.values()]).sum().detach() if routing.losses else None
        if self._track_load_balance:
            self._last_expert_load = torch.bincount(routing.experts.flatten() + 1, minlength=self.n_experts + 1)[1:]
            self._last_aux_loss = losses
        return weights if self.router_weights_fp32 else weights.type_as(x), routing.experts, losses

    def update_bias(self) -> None:
        """Nothing: `step_end` moves what moves."""

    def init_weights(self, buffer_device: torch.device, init_std: float = 0.02) -> None:
        """Draws the router's weights anew."""
        redraw(self.router, self._built())


def replace_gates(model: nn.Module, spec: str, seed: int = 0) -> nn.Module:
    """Puts a router of ours into every `MoE` of a model, in place; returns the model.

    Args:
        seed: of the first layer's weights, plus 1 for each layer after it.

    Raises:
        ValueError: the model has no MoE of NeMo's, or one of its gates cannot be replaced; nothing has changed.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]
    if not layers:
        raise ValueError(f"replace_gates: {type(model).__name__} has no MoE layer of NeMo Automodel")
    for name, layer in layers:
        if not isinstance(layer.gate, Gate):
            raise ValueError(f"replace_gates: layer {name!r}: {type(layer.gate).__name__} is not a Gate of NeMo's")
    gates = [PointsmanGate(layer.gate, spec, seed + place) for place, (_, layer) in enumerate(layers)]
    for (_, layer), gate in zip(layers, gates, strict=True):
        layer.gate = gate
    return model
