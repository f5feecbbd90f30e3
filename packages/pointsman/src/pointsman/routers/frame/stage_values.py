"""What a stage of a router is, what stages hand to one another, and what its losses see.

Each stage is a small module. It declares its part of the router's contract with class attributes, and may change its
state in `step_end()`, once after each optimizer step, from the sums of what its forwards returned as statistics.

Shapes: B sequences, T tokens a sequence, N = B * T, E experts, k chosen experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from pointsman import auxiliary
from pointsman.ops.linear import HALF
from pointsman.ranks import ALONE, Ranks
from pointsman.routing import WEIGHTED_SUM, Combine, RouterState, RoutingContext

Tensors = Mapping[str, Tensor]


class Stage(nn.Module):
    """One stage of a router, with its part of the router's contract.

    Its buffers keep at least float32 when the model is cast to bf16 or half: they never train.

    Attributes:
        causal, batch_invariant: whether a token's routing depends on no later token and on no other sequence.
        stochastic: whether it draws random numbers.
        training_causal, training_batch_invariant, training_stochastic: the same in training; None: as in evaluation.
        needs: fields of `RoutingContext` that must be there.
        needs_step_end: whether training without `step_end` is a mistake.
        ranks: who shares the batch; set by `parallel.parallelize`.
        one_process: why several processes cannot train it; "" = they can.
        adds_up: whether what it counts may be added up over processes.
        sums: name -> sum of a statistic over the micro-batches since the last `step_end`.
    """

    causal: bool = True
    batch_invariant: bool = True
    stochastic: bool = False
    training_causal: bool | None = None
    training_batch_invariant: bool | None = None
    training_stochastic: bool | None = None
    needs: frozenset[str] = frozenset()
    needs_step_end: bool = False
    ranks: Ranks = ALONE
    one_process: str = ""
    adds_up: bool = True

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Tensor] = {}

    def gather(self, statistics: Tensors) -> None:
        """Adds the statistics of one micro-batch to `sums`: called in backward, once."""
        for name, value in statistics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()

    def step_end(self) -> None:
        """Called once after each optimizer step; `sums` then holds the step's, and is emptied afterwards."""

    def extra_repr(self) -> str:
        """The plain values that it was made with."""
        kept = {name: getattr(self, name, None) for name in inspect.signature(type(self).__init__).parameters}
        return ", ".join(f"{name}={value}" for name, value in kept.items() if isinstance(value, int | float | str))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and tensor.dtype in HALF:
            tensor = tensor.float()
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Stage:
        every = [module._buffers for module in self.modules()]
        kept = [(buffers, name, buffer) for buffers in every for name, buffer in buffers.items()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for buffers, name, before in kept:
            after = buffers[name]
            if before is not None and after is not None and after.dtype in HALF:
                buffers[name] = before.to(after.device)
        return self


@dataclass(frozen=True)
class Scored:
    """What a scorer may return in place of its logits.

    Attributes:
        logits: [B, T, E], at least float32.
        extra: tensors that the selector or a loss of the same router reads.
        statistics: summed over a step by `Stage.gather`, detached.
        above: tensors [B, T, ...] for the sparse layers above (`RoutingContext.below`), with gradient.
        carry: what the scorer needs of these tokens later (`Routing.carry`), beside what a mixer carries.
    """

    logits: Tensor
    extra: Tensors = field(default_factory=dict)
    statistics: Tensors = field(default_factory=dict)
    above: Tensors = field(default_factory=dict)
    carry: RouterState = field(default_factory=dict)

    @staticmethod
    def of(found: Tensor | Scored) -> Scored:
        """What a scorer returned, as a `Scored`."""
        return found if isinstance(found, Scored) else Scored(found)


@dataclass(frozen=True)
class Scores:
    """What the stages before it hand to the selector.

    Attributes:
        logits: [B, T, E], at least float32.
        probs: [B, T, E]; the combine weights come from these.
        choice: [B, T, E], what selection ranks by.
        extra: `Scored.extra`.
        unmixed: [B, T, E], the probabilities before mixing; None: `probs` itself.
    """

    logits: Tensor
    probs: Tensor
    choice: Tensor
    extra: Tensors = field(default_factory=dict)
    unmixed: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """What a selector may return in place of (experts, weights).

    Attributes:
        experts: [N, width] int64, -1 for none; the width is at most E and need not be k.
        weights: [N, width], 0 where experts is -1.
        how: how the layer makes its output of them; None: by the weighted sum. Read `combine`.
        statistics: summed over a step by `Stage.gather`, detached.
        asked: the selection before a step took virtual experts apart or dropped anything: what losses see.
    """

    experts: Tensor
    weights: Tensor
    how: Combine | None = None
    statistics: Tensors = field(default_factory=dict)
    asked: Selection | None = None

    @staticmethod
    def of(found: Any, tokens: int, spec: str) -> Selection:
        """What a selector returned, as a `Selection`; ValueError where it is none of so many tokens."""
        if not isinstance(found, Selection | tuple | list):
            raise ValueError(f"{spec}: the selector must return (experts, weights) or Selection(…)")
        one = found if isinstance(found, Selection) else Selection(*found)
        if (shape := one.experts.shape) != one.weights.shape or shape[:-1] != (tokens,):
            told = f"experts {[*shape]}, weights {[*one.weights.shape]}: not [{tokens}, width]"
            raise ValueError(f"{spec}: the selector's {told}")
        return one

    @property
    def combine(self) -> Combine:
        """How the layer makes its output of them."""
        return WEIGHTED_SUM if self.how is None else self.how

    def without(self, dropped: Tensor) -> Selection:
        """The same without the assignments where `dropped` [N, width] is true."""
        asked = self if self.asked is None else self.asked
        experts, weights = self.experts.masked_fill(dropped, -1), self.weights.masked_fill(dropped, 0)
        return replace(self, experts=experts, weights=weights, how=replace(self.combine, flat=None), asked=asked)


@dataclass(frozen=True)
class LossInput:
    """What a loss of a router sees, and a step. Every loss is a function of one of these and returns a scalar.

    Attributes:
        logits: [N, E]; unmixed: [N, E], the probabilities before mixing; probs: [N, E], after it.
        choice: [N, E], what selection ranked by; extra: `Scored.extra`.
        experts: [N, width], what was chosen, before any step drops anything; -1 for padding and for none.
        weights: [N, width], 0 where experts is -1.
        mask: [N] bool, True for a real token; None where all are real.
        batch, length: B and T; context: what the router was given.
        k, num_experts: that of now, and E without virtual experts.
        replayed: whether the experts were given.
        ranks: who shares the batch.
    """

    logits: Tensor
    unmixed: Tensor
    probs: Tensor
    choice: Tensor
    experts: Tensor
    weights: Tensor
    extra: Tensors
    mask: Tensor | None
    batch: int
    length: int
    context: RoutingContext
    k: int = 0
    num_experts: int = 0
    replayed: bool = False
    ranks: Ranks = ALONE

    def token_mean(self, values: Tensor) -> Tensor:
        """Mean over all real tokens of the batch of `values` [N, ...]."""
        return auxiliary.token_mean(values, self.mask, self.ranks)


class Loss(NamedTuple):
    """An auxiliary loss, `function` times `weight`. A function that reads parameters must be a bound method of their
    stage, so that a copy of the router reads the copies."""

    function: Callable[[LossInput], Tensor]
    weight: float

    @staticmethod
    def by_name(losses: dict[str, Loss], spec: str) -> dict[str, Loss]:
        """A router's own losses; ValueError for one that is no `Loss` or would replace that of every router."""
        for name, one in losses.items():
            if name in ("balance", "z_loss"):
                raise ValueError(f"router spec {spec!r}: a loss of its own is called {name!r}, as that of every router")
            if not isinstance(one, Loss) or not one.weight >= 0:
                raise ValueError(f"router spec {spec!r}: the loss {name!r} must be Loss(function, weight from 0)")
        return losses


def scalar(value: Tensor, spec: str, loss: str) -> Tensor:
    """What a loss of a router returned; ValueError unless it is a scalar."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        told = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{spec}: the loss {loss!r} must be a scalar tensor, got {told}")
    return value.reshape(())


Step = Callable[[Selection, LossInput], Selection]
"""What a router does with a selection after the choice: to drop, scale or combine it otherwise."""
