"""Packed blocks of multilingual text, and batches of them for masked language modelling, by step number.

A block is `<s> s1 </s> s2 </s> …` of whole sentences of one language, up to T pieces; the rest is padding (-1). Shapes:
B rows of a batch, T places of a block. Every draw depends on (seed, step, row) alone, so that all routers see the same
blocks with the same masks, and a resumed run goes on with them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.data.pieces import END, START, MultilingualText, Pieces, shares
from pointsman_lab.data.streams import IGNORE, drawing
from pointsman_lab.data.task_streams import PADDING

LEAST_VALIDATION = 64
_LANGUAGE, _ORDER, _MASK, _VALIDATION = range(4)

Blocks = NDArray[np.int32]


@dataclass(frozen=True)
class PackedText:
    """Blocks [n, T] of each language, for training and for validation.

    Attributes:
        cut: how many sentences were longer than a block and were cut.
        unknown: language -> share of `<unk>` among the pieces.
        name, note: of the text, for the protocol line.
    """

    pieces: Pieces
    train: Mapping[str, Blocks]
    valid: Mapping[str, Blocks]
    cut: int
    unknown: Mapping[str, float]
    name: str = ""
    note: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """64 bits in hexadecimal of the pieces and all blocks."""
        found = hashlib.sha256(self.pieces.digest.encode())
        for blocks in (self.train, self.valid):
            for language in sorted(blocks):
                found.update(f"{language} {blocks[language].shape}".encode())
                found.update(np.ascontiguousarray(blocks[language]).tobytes())
        return found.hexdigest()[:16]

    @property
    def sizes(self) -> dict[str, int]:
        """language -> pieces for training, `<s>` and `</s>` included."""
        return {language: int((blocks >= 0).sum()) for language, blocks in self.train.items()}

    @property
    def description(self) -> str:
        """The protocol line."""
        languages = ", ".join(
            f"{language} {len(blocks):,} + {len(self.valid[language]):,} blocks, unknown {self.unknown[language]:.2%}"
            for language, blocks in self.train.items()
        )
        note = f" ({self.note})" if self.note else ""
        origin = "in XLM-R's order" if self.pieces.published else "learned from it"
        return f"{self.name}{note}; {self.pieces.size:,} pieces {origin}; training + validation: {languages}"


def draws(seed: int, stream: int, number: int, rows: int, width: int) -> NDArray[np.float64]:
    """[rows, width] numbers in [0, 1) that depend on (seed, stream, number, row, column) alone."""
    return drawing(seed, (stream << 56) + number).random((rows, width))


def pack(sentences: Sequence[str], pieces: Pieces, length: int) -> tuple[Blocks, int]:
    """Whole sentences in blocks of at most `length` pieces, [n, length]; how many sentences had to be cut.

    A sentence that no block holds goes on in the next one; nothing is lost. The end of a document ends no block.
    """
    if length < 4:
        raise RunError(f"blocks of {length} pieces: at least 4 are needed")
    rows: list[list[int]] = []
    block = [START]
    cut = 0
    for sentence in filter(None, sentences):
        ids = pieces.encode(sentence).tolist()
        cut += len(ids) > length - 2
        for begin in range(0, len(ids), length - 2):
            part = ids[begin : begin + length - 2]
            if len(block) + len(part) + 1 > length:
                rows.append(block)
                block = [START]
            block += [*part, END]
    if len(block) > 1:
        rows.append(block)
    blocks = np.full((len(rows), length), PADDING, dtype=np.int32)
    for index, row in enumerate(rows):
        blocks[index, : len(row)] = row
    return blocks, cut


def pack_text(text: MultilingualText, pieces: Pieces, length: int) -> PackedText:
    """Packs every language; without a validation part, 1/64 of its blocks (at least 64), of lowest hash, is that."""
    train, valid, unknown, cut = {}, {}, {}, 0
    for language, sentences in text.train.items():
        blocks, more = pack(sentences, pieces, length)
        cut += more
        pieces_of_text = blocks[blocks > END]
        unknown[language] = float((pieces_of_text == 3).mean()) if pieces_of_text.size else 0.0
        if language in text.valid:
            valid[language], more = pack(text.valid[language], pieces, length)
            cut += more
        else:
            held = max(LEAST_VALIDATION, len(blocks) // 64)
            if len(blocks) < 2 * held:
                raise RunError(
                    f"{text.name}: {language!r} has {len(blocks)} blocks of {length} pieces, and {2 * held} are needed "
                    "to hold some out for validation: give more text, a valid part, or shorter blocks"
                )
            order = sorted(range(len(blocks)), key=lambda row: hashlib.sha256(blocks[row].tobytes()).digest())
            valid[language] = blocks[sorted(order[:held])]
            blocks = blocks[sorted(order[held:])]
        if not len(blocks) or not len(valid[language]):
            raise RunError(f"{text.name}: {language!r} has no text in its {'valid' if len(blocks) else 'train'} part")
        train[language] = blocks
    return PackedText(pieces, train, valid, cut, unknown, text.name, text.note)


@dataclass(frozen=True)
class Masking:
    """What is masked (Devlin et al. 2019).

    Attributes:
        rate: share of the real, non-special places that become targets.
        mask_share: of these, how many become `<mask>`.
        random_share: of these, how many become a random piece; the rest stays as it is.
    """

    rate: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1

    def __post_init__(self) -> None:
        if self.mask_share + self.random_share > 1:
            told = f"mask_token_share {self.mask_share} and random_share {self.random_share}"
            raise RunError(f"{told} are above 1 together")


def mask(
    blocks: Blocks, pieces: Pieces, masking: Masking, uniform: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and targets [B, T] of blocks [B, T]; targets are -100 where there are none.

    In each row floor(rate n + u) of its n real, non-special places are masked, u uniform in [0, 1).

    Args:
        uniform: [B, 1 + 3 T] numbers in [0, 1): the rounding, then for each place its order, its kind and its stand-in.
    """
    length = blocks.shape[1]
    rounding, order, kind, stand_in = np.split(uniform, [1, 1 + length, 1 + 2 * length], axis=1)
    inputs = blocks.astype(np.int64)
    real = (blocks >= 0) & ~pieces.special[np.maximum(blocks, 0)]
    count = np.floor(masking.rate * real.sum(1, keepdims=True) + rounding).astype(np.int64)
    rank = np.argsort(np.argsort(np.where(real, order, 2.0), axis=1), axis=1)
    masked = real & (rank < count)
    targets = np.where(masked, inputs, IGNORE)
    text = np.flatnonzero(~pieces.special)
    inputs = np.where(masked & (kind < masking.mask_share), pieces.mask_id, inputs)
    to_random = masked & (kind >= masking.mask_share) & (kind < masking.mask_share + masking.random_share)
    return np.where(to_random, text[(stand_in * len(text)).astype(np.int64)], inputs), targets


