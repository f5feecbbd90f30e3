"""The stages of a router, score -> normalize -> mix -> select: what each takes and gives.

Each stage is a small module. A stage may define `step_end()`, called once after each optimizer step, and declares with
class attributes what it does to the contract: `causal`, `batch_invariant`, `stochastic`, `needs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pointsman.ops.kernels import Kernels
from pointsman.routing import RouterState, RoutingContext


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
        accepts_half: whether `forward` takes half precision and upcasts it itself (`ops.scoring.linear`). Otherwise it
            gets float32. A subclass with a `forward` of its own must set it again.
    """

    kernels: Kernels | None = None
    accepts_half = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__ and "accepts_half" not in cls.__dict__:
            cls.accepts_half = False

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        raise NotImplementedError

    def plain_linear(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [E, dim] and bias [E] of the linear router with the same logits; None where there is none."""
        return None


class Normalizer(FrozenStage):
    """logits [B, T, E] -> probabilities [B, T, E].

    Attributes:
        increasing: whether larger logits have larger probabilities, at every token: selection then ranks by the logits,
            which differ where probabilities have run into 0 or 1.
    """

    increasing = False

    def forward(self, logits: Tensor) -> Tensor:
        raise NotImplementedError


class Softmax(Normalizer):
    """p = softmax(z)."""

    increasing = True

    def forward(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, -1)


class Sigmoid(Normalizer):
    """p_i = sigmoid(z_i), each expert on its own."""

    increasing = True

    def forward(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)


class Mixer(FrozenStage):
    """Tokens inform each other: probabilities [B, T, E] -> probabilities [B, T, E], and what to carry on."""

    def forward(
        self, probs: Tensor, hidden: Tensor, context: RoutingContext
    ) -> tuple[Tensor, RouterState | None, Mapping[str, Tensor]]:
        """Returns the mixed probabilities, the carry, and statistics for `gather`."""
        raise NotImplementedError


class Selector(Stage):
    """Scores and k -> experts [B*T, k] (-1 = none) and weights [B*T, k]."""

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def drop(self, experts: Tensor, scores: Scores, context: RoutingContext) -> Tensor:
        """The experts [B*T, k] without the assignments that find no place: -1. Losses count what was chosen."""
        return experts


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
