"""What a task of the exam is: data from (task, seed, step), the true routing, a measure, and the text of its page.

Shapes: S steps, B sequences, T tokens a sequence, N = B T tokens, D width, E experts, w true experts a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 20
"""Steps whose data is drawn together: one call instead of twenty."""

TEST = 64
"""Sequences to judge by."""

World = Mapping[str, Tensor]
"""What is fixed for a seed: centres, teachers, tables."""


class Batch(NamedTuple):
    """The tokens of a step; of S steps with a leading dimension.

    Attributes:
        inputs: [B, T, D], or what `Task.below` takes.
        targets: [B, T, D], or [B, T] int64 where the loss is a cross-entropy.
        experts: [B, T, w], the true experts; -1 is none.
        shares: [B, T, w], their weights.
        cluster: [B, T] int64, what the routing should tell apart.
        weight: [B, T], of each token in the loss; of text the cross-entropy of the true source.
        ids: [B, T] int64, the token ids.
    """

    inputs: Tensor
    targets: Tensor
    experts: Tensor
    shares: Tensor
    cluster: Tensor
    weight: Tensor
    ids: Tensor

    def at(self, step: int) -> Batch:
        return Batch(*(tensor[step] for tensor in self))


class Task:
    """One task. Class attributes are its sizes and its page.

    Attributes:
        name: on the command line.
        asks, formula, floor, why: its page: the question, the generator, the oracle's least loss, what it stands for.
        dim, hidden, experts, top_k: of the layer.
        lowers_k: whether a router with more experts a token than `top_k` is judged at a lower k.
        batch, length, steps: sequences a step, tokens a sequence, steps.
        causal: whether a router may only look at earlier tokens; where tokens have no order, it may look at all.
        vocabulary: how many token ids there are.
        cycles: how often the learning rate decays to 0.
        flat: the share of a cycle before it decays.
        known: whether the oracle's routing is the best one; otherwise it is a reference.
        judged_at: the k to judge at, where it is not the k of the training; the values' mean counts.
    """

    name: str
    asks: str
    formula: str
    floor: str
    why: str
    measure = "share of the targets' variance that is not explained"
    dim, hidden, experts, top_k = 32, 64, 8, 1
    lowers_k = False
    batch, length, steps = 8, 64, 400
    causal = False
    vocabulary = 64
    cycles, flat = 1, 0.0
    known = True
    judged_at: tuple[int, ...] = ()

    def generator(self, *of: object) -> torch.Generator:
        """A generator for (task, seed, what)."""
        digest = hashlib.sha256(repr((self.name, *of)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def world(self, seed: int) -> World:
        raise NotImplementedError

    def draw(self, world: World, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Batch:
        """S steps of data [S, B, T]; `progress` from 0 to 1 is how much of the training is over."""
        raise NotImplementedError

    def block(self, world: World, seed: int, step: int) -> Batch:
        """The data of the steps from `step`, a multiple of BLOCK, to the end of its block."""
        generator = self.generator(seed, "train", step)
        return self.draw(world, generator, (BLOCK, self.batch, self.length), step / self.steps)

    def test(self, world: World, seed: int, progress: float = 1.0) -> Batch:
        """Data to judge by, the same at each call; during the training a quarter of it."""
        count = TEST if progress == 1 else TEST // 4
        return self.draw(world, self.generator(seed, "test"), (1, count, self.length), progress).at(0)

    def below(self) -> nn.Module | None:
        """What stands between the inputs and the layer; trained."""
        return None

    def above(self) -> nn.Module | None:
        """What stands between the layer and the loss; trained."""
        return None

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """What training minimises: the mean weighted squared error."""
        return ((output - batch.targets).square().mean(-1) * batch.weight).mean()

    def distance(self, output: Tensor, other: Tensor, batch: Batch) -> Tensor:
        """Between two outputs, for THOR: the loss of one at the other; of classes half the symmetric KL divergence."""
        if output.shape == batch.targets.shape:
            return self.loss(output, batch._replace(targets=other))
        here, there = output.log_softmax(-1), other.log_softmax(-1)
        return ((here.exp() - there.exp()) * (here - there)).sum(-1).mean() / 2

    def value(self, output: Tensor, batch: Batch) -> float:
        """What a run is judged by; less is better."""
        weight = batch.weight[..., None].double()
        targets = batch.targets.double()
        mean = (weight * targets).sum((0, 1)) / weight.sum()
        error = (weight * (output.double() - targets).square()).sum()
        return float(error / (weight * (targets - mean).square()).sum())

    def judge(self, curve: Mapping[int, float]) -> float:
        """The primary measure of a run from its values by step."""
        return curve[max(curve)]


def directions(generator: torch.Generator, count: int, dim: int) -> Tensor:
    """[count, dim] random unit vectors."""
    return F.normalize(torch.randn(count, dim, generator=generator), dim=-1)


def linear_maps(generator: torch.Generator, count: int, dim: int) -> Tensor:
    """[count, dim, dim] random linear maps that keep the variance; an expert of 2 dim hidden units can be one."""
    maps: Tensor = torch.randn(count, dim, dim, generator=generator) / dim**0.5
    return maps


def choose(generator: torch.Generator, probabilities: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Random whole numbers of this shape."""
    count = int(torch.Size(shape).numel())
    return torch.multinomial(probabilities, count, replacement=True, generator=generator).view(shape)


def applied(maps: Tensor, which: Tensor, inputs: Tensor) -> Tensor:
    """inputs [..., D] through maps[which] [C, D, D], which [...]."""
    rows, which = inputs.reshape(-1, inputs.shape[-1]), which.reshape(-1)
    order = which.argsort(stable=True)
    parts = torch.split(rows[order], which.bincount(minlength=len(maps)).tolist())
    outputs = torch.cat([part @ one for part, one in zip(parts, maps, strict=True)])
    return torch.empty_like(rows).index_copy(0, order, outputs).view(inputs.shape)
