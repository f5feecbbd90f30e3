"""Router = score -> normalize -> mix -> select (`stages`), and its losses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pointsman import auxiliary
from pointsman.ops.linear import upcast
from pointsman.routers.stages import Mixer, Scores, Selector, Softmax, Stages
from pointsman.routing import Routing, RoutingContext, check_padding_mask

PLAIN_CONTEXT = RoutingContext()


class Router(nn.Module):
    """Four stages, and what every router has: k, losses, precision, masks.

    Computes in at least float32 whatever the dtype of its input and its parameters.

    Attributes:
        spec: what `build_router` was asked for; the router's name in every table.
        num_experts, top_k: E, and k (set by `set_top_k`).
        lr_scale: factor of the learning rate for the router's parameters, for training loops that read it.
        causal, batch_invariant, stochastic, needs, objective: the router's contract.
    """

    role = "router"

    def __init__(
        self,
        stages: Stages,
        select: Selector,
        *,
        mix: Mixer | None,
        spec: str,
        dim: int,
        num_experts: int,
        top_k: int,
        balance: float = 0.0,
        z_loss: float = 0.0,
        lr_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.score = stages.score
        self.normalize = stages.normalize
        self.mix = mix
        self.select = select
        self.spec = spec
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = check_top_k(top_k, num_experts)
        self.balance = balance
        self.z_loss = z_loss
        self.lr_scale = lr_scale
        self.balance_temperature = stages.balance_temperature
        self.objective = stages.objective
        self.objective_weight = stages.objective_weight
        parts = [part for part in (self.score, self.normalize, mix, select) if part is not None]
        self.causal = all(part.causal for part in parts)
        self.batch_invariant = all(part.batch_invariant for part in parts)
        self.stochastic = any(part.stochastic for part in parts)
        self.needs: frozenset[str] = frozenset().union(*(part.needs for part in parts))
        self.needs_step_end = any(part.needs_step_end for part in parts)
        self._frozen = False
        self._moved_since_step_end: int | None = None
        self._warned: set[str] = set()

    def forward(self, hidden: Tensor, context: RoutingContext | None = None) -> Routing:
        """Routes hidden states [B, T, dim] (or [tokens, dim]: one sequence)."""
        context = PLAIN_CONTEXT if context is None else context
        hidden = hidden.unsqueeze(0) if hidden.dim() == 2 else hidden
        self._check(hidden, context)
        if torch.compiler.is_compiling():
            from pointsman.ops.recompilation import allow_a_graph_for_each_k

            allow_a_graph_for_each_k(self.num_experts)
        if not torch.is_autocast_enabled(hidden.device.type):
            return self._route(hidden, context)
        with torch.autocast(hidden.device.type, enabled=False):
            return self._route(hidden, context)

    def _route(self, hidden: Tensor, context: RoutingContext) -> Routing:
        if self.mix is not None or not getattr(self.score, "accepts_half", False):
            hidden = upcast(hidden)
        logits = self.score(hidden, context)
        unmixed = self.normalize(logits)
        probs, carry, statistics = unmixed, None, {}
        if self.mix is not None:
            probs, carry, statistics = self.mix(unmixed, hidden, context)
        ranked = logits if self.mix is None and self.normalize.increasing else probs
        scores = Scores(logits, probs, ranked)
        chosen, weights = self.select(scores, self.top_k, context)
        flat_logits, flat_unmixed = logits.flatten(0, 1), unmixed.flatten(0, 1)
        mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
        if mask is not None:
            chosen = chosen.masked_fill(~mask[:, None], -1)
        experts = self.select.drop(chosen, scores, context)
        if mask is not None or experts is not chosen:
            weights = weights.masked_fill(experts < 0, 0)
        return Routing(
            experts=experts,
            weights=weights,
            probs=flat_unmixed if probs is unmixed else probs.flatten(0, 1),
            logits=flat_logits,
            losses=self._losses(flat_logits, flat_unmixed, chosen, mask),
            carry=carry,
            unmixed=flat_unmixed,
            statistics=statistics,
        )

    def _losses(self, logits: Tensor, unmixed: Tensor, experts: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        if self.balance:
            softmax = isinstance(self.normalize, Softmax) and self.balance_temperature == 1.0
            probs = unmixed if softmax else torch.softmax(logits / self.balance_temperature, -1)
            values["balance"] = self.balance * auxiliary.balance(probs, experts, mask)
        if self.z_loss:
            values["z_loss"] = self.z_loss * auxiliary.z_loss(logits, mask)
        return values

    @property
    def frozen(self) -> bool:
        """Whether `freeze` holds it: its state then stays too, whatever `step_end` would do. `requires_grad_(True)`, of
        the router or of one of its parameters, ends that; so does setting this to False."""
        return self._frozen and not any(parameter.requires_grad for parameter in self.parameters())

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._frozen = frozen

    def requires_grad_(self, requires_grad: bool = True) -> Router:
        super().requires_grad_(requires_grad)
        if requires_grad:
            self._frozen = False  # one without parameters, too
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._moved_since_step_end = None  # loading is no step

    def gather(self, statistics: Mapping[str, Tensor]) -> None:
        """Hands one micro-batch's statistics to the stages; called in backward, once per micro-batch."""
        if self.frozen:
            return
        for stage in (self.score, self.normalize, self.mix, self.select):
            if stage is not None:
                stage.gather(statistics)

    def step_end(self) -> None:
        """Once after each optimizer step: norms kept, running statistics taken over."""
        if self.frozen:
            return
        for stage in (self.score, self.normalize, self.mix, self.select):
            if stage is not None:
                stage.step_end()
        self._moved_since_step_end = self._parameter_version()

    def _parameter_version(self) -> int:
        return sum(parameter._version for parameter in self.parameters())

    def _check(self, hidden: Tensor, context: RoutingContext) -> None:
        if hidden.dim() != 3 or hidden.shape[-1] != self.dim:
            raise ValueError(
                f"{self.spec}: hidden must be [B, T, {self.dim}] or [tokens, {self.dim}], got {list(hidden.shape)}"
            )
        if context.padding_mask is not None:
            check_padding_mask(context.padding_mask, hidden.shape[:2], f"{self.spec}: ")
        for need in self.needs:
            if getattr(context, need) is None:
                raise ValueError(f"{self.spec}: the router needs RoutingContext.{need}, which this model does not give")
        if not self.training or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (
            self.top_k == 1
            and getattr(self.select, "renormalize", False)
            and any(p.requires_grad for p in self.score.parameters())
        ):
            self._warn(
                f"{self.spec}: with top_k=1 and renormalised weights every weight is exactly 1, so the router gets no "
                "gradient from the output; use renormalize=false or a larger k"
            )
        if self.needs_step_end:
            version = self._parameter_version()
            if self._moved_since_step_end is not None and version != self._moved_since_step_end:
                self._warn(
                    f"{self.spec}: parameters moved without step_end; call pointsman.step_end(model) after "
                    "optimizer.step(), or pointsman.track_steps(model, optimizer) once"
                )
            self._moved_since_step_end = version

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def extra_repr(self) -> str:
        return f"{self.spec}, dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}"


def check_top_k(top_k: int, num_experts: int) -> int:
    """k as it is, or ValueError."""
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k!r}: allowed are whole numbers from 1 to {num_experts} (the number of experts)")
    return top_k
