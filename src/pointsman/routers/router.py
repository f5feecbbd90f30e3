"""Router = score -> normalize -> mix -> select, and its losses.

Each stage is a small module. A stage may define `step_end()`, called once after each optimizer step, and declares with
class attributes what it does to the contract: `causal`, `batch_invariant`, `stochastic`, `needs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pointsman import auxiliary
from pointsman.ops.kernels import Kernels
from pointsman.ops.linear import raised
from pointsman.routing import Carry, Routing, RoutingContext

PLAIN_CONTEXT = RoutingContext()


@dataclass(frozen=True)
class Scores:
    """What the stages pass on.

    Attributes:
        logits: [B, T, E], at least float32.
        probs: [B, T, E]; the combine weights come from these.
        choice: [B, T, E], what selection ranks by.
    """

    logits: Tensor
    probs: Tensor
    choice: Tensor


class Stage(nn.Module):
    """One stage of a router, with its part of the router's contract."""

    causal: bool = True
    batch_invariant: bool = True
    stochastic: bool = False
    needs: frozenset[str] = frozenset()
    needs_step_end: bool = False

    def step_end(self) -> None:
        """Called once after each optimizer step."""

    def gather(self, statistics: Mapping[str, Tensor]) -> None:
        """Takes in the statistics of one micro-batch: called in backward, once."""


class FrozenStage(Stage):
    """A stage whose buffers keep at least float32 when the model is cast to bf16 or half: they never train."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> FrozenStage:
        kept = {name: (module, buffer) for name, module, buffer in _own_buffers(self)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, (module, before) in kept.items():
            after = module._buffers[name.rpartition(".")[2]]
            if after is not None and after.dtype in (torch.bfloat16, torch.float16):
                module._buffers[name.rpartition(".")[2]] = before.to(after.device)
        return self


def _own_buffers(stage: nn.Module) -> list[tuple[str, nn.Module, Tensor]]:
    return [
        (f"{path}.{name}", module, buffer)
        for path, module in stage.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


class Scorer(FrozenStage):
    """hidden [B, T, dim] -> logits [B, T, E], through the matrix products `kernels` (None: the measured ones).

    Attributes:
        raises: whether `forward` takes half precision and raises it (`ops.scoring.linear`); otherwise it gets float32.
            True only where the class that says so has the `forward`.
    """

    kernels: Kernels | None = None
    raises = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__ and "raises" not in cls.__dict__:
            cls.raises = False

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        raise NotImplementedError

    def plain_linear(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [E, dim] and bias [E] of the linear router with the same logits; None where there is none."""
        return None


class Normalizer(FrozenStage):
    """logits [B, T, E] -> probabilities [B, T, E]."""

    def forward(self, logits: Tensor) -> Tensor:
        raise NotImplementedError


class Softmax(Normalizer):
    """p = softmax(z)."""

    def forward(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, -1)


class Sigmoid(Normalizer):
    """p_i = sigmoid(z_i), each expert on its own."""

    def forward(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)


class Mixer(FrozenStage):
    """Tokens inform each other: probabilities [B, T, E] -> probabilities [B, T, E], and what to carry on."""

    def forward(
        self, probs: Tensor, hidden: Tensor, context: RoutingContext
    ) -> tuple[Tensor, Carry | None, Mapping[str, Tensor]]:
        """Returns the mixed probabilities, the carry, and statistics for `gather`."""
        raise NotImplementedError


class Selector(Stage):
    """Scores and k -> experts [B*T, k] (-1 = none) and weights [B*T, k]."""

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass
class Stages:
    """What a named router puts together.

    Attributes:
        balance_temperature: the balance loss takes P from softmax(logits / balance_temperature).
        objective: None, or the name of a training objective that the router needs ("consistency").
        objective_weight: weight of that objective's extra term.
    """

    score: Scorer
    normalize: Normalizer = field(default_factory=Softmax)
    select: Selector | None = None
    balance_temperature: float = 1.0
    objective: str | None = None
    objective_weight: float = 0.0


class Router(nn.Module):
    """Four stages, and what every router has: k, losses, precision, masks.

    Computes in at least float32 whatever the dtype of its input and its parameters.

    Attributes:
        spec: what `build_router` was asked for; the router's name in every table.
        num_experts, top_k: E, and k (set by `set_top_k`).
        causal, batch_invariant, stochastic, needs, objective: the router's contract.
        frozen: whether `freeze` holds it: its state then stays too, whatever `step_end` would do.
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
        self.balance_temperature = stages.balance_temperature
        self.objective = stages.objective
        self.objective_weight = stages.objective_weight
        parts = [part for part in (self.score, self.normalize, mix, select) if part is not None]
        self.causal = all(part.causal for part in parts)
        self.batch_invariant = all(part.batch_invariant for part in parts)
        self.stochastic = any(part.stochastic for part in parts)
        self.needs: frozenset[str] = frozenset().union(*(part.needs for part in parts))
        self.needs_step_end = any(part.needs_step_end for part in parts)
        self.frozen = False
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
        if self.mix is not None or not getattr(self.score, "raises", False):
            hidden = raised(hidden)
        logits = self.score(hidden, context)
        unmixed = self.normalize(logits)
        probs, carry, statistics = unmixed, None, {}
        if self.mix is not None:
            probs, carry, statistics = self.mix(unmixed, hidden, context)
        experts, weights = self.select(Scores(logits, probs, probs), self.top_k, context)
        flat_logits, flat_unmixed = logits.flatten(0, 1), unmixed.flatten(0, 1)
        mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
        if mask is not None:
            experts = experts.masked_fill(~mask[:, None], -1)
            weights = weights.masked_fill(~mask[:, None], 0)
        return Routing(
            experts=experts,
            weights=weights,
            probs=flat_unmixed if probs is unmixed else probs.flatten(0, 1),
            logits=flat_logits,
            losses=self._losses(flat_logits, flat_unmixed, experts, mask),
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
        if context.padding_mask is not None and context.padding_mask.shape != hidden.shape[:2]:
            raise ValueError(
                f"{self.spec}: padding_mask must be {list(hidden.shape[:2])}, got {list(context.padding_mask.shape)}"
            )
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
                "gradient; use renormalize=false or a larger k"
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
