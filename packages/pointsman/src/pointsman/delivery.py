"""How a router's losses reach a training loop: collected for `add_losses`, or attached to the layer's output.

Collected is the default: their values are part of the loop's own loss, so whatever scales that scales them. Where a
loop's backward passes a layer whose losses nobody took, the layer warns, once.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pointsman._alive import Alive
from pointsman.ops.linear import autocast_enabled, in_function
from pointsman.ranks import ALONE, Ranks

Gather = Callable[[Mapping[str, Tensor]], None]

ATTACK = 100
"""So many backward passes without an optimizer's step may be those of an attack on the inputs, and are no mistake."""
_collecting: Alive[LossDelivery] = Alive()


class LossDelivery(nn.Module):
    """Delivers one layer's losses, and hands its statistics to the router in backward.

    Args:
        attach: whether autograd adds the losses to whatever the output enters, instead of keeping them for
            `add_losses`; in evaluation, too, wherever gradients are on.

    Attributes:
        how: "collect", "attach", or "leave", which does neither and counts nothing (`without_losses`).
        scale: [], float32: the factor of attached losses; no buffer, which a loader may leave without a value.
        last: the losses of the last forward by name, detached.
    """

    def __init__(self, attach: bool) -> None:
        super().__init__()
        self.how: Literal["collect", "attach", "leave"] = "attach" if attach else "collect"
        self.scale = torch.ones((), dtype=torch.float32, device="cpu")
        self.last: dict[str, Tensor] = {}
        self.knows_scale = False  # whether somebody has set it
        self._warned = False
        self._kept: list[ref[PendingLosses]] = []
        self._compiled: PendingLosses | None = None
        self._checkpointed = False  # whether the last training forward was the first one of a reentrant checkpoint
        self._lost = 0  # backward passes since the last `take` past losses that nobody had taken, nor had a gradient
        self._steps = 0  # optimizer steps with such losses
        self._patience = 0  # so many of these may be another model's, in a loop that took losses before
        _collecting.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": [], "_compiled": None}  # of this layer's graphs, not of a copy's

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _collecting.add(self)

    def deliver(
        self, output: Tensor, losses: Mapping[str, Tensor], statistics: Mapping[str, Tensor], gather: Gather
    ) -> Tensor:
        """The layer's output, whose backward delivers what the layer's forward left.

        Args:
            losses: weighted scalars by name.
            statistics: what `gather` gets in backward, once for each micro-batch, of a layer in training.
        """
        self.last = {name: value.detach() for name, value in losses.items()}
        kept = self._keep(losses) if losses and self.training and self.how == "collect" else None
        # collected ones enter, too, where the output's node, which holds them, has no other input with a gradient
        attached = list(losses.values()) if self.how == "attach" or (kept and not output.requires_grad) else []
        if attached and not kept and self.training and not torch.compiler.is_compiling():
            self._warn_of_scale(output)
        gathers = gather if self.training and statistics and self.how != "leave" else None
        live = torch.is_grad_enabled() and any(one.requires_grad for one in (output, *attached))
        if not (attached or gathers or kept) or not live:
            return output
        if attached and self.scale.device != output.device and not output.is_meta:
            self.scale = self.scale.to(output.device)
        delivered: Tensor = Deliver.apply(output, self.scale, gathers, statistics, kept, *attached)  # type: ignore[no-untyped-call]
        return delivered

    def _keep(self, losses: Mapping[str, Tensor]) -> PendingLosses | None:
        """Keeps the losses of a training forward for `take`, no longer than autograd keeps the forward."""
        if not torch.is_grad_enabled():
            self._checkpointed = not torch.compiler.is_compiling() and in_function()
            return None
        kept = PendingLosses(list(losses.values()))
        if torch.compiler.is_compiling():
            self._compiled = kept  # the graph's nodes are not Python's: the last forward's are kept
            return None
        if self._lost > ATTACK and not self._warned:
            self._warn_of_lost()
        for loss in kept.losses:
            if loss.requires_grad:
                loss.register_hook(self._reached)  # type: ignore[no-untyped-call]
        kept.home = self
        self._kept = [one for one in self._kept if one() is not None] + [ref(kept)]
        return kept

    def take(self) -> list[Tensor]:
        """The live losses of the training forwards since the last call, each once; ValueError if reentrant activation
        checkpointing has left none."""
        found = [kept for one in self._kept if (kept := one()) is not None and not kept.passed]
        if self._compiled is not None:
            found.append(self._compiled)
        if self.training and self._checkpointed and not found:
            raise ValueError("add_losses: activation checkpointing computed the losses without gradients: it needs "
                             "use_reentrant=False")  # fmt: skip
        self._kept, self._compiled, self._checkpointed, self._lost, self._steps = [], None, False, 0, 0
        self._patience = ATTACK if found else self._patience
        losses = [loss for kept in found for loss in kept.losses]
        for kept in found:
            kept.losses = ()
        return losses

    def _reached(self, _: Tensor) -> None:
        """A loss had a gradient: where nobody took it, the loop has added it itself."""
        self._lost = max(0, self._lost - 1)

    def step(self) -> None:
        """An optimizer's step: the second with losses that nobody took warns."""
        if not self._warned and (self._lost or (self._compiled is not None and self._compiled.passed)):
            self._steps += 1
            if self._steps > 1 + self._patience:
                self._warn_of_lost()

    def _warn_of_lost(self) -> None:
        for other in _collecting:
            other._warned = other._warned or bool(other._lost or other._compiled)  # of the same model: one warning
        warnings.warn(
            f"the routers' losses ({', '.join(self.last)}) reached no gradient: before backward write "
            "loss = pointsman.add_losses(loss, model), or build the layers with attach_losses=True",
            stacklevel=4,
        )

    def _warn_of_scale(self, output: Tensor) -> None:
        """Warns once where the main loss is scaled by somebody who does not know of the attached losses."""
        if self.knows_scale or self._warned:
            return
        kind = output.device.type
        if autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
            why = "autocast in float16 goes with a loss scaler, which does not scale"
        elif (state := sys.modules.get("accelerate.state")) and state.GradientState().num_steps > 1:
            why = "accelerate divides the loss by its accumulation steps, but not"
        else:
            return
        self._warned = True
        warnings.warn(
            f"{why} the losses that MoE layers attach to their outputs: leave attach_losses=True out and write "
            "loss = pointsman.add_losses(loss, model), or call pointsman.set_loss_scale",
            stacklevel=4,
        )


