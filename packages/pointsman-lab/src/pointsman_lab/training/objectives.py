"""What a step minimises: the task's loss, or for THOR the two-pass consistency objective.

Shapes: B sequences, T tokens a sequence, V vocabulary, C classes or tokens to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.ops.linear import upcast
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.data.streams import IGNORE
from pointsman_lab.models.memory import Memory
from pointsman_lab.models.transformer_xl import TransformerXL


@dataclass(frozen=True)
class Outcome:
    """What an objective gives for one micro-batch.

    Attributes:
        loss: the scalar to differentiate.
        nats: mean negative log-likelihood a token, detached: what curves show.
        memory: for the next segment, if there is one.
    """

    loss: Tensor
    nats: Tensor
    memory: Memory | None


Loss = Callable[[Any, Tensor, Tensor, Memory | None, int], Outcome]
"""(model, inputs, targets, memory, memory_length) -> Outcome of one micro-batch."""

Predict = Callable[[Any, Tensor, Memory | None, int], tuple[Tensor, Memory | None]]
"""(model, inputs, memory, memory_length) -> logits [..., C], one row for each target, and the memory."""


@dataclass(frozen=True)
class Objective:
    """How a micro-batch becomes a loss.

    Attributes:
        name: "plain" or "consistency".
        passes: forward passes a micro-batch; the routers' losses are divided by it.
        run: the loss.
        weighted_by_targets: whether micro-batches count by their number of targets (those from 0 on), not alike.
    """

    name: str
    passes: int
    run: Loss
    weighted_by_targets: bool = False

    def shares(self, targets: Sequence[Tensor], ranks: Ranks = ALONE, *, even: bool = False) -> list[Tensor] | None:
        """The share of this rank's part of each micro-batch in the step's loss; None: micro-batches count alike.

        Args:
            targets: of this rank's rows.
            even: whether every row of every batch has equally many targets.
        """
        parts = len(targets)
        if ranks.count > 1:
            if even:
                return list(targets[0].new_full((parts,), 1 / (parts * ranks.count), dtype=torch.float64))
            own = torch.stack([targets_in(each) for each in targets]).double()
            (every,) = ranks.total(own)
            of_the_step = torch.full_like(every, 1 / parts)
            if self.weighted_by_targets:  # rounded as in one process
                of_the_step = (every / every.sum().clamp_min(1)).to(torch.get_default_dtype())
            return list(own / every.clamp_min(1) * of_the_step)
        if not self.weighted_by_targets or parts == 1:
            return None
        counts = torch.stack([(each >= 0).sum() for each in targets])
        return list(counts / counts.sum().clamp_min(1))


def targets_in(targets: Tensor) -> Tensor:
    """How many rows or places of targets count, a scalar: all shares of classes [B, C], and numbers from 0."""
    return targets.new_tensor(len(targets)) if targets.is_floating_point() else (targets >= 0).sum()


def with_a_target(targets: Tensor) -> Tensor:
    """The same, with one target where there is none, for a rank whose share of the loss is 0: a mean over no targets
    is no number, and 0 times it neither."""
    if targets.is_floating_point() or bool((targets >= 0).any()):
        return targets
    targets = targets.clone()
    targets.view(-1)[0] = 0
    return targets


def next_token_loss(
    model: TransformerXL, inputs: Tensor, targets: Tensor, memory: Memory | None, memory_length: int
) -> Outcome:
    """The language model's own loss: mean negative log-likelihood of targets [B, T] after inputs [B, T]."""
    output = model(inputs, targets, memory, memory_length=memory_length)
    return Outcome(output.loss, output.loss.detach(), output.memory)


def next_token_logits(
    model: TransformerXL, inputs: Tensor, memory: Memory | None, memory_length: int
) -> tuple[Tensor, Memory | None]:
    """Logits [B, T, V] of the tokens after inputs [B, T]."""
    output = model(inputs, None, memory, memory_length=memory_length)
    return output.logits, output.memory


