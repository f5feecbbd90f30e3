"""MoE = Router + Experts (+ shared experts): the only place they meet."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pointsman import routers as routers  # registers the named routers
from pointsman._errors import did_you_mean
from pointsman._values import check_whole
from pointsman.experts.modules import EXPERTS, BaseExperts, Experts
from pointsman.experts.responses import responses
from pointsman.experts.shared import SharedExperts
from pointsman.experts.virtual import VirtualExperts
from pointsman.ops.linear import autocast_enabled
from pointsman.routers.frame.registry import build_router
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing, RoutingContext


class MoE(nn.Module):
    """A sparse mixture of experts: y = sum over the chosen experts of weight * expert(x), + shared experts(x).

    Args:
        dim: width of the hidden states.
        hidden_dim: inner width of each expert.
        num_experts: E.
        top_k: experts a token (`set_top_k` changes it).
        router: a router spec, or a Router.
        activation: "relu", "gelu" or "silu".
        gated: whether experts are gated (SwiGLU with "silu").
        bias: whether experts have biases.
        dropout: dropout of the experts' hidden units.
        experts: "ffn", or "base": three residual sublayers as one expert, the output containing the input
            (`BaseExperts`, X-MoE's sparse layer).
        attach_losses: True: autograd adds the router's losses to whatever the output enters, so that no training loop
            can forget them; in evaluation, too, wherever gradients are on. Their scale is `loss_scale`, whatever the
            loop does to its own loss. False: `pointsman.add_losses` adds them, or nobody does.
        shared_experts: how many experts every token takes besides (`SharedExperts`); 0: none.
        shared_gate: whether their output is scaled by a sigmoid of its own.
        vocab_size: the number of token ids, for routers that route by them.
    """

    role = "moe"

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        top_k: int = 2,
        router: str | Router = "smoe",
        activation: str = "relu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        experts: str = "ffn",
        attach_losses: bool = True,
        shared_experts: int = 0,
        shared_gate: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        if experts not in EXPERTS:
            raise ValueError(f"unknown experts {experts!r}: {did_you_mean(experts, EXPERTS)}")
        if isinstance(router, str):
            router = build_router(router, dim=dim, num_experts=num_experts, top_k=top_k, vocab_size=vocab_size)
        if (router.dim, router.num_experts) != (dim, num_experts):
            raise ValueError(
                f"router {router.spec!r} has dim={router.dim}, num_experts={router.num_experts}; "
                f"the layer has dim={dim}, num_experts={num_experts}"
            )
        if experts == "base" and router.needs_moe:
            raise ValueError(
                f"router {router.spec!r} does not only weigh outputs; experts='base' allows no such router"
            )
        self.router = router
        self.experts: Experts | BaseExperts = EXPERTS[experts](
            dim, hidden_dim, num_experts, activation=activation, gated=gated, bias=bias, dropout=dropout
        )
        adds = set(router.virtual) - {"zero"}
        self.virtual = VirtualExperts(dim, router.virtual) if adds else None
        check_whole("shared_experts", shared_experts, least=0)
        if shared_gate and not shared_experts:
            raise ValueError("shared_gate=True needs shared_experts, a whole number from 1")
        self.shared: SharedExperts | None = None
        if shared_experts:
            self.shared = SharedExperts(
                dim,
                shared_experts * hidden_dim,
                activation=activation,
                gated=gated,
                bias=bias,
                dropout=dropout,
                gate=shared_gate,
            )
        self.attach_losses = attach_losses
        self.loss_scale: Tensor
        self.register_buffer("loss_scale", torch.ones(()), persistent=False)
        self.last_losses: dict[str, Tensor] = {}
        self._kept: list[ref[PendingLosses]] = []
        self._compiled: PendingLosses | None = None
        self._without_gradients = False
        self._scale_is_known = False

    @property
    def contains_input(self) -> bool:
        """Whether the output contains the input, so that no residual belongs around the layer."""
        return isinstance(self.experts, BaseExperts)

    @property
    def top_k(self) -> int:
        return self.router.top_k

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> MoE:
        scale = self.loss_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # float32 whatever the model's dtype; nothing to copy where a model gets its first memory (`to_empty`)
        device = self.loss_scale.device
        self.loss_scale = torch.ones((), device=device) if scale.is_meta else scale.to(device)
        return self

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
        if self.router.score.needs_responses:
            context = replace(context or RoutingContext(), responses=partial(responses, self.experts, rows))
        seen = hidden if hidden.dim() == 2 or torch.compiler.is_exporting() else rows.view(hidden.shape)
        routing: Routing = self.router(seen, context)
        output, statistics = routing.combine(self, rows, routing)
        if self.router.training and statistics:
            routing = replace(routing, statistics={**routing.statistics, **statistics})
        if self.shared is not None:
            output = output + self.shared(rows)
        if routing.losses or routing.statistics or self.last_losses:
            output = self._attach(output, routing)
        output = output.view(hidden.shape)
        return (output, routing) if return_routing else output

    def _attach(self, output: Tensor, routing: Routing) -> Tensor:
        self.last_losses = {name: value.detach() for name, value in routing.losses.items()}
        losses = list(routing.losses.values())
        kept = None
        if not self.attach_losses:
            kept = self._keep(losses) if losses and self.training else None
            losses = []
        elif losses and self.training and not self._scale_is_known and not torch.compiler.is_compiling():
            self._warn_of_scale(output)
        if not (losses or routing.statistics or kept) or not torch.is_grad_enabled() or not output.requires_grad:
            return output
        gather = self.router.gather if self.training and routing.statistics else None
        attached: Tensor = AttachLosses.apply(output, self.loss_scale, gather, routing.statistics, kept, *losses)  # type: ignore[no-untyped-call]
        return attached

    def _keep(self, losses: Sequence[Tensor]) -> PendingLosses | None:
        """Keeps the losses of a training forward for `take_losses`, no longer than autograd keeps the forward."""
        if not torch.is_grad_enabled():
            self._without_gradients = True
            return None
        kept = PendingLosses(losses)
        if torch.compiler.is_compiling():
            self._compiled = kept  # the graph's nodes are not Python's: the last forward's are kept
            return None
        self._kept = [one for one in self._kept if one() is not None] + [ref(kept)]
        return kept

    def take_losses(self) -> list[Tensor]:
        """The live losses of the training forwards since the last call, with `attach_losses=False`; each once.

        Raises:
            ValueError: there were such forwards, all without gradients.
        """
        found = [kept for one in self._kept if (kept := one()) is not None]
        if self._compiled is not None:
            found.append(self._compiled)
        if self.training and self._without_gradients and not found:
            raise ValueError(
                "add_losses: the last training forward was without gradients, and so are its losses; activation "
                "checkpointing needs use_reentrant=False"
            )
        self._kept, self._compiled, self._without_gradients = [], None, False
        losses = [loss for kept in found for loss in kept.losses]
        for kept in found:
            kept.losses = ()
        return losses

    def confirm_loss_scale(self) -> None:
        """`loss_scale` was set by somebody who knows how the main loss is scaled: no warning about it."""
        self._scale_is_known = True

    def _warn_of_scale(self, output: Tensor) -> None:
        """Warns once where the main loss is scaled by somebody who does not know of the attached losses."""
        kind = output.device.type
        if autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
            why = "autocast in float16 goes with a loss scaler, which does not scale"
        elif (state := sys.modules.get("accelerate.state")) and state.GradientState().num_steps > 1:
            why = "accelerate divides the loss by its accumulation steps, but not"
        else:
            return
        self._scale_is_known = True
        warnings.warn(
            f"{why} the losses that MoE layers attach to their outputs: build the layers with attach_losses=False and "
            "write loss = pointsman.add_losses(loss, model), or call pointsman.set_loss_scale",
            stacklevel=5,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": [], "_compiled": None}  # of this layer's graphs, not of a copy's


class PendingLosses:
    """The live losses of one forward, for `add_losses`. The forward's graph holds them, the layer a weak reference."""

    def __init__(self, losses: Sequence[Tensor]) -> None:
        self.losses = losses


class AttachLosses(torch.autograd.Function):
    """The identity on the output, whose backward also sends `scale` into each loss.

    Statistics are handed on in backward too: it runs once a micro-batch, also under activation checkpointing. What
    comes out is the output's memory under another name: of a view torch would refuse to change anything in place. A
    compiler takes that `detach` at its word where it meets one as the result of a graph, and says that the result has
    no gradient; it gets a copy, which it fuses with what reads it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        scale: Tensor,
        gather: Callable[[Mapping[str, Tensor]], None] | None,
        statistics: Mapping[str, Tensor],
        kept: PendingLosses | None,
        *losses: Tensor,
    ) -> Tensor:
        ctx.scale, ctx.gather, ctx.statistics, ctx.kept = scale, gather, statistics, kept
        ctx.dtypes = [loss.dtype for loss in losses]
        return output.clone() if torch.compiler.is_compiling() else output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gather is not None:
            ctx.gather(ctx.statistics)
        return (grads[0], None, None, None, None, *(ctx.scale.to(dtype) for dtype in ctx.dtypes))
