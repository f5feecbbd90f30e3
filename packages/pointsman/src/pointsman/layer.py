"""MoE = Router + Experts (+ shared experts): the only place they meet."""

from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor, nn

from pointsman import routers as routers  # registers the named routers
from pointsman._errors import did_you_mean
from pointsman._values import check_whole, convert
from pointsman.delivery import LossDelivery
from pointsman.experts.modules import EXPERTS, BaseExperts, Experts
from pointsman.experts.shared import SharedExperts, VirtualExperts, responses
from pointsman.ops.kernels import exporting
from pointsman.routers.frame.registry import build_router
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing, RoutingContext


class MoE(nn.Module):
    """A sparse mixture of experts: y = sum over the chosen experts of weight * expert(x), + shared experts(x).

    Args:
        dim: width of the hidden states, [..., dim].
        hidden_dim: inner width of each expert: `experts.w_in` is [num_experts, hidden_dim, dim], `experts.w_out`
            [num_experts, dim, hidden_dim].
        num_experts: E: a router's probabilities are [tokens, E].
        top_k: experts a token, k: `Routing.experts` and `.weights` are [tokens, k] (`set_top_k`); a Router has its own.
        router: a router spec, or a Router.
        activation: of the hidden units [assignments, hidden_dim].
        gated: whether experts are gated (SwiGLU with "silu"): `experts.w_gate` is as `w_in`.
        bias: whether experts have biases: `experts.b_in` [num_experts, hidden_dim], `experts.b_out` [num_experts, dim].
        dropout: dropout of the experts' hidden units.
        experts: "ffn", or "base": three residual sublayers as one expert, the output containing the input
            (`BaseExperts`, X-MoE's sparse layer).
        attach_losses: False: `loss = pointsman.add_losses(loss, model)` adds the router's losses to the loop's own, and
            a loop without it is warned. True: autograd adds them to whatever the output enters, in evaluation, too,
            wherever gradients are on; their scale is what `pointsman.set_loss_scale` says, whatever the loop does to
            its own loss.
        shared_experts: how many experts every token takes besides (`SharedExperts`), as one of inner width
            shared_experts * hidden_dim; 0: none.
        shared_gate: whether their output [tokens, dim] is scaled by a sigmoid of its own, [tokens, 1].
        vocab_size: the number of token ids, for routers that route by them.

    Raises:
        ValueError: an unknown router, option, activation or kind of expert, or a router of another size.
    """

    role = "moe"

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, *, top_k: int = 2, router: str | Router = "smoe",
        activation: Literal["relu", "gelu", "silu"] = "relu", gated: bool = False, bias: bool = True,
        dropout: float = 0.0, experts: Literal["ffn", "base"] = "ffn", attach_losses: bool = False,
        shared_experts: int = 0, shared_gate: bool = False, vocab_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        flags = {"gated": gated, "bias": bias, "attach_losses": attach_losses, "shared_gate": shared_gate}
        gated, bias, attach_losses, shared_gate = (convert(value, bool, name) for name, value in flags.items())
        if experts not in EXPERTS:
            raise ValueError(f"unknown experts {experts!r}: {did_you_mean(experts, EXPERTS)}")
        if isinstance(router, str):
            router = build_router(router, dim=dim, num_experts=num_experts, top_k=top_k, vocab_size=vocab_size)
        if not isinstance(router, Router):
            told = f"router={type(router).__name__}(…): allowed are a spec and a pointsman.Router"
            raise ValueError(f"{told}; 'smoe' is a linear gate, with bias=false one without a bias")
        if (router.dim, router.num_experts) != (dim, num_experts):
            raise ValueError(f"router {router.spec!r} has dim={router.dim}, num_experts={router.num_experts}; the "
                             f"layer has dim={dim}, num_experts={num_experts}")  # fmt: skip
        if experts == "base" and router.needs_moe:
            raise ValueError(f"{router.spec!r} cannot be used with experts='base': it does not only weigh outputs")
        self.router = router
        self.experts: Experts | BaseExperts = EXPERTS[experts](
            dim, hidden_dim, num_experts, activation=activation, gated=gated, bias=bias, dropout=dropout
        )
        self.virtual = VirtualExperts(dim, router.virtual) if set(router.virtual) - {"zero"} else None
        check_whole("shared_experts", shared_experts, least=0)
        if shared_gate and not shared_experts:
            raise ValueError("shared_gate=True needs shared_experts, a whole number from 1")
        self.shared: SharedExperts | None = None
        if shared_experts:
            self.shared = SharedExperts(
                dim, shared_experts * hidden_dim, activation=activation, gated=gated, bias=bias, dropout=dropout,
                gate=shared_gate,
            )  # fmt: skip
        self.delivery = LossDelivery(attach_losses)

    @property
    def contains_input(self) -> bool:
        """Whether the output contains the input, so that no residual belongs around the layer."""
        return isinstance(self.experts, BaseExperts)

    @property
    def top_k(self) -> int:
        return self.router.top_k

    def forward(
        self, hidden: Tensor, context: RoutingContext | None = None, *, return_routing: bool = False
    ) -> Tensor | tuple[Tensor, Routing]:
        """[B, T, dim] -> [B, T, dim], or [tokens, dim] -> [tokens, dim]: one sequence.

        Args:
            hidden: the hidden states.
            context: what the router may look at besides.
            return_routing: whether the routing comes back too, as (output, routing): a model keeps `Routing.carry`
                beside its memory and gives `Routing.above` to the sparse layers above.
        """
        # no view between the rows and the experts: autograd adds the router's gradient into theirs then, in place
        rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
        if getattr(self.router.score, "needs_responses", False):  # PEFT wraps stages
            context = replace(context or RoutingContext(), responses=partial(responses, self.experts, rows))
        seen = hidden if hidden.dim() == 2 or exporting() else rows.view(hidden.shape)
        routing: Routing = self.router(seen, context)
        output, statistics = routing.combine(self, rows, routing)
        if self.router.training and statistics:
            routing = replace(routing, statistics={**routing.statistics, **statistics})
        if self.shared is not None:
            output = output + self.shared(rows)
        if routing.losses or routing.statistics or self.delivery.last:
            output = self.delivery.deliver(output, routing.losses, routing.statistics, self.router.gather)
        output = output.view(hidden.shape)
        return (output, routing) if return_routing else output