def logits_alone(model: Any, inputs: Tensor, memory: Memory | None, memory_length: int) -> tuple[Tensor, None]:
    """Logits [..., C] of a model that has no memory."""
    return model(inputs), None


def consistency(alpha: float, predict: Predict = next_token_logits) -> Objective:
    """THOR's objective (Zuo et al. 2022, Eq. 3): (L1 + L2 + alpha C) / 2.

    L1 and L2 are the cross-entropies of two passes with their own random experts and dropout. C is the symmetric
    divergence of their predictions p and q, C = 1/2 mean over targets of sum_v (p - q)(log p - log q), through both
    passes. The whole is halved, so that learning rate and clipping mean the same as in a run with one pass; THOR's own
    code, for translation, sums over tokens and does not halve. Memory and reported loss are those of the first pass.
    """

    def run(model: Any, inputs: Tensor, targets: Tensor, memory: Memory | None, memory_length: int) -> Outcome:
        (first, kept), (second, _) = (predict(model, inputs, memory, memory_length) for _ in range(2))
        log_p, log_q = (torch.log_softmax(upcast(one), -1).reshape(-1, one.shape[-1]) for one in (first, second))
        if targets.is_floating_point():  # shares of classes [B, C]
            loss_p, loss_q = (-(targets * logs).sum(-1).mean() for logs in (log_p, log_q))
            real = torch.ones_like(targets[:, 0], dtype=torch.bool)
        else:
            targets = targets.reshape(-1)
            real = targets != IGNORE
            sums = (F.nll_loss(logs, targets, ignore_index=IGNORE, reduction="sum") for logs in (log_p, log_q))
            loss_p, loss_q = (each / real.sum().clamp_min(1) for each in sums)
        distance = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
        divergence = 0.5 * (distance * real).sum() / real.sum().clamp_min(1)
        return Outcome((loss_p + loss_q + alpha * divergence) / 2, loss_p.detach(), kept)

    return Objective("consistency", 2, run)


def smoothed(predict: Predict, amount: float) -> Loss:
    """Cross-entropy with label smoothing: every class gets `amount` / C of the target's probability.

    The reported loss is that without smoothing. Both are 0 where there is no target.
    """

    def loss(model: Any, inputs: Tensor, targets: Tensor, memory: Memory | None, memory_length: int) -> Outcome:
        logits, kept = predict(model, inputs, memory, memory_length)
        logits = upcast(logits).reshape(-1, logits.shape[-1])
        targets = targets if targets.is_floating_point() else targets.reshape(-1)
        smooth = F.cross_entropy(logits, targets, ignore_index=IGNORE, label_smoothing=amount)
        nats = F.cross_entropy(logits.detach(), targets, ignore_index=IGNORE) if amount else smooth.detach()
        some = (targets >= 0).any()
        return Outcome(torch.where(some, smooth, 0.0), torch.where(some, nats, 0.0), kept)

    return loss


class_loss = smoothed(logits_alone, 0.0)
"""Mean cross-entropy of the targets that are not -100: classes, or tokens."""


def objective_of(
    model: nn.Module,
    loss: Loss = next_token_loss,
    predict: Predict = next_token_logits,
    *,
    label_smoothing: float = 0.0,
    weighted_by_targets: bool = False,
) -> Objective:
    """The objective that the model's routers need: `loss` unless a router asks for the consistency of two passes."""
    wanted = set()
    for _, router in named_routers(model):
        if router.objective:
            router.objective_known = True
            wanted.add((router.objective, router.objective_weight))
    if not wanted:
        own = smoothed(predict, label_smoothing) if label_smoothing else loss
        return Objective("plain", 1, own, weighted_by_targets)
    if label_smoothing:
        raise RunError(f"label_smoothing={label_smoothing}: the consistency of two passes (thor) has none; set 0")
    if len(wanted) > 1:
        raise RunError(f"the routers of one model ask for different objectives: {sorted(map(str, wanted))}")
    name, weight = wanted.pop()
    if name != "consistency":
        raise RunError(f"unknown objective {name!r}: allowed is consistency")
    return replace(consistency(weight, predict), weighted_by_targets=weighted_by_targets)