class MaskedStream:
    """Training batches: each row's language is drawn by its share, its block is the next of a permutation of them."""

    def __init__(
        self, text: PackedText, batch_size: int, *, masking: Masking | None = None, exponent: float = 0.7,
        seed: int = 0, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.batch_size, self.seed = batch_size, seed
        self.masking = masking or Masking()
        self._text = text
        self.languages = tuple(text.train)
        self.shares = shares(text.sizes, exponent)
        filled = sum(share * text.sizes[name] / text.train[name].size for name, share in self.shares.items())
        self.tokens_per_step = filled * batch_size * text.train[self.languages[0]].shape[1]
        self._device = device
        self._bounds = np.cumsum(list(self.shares.values()))[:-1]
        self._step, self._taken = 0, np.zeros(len(self.languages), dtype=np.int64)
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}

    def drawn(self, step: int) -> NDArray[np.int64]:
        """[B], the number of the language of each row of a step."""
        uniform = draws(self.seed, _LANGUAGE, step, self.batch_size, 1)[:, 0]
        return np.searchsorted(self._bounds, uniform, side="right")

    def rows(self, step: int) -> list[tuple[int, int]]:
        """(language, block) of each row of a step, counted from 0."""
        if step < self._step:
            self._step, self._taken = 0, np.zeros_like(self._taken)
        while self._step < step:
            self._taken += np.bincount(self.drawn(self._step), minlength=len(self.languages))
            self._step += 1
        taken = self._taken.copy()
        rows = []
        for language in self.drawn(step).tolist():
            rows.append((language, self._block(language, int(taken[language]))))
            taken[language] += 1
        return rows

    def _block(self, language: int, number: int) -> int:
        size = len(self._text.train[self.languages[language]])
        epoch, place = divmod(number, size)
        if (language, epoch) not in self._orders:
            key = (_ORDER << 56) + (language << 32) + epoch
            self._orders[language, epoch] = drawing(self.seed, key).permutation(size)
            self._orders.pop((language, epoch - 2), None)
        return int(self._orders[language, epoch][place])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs [B, T] (-1 = padding) and targets [B, T] (-100 = none) of a step."""
        blocks = np.stack([self._text.train[self.languages[one]][block] for one, block in self.rows(step)])
        uniform = draws(self.seed, _MASK, step, self.batch_size, 1 + 3 * blocks.shape[1])
        inputs, targets = mask(blocks, self._text.pieces, self.masking, uniform)
        return torch.from_numpy(inputs).to(self._device), torch.from_numpy(targets).to(self._device)

    def is_epoch_start(self, step: int) -> bool:
        """An encoder has no memory to forget."""
        return False


def validation_batch(
    text: PackedText, language: str, numbers: Sequence[int], masking: Masking | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets [b, T] of validation blocks by number; masks depend on the language and the number alone."""
    blocks = text.valid[language][list(numbers)]
    tag = int.from_bytes(hashlib.sha256(language.encode()).digest()[:3], "big")
    width = 1 + 3 * blocks.shape[1]
    uniform = np.concatenate([draws(0, _VALIDATION, (tag << 32) + number, 1, width) for number in numbers])
    inputs, targets = mask(blocks, text.pieces, masking or Masking(), uniform)
    return torch.from_numpy(inputs), torch.from_numpy(targets)
