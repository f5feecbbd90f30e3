"""Batches of labelled texts: encoded, truncated, padded on the right, and bucketed by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman_lab.data.vocabulary import IdArray

PADDING = -1
BUCKET = 50  # batches in a bucket


@dataclass(frozen=True)
class Encoded:
    """Examples as token ids.

    Attributes:
        rows: ids of each text [tokens], with its end mark.
        labels: [n] int64.
        truncated: the number of truncated texts.
        unknown: the number of tokens that are not in the vocabulary.
    """

    rows: tuple[IdArray, ...]
    labels: NDArray[np.int64]
    truncated: int
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: NDArray[np.int64]) -> Encoded:
        rows = tuple(self.rows[place] for place in places)
        return Encoded(rows, self.labels[places], self.truncated, self.unknown)


def drawn_within(sizes: Sequence[int] | NDArray[Any], most: int) -> NDArray[np.int64]:
    """Indices of texts of these sizes with at most `most` tokens in total, at least one text.

    The texts are drawn with a fixed seed, so that every model is evaluated on the same ones.
    """
    order = np.random.default_rng(0).permutation(len(sizes))
    total = np.cumsum(np.asarray(sizes)[order])
    return np.sort(order[: max(1, int(np.searchsorted(total, most, side="right")))])


@dataclass(frozen=True)
class TaskBatch:
    """B texts of up to T tokens.

    Attributes:
        tokens: [B, T] int64, padded on the right with -1.
        labels: [B] int64.
        places: index of each text in the examples.
        num_tokens: real tokens.
    """

    tokens: Tensor
    labels: Tensor
    places: tuple[int, ...]
    num_tokens: int


def padded(rows: Sequence[Any]) -> Tensor:
    """Rows of ids as [B, longest], padded with -1."""
    made = np.full((len(rows), max(map(len, rows))), PADDING, dtype=np.int64)
    for place, row in enumerate(rows):
        made[place, : len(row)] = row
    return torch.from_numpy(made)


def collate(encoded: Encoded, places: NDArray[np.int64], device: torch.device) -> TaskBatch:
    """The texts with these indices as one padded batch."""
    rows = [encoded.rows[place] for place in places]
    labels = torch.from_numpy(encoded.labels[places]).to(device)
    return TaskBatch(padded(rows).to(device), labels, tuple(map(int, places)), sum(map(len, rows)))


class TaskStream:
    """Training batches: every example in every epoch, bucketed by length.

    Each epoch is shuffled by (seed, epoch), cut into buckets of 50 batches, sorted by length within a bucket, cut into
    batches, and the batches are shuffled. The last batch of an epoch is completed with the epoch's first examples.
    """

    def __init__(self, encoded: Encoded, batch_size: int, seed: int, device: torch.device | str = "cpu") -> None:
        self.encoded = encoded
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = -(-len(encoded) // batch_size)
        self._device = torch.device(device)
        self._lengths = np.array([len(row) for row in encoded.rows])
        self._epoch: tuple[int, list[NDArray[np.int64]]] = (-1, [])

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of a batch, on average."""
        return float(self._lengths.mean()) * self.batch_size

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens [B, T], labels [B]) of a step, counted from 0; a pure function."""
        found = collate(self.encoded, self.places(step), self._device)
        return found.tokens, found.labels

    def places(self, step: int) -> NDArray[np.int64]:
        """Indices of the examples in the batch of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._batches(epoch))
        return self._epoch[1][place]

    def is_epoch_start(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def _order(self, draw: np.random.Generator) -> NDArray[np.int64]:
        """The examples of an epoch."""
        return draw.permutation(len(self.encoded))

    def _batches(self, epoch: int) -> list[NDArray[np.int64]]:
        draw = np.random.default_rng([self.seed, epoch])
        order = self._order(draw)
        order = np.resize(order, self.steps_per_epoch * self.batch_size)
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(order), BUCKET * self.batch_size):
            group = order[start : start + BUCKET * self.batch_size]
            group = group[np.argsort(self._lengths[group], kind="stable")]
            batches += [group[at : at + self.batch_size] for at in range(0, len(group), self.batch_size)]
        return [batches[place] for place in draw.permutation(len(batches))]


def eval_batches(encoded: Encoded, batch_size: int, device: torch.device | str = "cpu") -> Iterator[TaskBatch]:
    """All examples once, in order of length."""
    lengths = np.array([len(row) for row in encoded.rows])
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield collate(encoded, order[start : start + batch_size], torch.device(device))
