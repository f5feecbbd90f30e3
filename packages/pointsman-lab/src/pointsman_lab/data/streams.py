"""Segments of a token array as a pure function of the step, so that resuming needs only the step number.

Shapes: batch size B, segment length T. Inputs and targets are int64 [B, T]; the target of a position is the next token.
A row continues from step to step, so that a model's memory of row b holds the preceding tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.data.vocabulary import IdArray

Ints = NDArray[np.signedinteger[Any]]
Device = torch.device | str

IGNORE = -100
"""The target of positions without one: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


def drawing(seed: int, key: int) -> np.random.Generator:
    """Random numbers that depend on the seed and the key alone."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, key]))


class BatchStream:
    """Training segments as in Transformer-XL: the array is cut into B contiguous columns.

    With n tokens a column has (n - 1) // B targets, and an epoch (n - 1) // B // T segments. The remaining fewer than T
    targets of a column are not used. The next epoch starts at the first segment again.

    Args:
        tokens: ids [n]. batch_size: B. segment_length: T. device: of the batches.

    Raises:
        RunError: fewer than B T + 1 tokens.
    """

    def __init__(self, tokens: IdArray, batch_size: int, segment_length: int, device: Device = "cpu") -> None:
        _check_positive(batch_size, segment_length)
        need = batch_size * segment_length + 1
        if len(tokens) < need:
            raise RunError(
                f"the training split has {len(tokens):,} tokens, and one step of {batch_size} x {segment_length} "
                f"needs {need:,}: give more text, a smaller batch or a shorter segment"
            )
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.steps_per_epoch = (len(tokens) - 1) // batch_size // segment_length
        self._tokens = tokens
        self._column = (len(tokens) - 1) // batch_size
        self._device = torch.device(device)

    @property
    def tokens_per_step(self) -> float:
        return self.batch_size * self.segment_length

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(input [B, T], target [B, T]) of a step, counted from 0 over all epochs."""
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        start = step % self.steps_per_epoch * self.segment_length
        begins = start + self._column * np.arange(self.batch_size)[:, None]
        rows = self._tokens[begins + np.arange(self.segment_length + 1)]
        both = _send(rows.astype(np.int64), self._device)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def is_epoch_start(self, step: int) -> bool:
        """Whether an epoch starts at this step: a model's memory must be reset."""
        return step % self.steps_per_epoch == 0


class EvalStream:
    """Evaluation segments: every token except the first is a target exactly once; with a budget, evenly spaced ones.

    The n - 1 targets are cut into contiguous rows of equal length (the first rows may be one longer), which are read in
    parallel in segments of T. The last segment may be shorter; a row without a last target has `IGNORE` there. There
    are B rows, or fewer if a row would be shorter than a segment. A memory is empty at the start of each row.

    With a `budget` below n - 1, only the first S = max(1, budget // (rows T)) segments of each row are read.

    Args:
        tokens: ids [n]. batch_size: B. segment_length: T. device: of the batches.
        budget: the number of targets, rounded down to whole segments (at least one per row); None for all.

    Raises:
        RunError: fewer than T + 1 tokens, or a budget below 1.
    """

    def __init__(
        self, tokens: IdArray, batch_size: int, segment_length: int, device: Device = "cpu", budget: int | None = None
    ) -> None:
        _check_positive(batch_size, segment_length)
        targets = len(tokens) - 1
        if targets < segment_length:
            raise RunError(
                f"the split to evaluate has {len(tokens):,} tokens, and one segment needs {segment_length + 1:,}"
            )
        if budget is not None and budget < 1:
            raise RunError(f"{budget} tokens to evaluate: at least 1 is needed")
        rows = min(batch_size, targets // segment_length)
        length, longer = divmod(targets, rows)
        row = np.arange(rows)
        lengths = length + (row < longer)
        if budget is not None and budget < targets:
            lengths = np.full(rows, max(1, budget // (rows * segment_length)) * segment_length)
        self._set_rows(tokens, row * length + np.minimum(row, longer), lengths, segment_length, device)

    @classmethod
    def of_rows(cls, rows: Sequence[IdArray], segment_length: int, device: Device = "cpu") -> EvalStream:
        """A stream with one row per text of at least two ids; all tokens except a text's first are targets."""
        _check_positive(len(rows), segment_length)
        stream = cls.__new__(cls)
        sizes = np.array([len(row) for row in rows])
        stream._set_rows(np.concatenate(list(rows)), np.cumsum(sizes) - sizes, sizes - 1, segment_length, device)
        return stream

    def _set_rows(self, tokens: IdArray, starts: Ints, lengths: Ints, segment_length: int, device: Device) -> None:
        """Row r has `lengths[r]` targets after the token at `starts[r]`."""
        self._tokens, self._starts, self._lengths, self._device = tokens, starts, lengths, torch.device(device)
        self.rows, self.segment_length, self.num_tokens = len(lengths), segment_length, int(lengths.sum())

    @property
    def texts(self) -> list[IdArray]:
        """The text of each row, including its first token, which is not a target."""
        rows = zip(self._starts, self._lengths, strict=True)
        return [self._tokens[start : start + length + 1] for start, length in rows]

    def __len__(self) -> int:
        """The number of segments per row."""
        return -(-int(self._lengths.max()) // self.segment_length)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """(input [rows, t], target [rows, t]) of a segment, t <= T."""
        if not 0 <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        begin = index * self.segment_length
        end = min(begin + self.segment_length, int(self._lengths.max()))
        place, last = np.arange(begin, end + 1), self._lengths[:, None]
        rows = self._tokens[self._starts[:, None] + np.minimum(place, last)].astype(np.int64)
        inputs, targets = np.where(place <= last, rows, 0)[:, :-1], np.where(place <= last, rows, IGNORE)[:, 1:]
        return _send(inputs.copy(), self._device), _send(targets.copy(), self._device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(index) for index in range(len(self)))

    def is_whole(self, index: int) -> bool:
        """Whether every position of a segment has a target: known without reading the device's copy."""
        end = min((index + 1) * self.segment_length, int(self._lengths.max()))
        return end <= int(self._lengths.min())

    @property
    def protocol(self) -> str:
        """The protocol line: which targets are evaluated."""
        total, segments = len(self._tokens) - 1, f"segments of {self.segment_length}"
        if self.num_tokens == total:
            return f"all {total:,} targets in {self.rows} rows, {segments}"
        stretches = f"{self.rows} evenly spaced stretches of {self.num_tokens // self.rows:,}"
        return f"{self.num_tokens:,} of {total:,} targets: {stretches}, {segments}"


def _check_positive(batch_size: int, segment_length: int) -> None:
    if batch_size < 1 or segment_length < 1:
        raise ValueError(f"batch size {batch_size} and segment length {segment_length} must be at least 1")


def _send(array: Ints, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
