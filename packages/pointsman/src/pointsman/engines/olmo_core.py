"""Our routers in OLMo-core's MoE (3.0): `MoEConfig(router=RouterConfig(spec="xmoe:balance=0.01", top_k=2), …)`.

`MoEConfig` needs `lb_loss_weight=None` (its default is 0.01): the balance loss is said in the spec. It reaches OLMo's
trainer as the router's own loss does, divided by `loss_div_factor`. Call `pointsman.engines.common.step_end(model)`
after each optimizer step. Tensor parallelism divides sequences in OLMo's router and is refused.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from olmo_core.nn.moe.router import MoERouter, MoERouterConfig
from torch import Tensor

from pointsman.engines.common import carried, deliver
from pointsman.ops.drawing import redraw
from pointsman.routing import Routing

ENGINE = "OLMo-core"
OTHERS = ("jitter_eps", "normalize_expert_weights", "bias_gamma", "lb_loss_weight", "z_loss_weight")


class Router(MoERouter):  # type: ignore[misc]
    """A router of ours, in the place of `MoELinearRouter`.

    Raises:
        ValueError: OLMo's layer cannot carry the router, or a setting of OLMo's own router is given, which would have
            no effect.
    """

    def __init__(self, *, spec: str, d_model: int, num_experts: int, top_k: int, init_device: str, **rest: Any) -> None:
        for name in OTHERS:
            if rest.get(name) is not None:
                raise ValueError(f"{ENGINE}: {name}={rest[name]!r} is MoELinearRouter's: set None; the spec has it")
        if rest.get("uniform_expert_assignment") or rest.get("random_expert_assignment"):
            raise ValueError(f"{ENGINE}: router {spec!r} chooses itself: leave expert assignments of benchmarks off")
        super().__init__(d_model=d_model, num_experts=num_experts, top_k=top_k, init_device=init_device)
        self._built = partial(carried, ENGINE, spec, dim=d_model, num_experts=num_experts, top_k=top_k)
        self.router = self._built().to(init_device)

    @property
    def weight(self) -> Tensor:
        """Empty: OLMo's initialisation draws the weight of its own router, ours draws itself."""
        return torch.empty(1)

    @property
    def device(self) -> torch.device:
        found: torch.device = next(iter([*self.router.parameters(), *self.router.buffers()])).device
        return found if found.type != "meta" else torch.device("cpu")

    def reset_parameters(self) -> None:
        """Draws the router's weights anew: OLMo builds models without memory."""
        super().reset_parameters()
        if "router" in self._modules:
            redraw(self.router, self._built())

    def forward(
        self, x: Tensor, *, loss_div_factor: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[B, T, dim] -> weights [B, T, k], experts [B, T, k], assignments of each expert [E], the losses.

        Args:
            loss_div_factor: what OLMo divides the main loss by: the tokens of the whole step.
        """
        routing: Routing = self.router(x)
        weights = deliver(routing.weights, self.router, replace(routing, losses={}), torch.ones((), device=x.device))
        counts = torch.bincount(routing.experts.reshape(-1), minlength=self.num_experts)
        losses: Tensor | None = None
        if self.training and torch.is_grad_enabled():
            self.batch_size_per_expert += counts
            if routing.losses:
                losses = torch.stack([*routing.losses.values()]).sum()
                if loss_div_factor is not None:
                    shared = 1 if self.cp_mesh is None else self.cp_mesh.size()
                    losses = losses * (routing.experts.shape[0] * shared / loss_div_factor)
        shape = x.shape[:2]
        return weights.view(*shape, -1), routing.experts.view(*shape, -1), counts, losses

    def get_expert_logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.router(x).logits
        return logits.view(*x.shape[:-1], -1)

    def post_batch(self, dry_run: bool = False) -> None:
        """Nothing: `step_end` is after the optimizer step."""

    def apply_tp(self, tp_mesh: Any, float8_enabled: bool = False) -> None:
        raise ValueError(f"{ENGINE}: tensor parallelism divides a sequence, which this router sees whole")


@dataclass
class RouterConfig(MoERouterConfig):  # type: ignore[misc]
    """`MoERouterConfig` with a spec of ours."""

    spec: str = "smoe"

    def num_params(self, d_model: int, num_experts: int) -> int:
        router = carried(ENGINE, self.spec, dim=d_model, num_experts=num_experts, top_k=self.top_k)
        return sum(parameter.numel() for parameter in router.parameters())

    def build(self, d_model: int, num_experts: int, *, init_device: str = "cpu", **kwargs: Any) -> Router:
        own = self.as_dict(exclude_none=True, recurse=False)
        for name in ("name", "gating_function", "dtype"):
            own.pop(name, None)
        for name in ("lb_loss_granularity", "dtype"):
            kwargs.pop(name, None)
        return Router(d_model=d_model, num_experts=num_experts, init_device=init_device, **own, **kwargs)