def _after_step(*_: Any) -> None:
    for one in _collecting:
        one.step()


register_optimizer_step_post_hook(_after_step)


class PendingLosses:
    """The live losses of one forward. The forward's graph holds them, the layer a weak reference."""

    home: LossDelivery | None = None
    node: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference to the `Deliver` of the forward

    def __init__(self, losses: Sequence[Tensor]) -> None:
        self.losses = losses

    @property
    def passed(self) -> bool:
        """Whether a backward pass has gone through the forward's graph and freed it (an attack's, for one). What the
        backend "eager" compiles does not know."""
        try:
            node = self.node() or (self.losses[0].grad_fn if self.losses else None)
            return getattr(node, "saved_tensors", ()) is None
        except RuntimeError:
            return True


class Deliver(torch.autograd.Function):
    """The identity on the output, whose backward also sends `scale` into each attached loss.

    Statistics are handed on in backward too: it runs once a micro-batch, also under activation checkpointing. What
    comes out is the output's memory under another name: of a view torch would refuse to change anything in place. A
    compiler takes that `detach` at its word where it meets one as the result of a graph, and says that the result has
    no gradient; it gets a copy, which it fuses with what reads it.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, scale: Tensor, gather: Gather | None, statistics: Mapping[str, Tensor],
        kept: PendingLosses | None, *losses: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.scale, ctx.gather, ctx.statistics, ctx.kept = scale, gather, statistics, kept
        ctx.dtypes = [loss.dtype for loss in losses]
        if kept is not None:
            kept.node = ref(ctx)
        return output.clone() if torch.compiler.is_compiling() else output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gather is not None:
            ctx.gather(ctx.statistics)
            ctx.gather = None  # a second pass through the graph is no second micro-batch
        if ctx.kept is not None and ctx.kept.losses and ctx.kept.home is not None:
            ctx.kept.home._lost += 1  # they were taken by nobody
        return (grads[0], None, None, None, None, *(None if ctx.kept else ctx.scale.to(dtype) for dtype in ctx.dtypes))


def deliveries(model: nn.Module) -> dict[str, LossDelivery]:
    """What delivers each layer's losses, by the layer's name."""
    return {
        name.rpartition("delivery")[0].rstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, LossDelivery)
    }


@contextmanager
def without_losses(model: nn.Module) -> Iterator[None]:
    """Inside, the routers' losses enter no gradient, their state counts no token, and nobody is told of it."""
    before = [(one, one.how) for one in deliveries(model).values()]
    try:
        for one, _ in before:
            one.how = "leave"
        yield
    finally:
        for one, how in before:
            one.how = how


