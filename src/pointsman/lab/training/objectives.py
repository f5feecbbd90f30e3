"""What a step minimises: the model's loss, or for THOR the two-pass consistency objective.

Shapes: B sequences, T tokens a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.lab.data.streams import IGNORE
from pointsman.lab.models.transformer_xl import Memory, TransformerXL
from pointsman.ops.linear import upcast


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


@dataclass(frozen=True)
class Objective:
    """How a micro-batch becomes a loss.

    Attributes:
        name: "plain" or "consistency".
        passes: forward passes a micro-batch; the routers' attached losses are divided by it.
    """

    name: str
    passes: int
    run: Callable[[Any, Tensor, Tensor, Memory | None, int], Outcome]


def plain(model: TransformerXL, inputs: Tensor, targets: Tensor, memory: Memory | None, memory_length: int) -> Outcome:
    """The model's own loss: mean negative log-likelihood of targets [B, T] after inputs [B, T]."""
    output = model(inputs, targets, memory, memory_length=memory_length)
    return Outcome(output.loss, output.loss.detach(), output.memory)


def consistency(alpha: float) -> Objective:
    """THOR's objective (Zuo et al. 2022, Eq. 3) for language models: (L1 + L2 + alpha C) / 2.

    L1 and L2 are the losses of two passes with their own random experts and dropout, and C is the symmetric divergence
    of their predictions p and q, C = 1/2 mean over tokens of sum_v (p - q)(log p - log q), through both passes. The
    whole is halved, so that learning rate and clipping mean the same as in a run with one pass; THOR's own code, for
    translation, sums over tokens and does not halve. Memory and reported loss are those of the first pass.
    """

    def run(
        model: TransformerXL, inputs: Tensor, targets: Tensor, memory: Memory | None, memory_length: int
    ) -> Outcome:
        first = model(inputs, None, memory, memory_length=memory_length)
        second = model(inputs, None, memory, memory_length=memory_length)
        log_p, log_q = (torch.log_softmax(upcast(output.logits), -1) for output in (first, second))
        loss_p, loss_q = (
            F.nll_loss(logs.flatten(0, 1), targets.flatten(), ignore_index=IGNORE) for logs in (log_p, log_q)
        )
        real = targets != IGNORE
        distance = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
        divergence = 0.5 * (distance * real).sum() / real.sum().clamp_min(1)
        return Outcome((loss_p + loss_q + alpha * divergence) / 2, loss_p.detach(), first.memory)

    return Objective("consistency", 2, run)


PLAIN = Objective("plain", 1, plain)


def objective_of(model: TransformerXL) -> Objective:
    """The objective that the model's routers need: the plain one unless a router asks for another.

    Raises:
        RunError: routers that ask for different ones, or for one that does not exist.
    """
    wanted = {(router.objective, router.objective_weight) for _, router in named_routers(model) if router.objective}
    if not wanted:
        return PLAIN
    if len(wanted) > 1:
        raise RunError(f"the routers of one model ask for different objectives: {sorted(map(str, wanted))}")
    name, weight = wanted.pop()
    if name != "consistency":
        raise RunError(f"unknown objective {name!r}: allowed is consistency")
    return consistency(weight)