def add_losses(loss: Tensor, model: nn.Module, ranks: Ranks = ALONE) -> Tensor:
    """The loss with the routers' own losses (balance, z-loss, …) added: for a training loop of your own.

        output = model(inputs)
        loss = pointsman.add_losses(criterion(output, targets), model)
        scaler.scale(loss / accumulation).backward()

    What scales the loss afterwards scales them alike. Each training forward's losses are added once, those of several
    forwards since the last call together; under `torch.compile` those of each layer's last run. Without gradients
    (`torch.no_grad`) and of a model in evaluation mode the loss comes back as it is.

    Args:
        loss: a scalar, before any scaling.
        model: the model whose forward made it, wrapped or not.
        ranks: the W ranks over which `parallel.parallelize` divided the model. The mean over ranks of their losses is
            then the loss of the batch, and a W-th of each is what comes back: gradients are added over ranks, and the
            routers' losses are parts of a sum already. Divide by W neither before nor after.

    Raises:
        ValueError: no scalar, no MoE layer, a layer that attaches its losses itself, activation checkpointing with
            use_reentrant=True, or other ranks than those of the model.
    """
    found = deliveries(model)
    balanced = any("pointsman_balancing" in part.__dict__ for part in model.modules())
    if not found and not balanced:
        raise ValueError(f"add_losses: {type(model).__name__} has no MoE layer in it; of transformers, call hf.balance")
    if (name := next((name for name, one in found.items() if one.how == "attach"), None)) is not None:
        raise ValueError(f"add_losses: layer {name!r} attaches its losses; build it without attach_losses=True")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        told = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}, no tensor"
        raise ValueError(f"add_losses: loss is {told}: give a scalar tensor, a mean for example")
    _check_ranks(model, ranks)
    if balanced and torch.is_grad_enabled():
        from pointsman.hf.balance import take  # transformers is imported only for its own models

        loss = sum(take(model), loss)
    loss = loss / ranks.count if ranks.count > 1 else loss
    if torch.is_grad_enabled():
        loss = sum((value.to(loss.device) for one in found.values() for value in one.take()), loss)
    return loss


def _check_ranks(model: nn.Module, ranks: Ranks) -> None:
    own = max((one.count for part in model.modules() if isinstance(one := getattr(part, "ranks", 0), Ranks)), default=1)
    if own > ranks.count:
        raise ValueError(f"add_losses: the model is divided over {own} ranks: write add_losses(loss, model, ranks), "
                         "which divides the loss; divide it neither before nor after")  # fmt: skip
    if own < ranks.count:
        raise ValueError(f"add_losses: ranks are {ranks.count}, but the model is not divided by parallelize: under "
                         "DDP, which averages gradients, leave ranks out")  # fmt: skip


def losses(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The last values of the routers' losses: layer name -> loss name -> weighted scalar, detached."""
    return {name: dict(one.last) for name, one in deliveries(model).items()}


def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Scales attached losses as the main loss is scaled (1 / accumulation steps, a loss scaler's factor).

    Raises:
        ValueError: a layer whose losses are collected (`add_losses` adds them), or a scale that is no number from 0.
    """
    value = torch.as_tensor(scale if isinstance(scale, Tensor | Real) else math.nan)
    if value.numel() != 1 or not (value.is_cuda or 0 <= value < math.inf):  # a GPU's is not waited for
        raise ValueError(f"set_loss_scale: scale={scale!r}: allowed are numbers from 0")
    found = deliveries(model)
    if (name := next((name for name, one in found.items() if one.how != "attach"), None)) is not None:
        raise ValueError(f"set_loss_scale: layer {name!r} attaches no losses: scale the loss that add_losses "
                         "returns, or build the layer with attach_losses=True")  # fmt: skip
    for one in found.values():
        one.scale.copy_(value.reshape(()))
        one.knows_scale = True
