"""The word attack: chosen words become "AAA"; deterministic, at an exact rate.

It works on token ids in the run's vocabulary. At byte and character level each symbol is encoded on its own, so that
replacing ids equals replacing text before encoding. At word level a word is a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError
from pointsman_lab.data.vocabulary import END_OF_LINE, UNKNOWN, IdArray, Vocabulary

RATES = (0.01, 0.025, 0.05, 0.1)
"""Rates of a sweep. The papers give no rate; 2.5 % fits their perplexities best (our inference)."""


@dataclass(frozen=True)
class Attack:
    """An attack on a text: each chosen word becomes `word`.

    Attributes:
        rate: share of words, rounded to a whole number over all texts.
        seed: of the choice. A higher rate attacks a superset of the words of a lower rate.
        word: the replacement.
    """

    rate: float
    seed: int = 0
    word: str = "AAA"

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not (math.isfinite(self.rate) and 0 <= self.rate <= 1):
            raise RunError(f"attack rate {self.rate}: allowed are numbers from 0 to 1")
        if not self.word or self.word.split() != [self.word]:
            raise RunError(f"attack word {self.word!r}: allowed is one word without white space")

    def to_dict(self) -> dict[str, Any]:
        """The attack's entry in results."""
        return {"kind": "word", **asdict(self)}

    def __str__(self) -> str:
        return f"{100 * self.rate:.3g} % of the words become {self.word}"


@dataclass(frozen=True)
class Attacked:
    """Attacked texts.

    Attributes:
        rows: ids of each text [tokens].
        sources: for each text [tokens] int64, the position of each token in the clean text; -1 of what the attack put.
        chosen, candidates: the number of attacked words, and of all words.
    """

    rows: tuple[IdArray, ...]
    sources: tuple[NDArray[np.int64], ...]
    chosen: int
    candidates: int


def attack_texts(rows: Sequence[IdArray], vocabulary: Vocabulary, attack: Attack) -> Attacked:
    """Attacks texts given as ids: exactly round(rate x words) words over all texts."""
    if vocabulary.level == "subword":
        raise RunError("attacks need a run on bytes, characters or words: this one's tokens are subwords")
    spans = [_words(row, vocabulary) for row in rows]
    total = sum(map(len, spans))
    chosen = np.zeros(total, dtype=np.bool_)
    chosen[np.random.default_rng([attack.seed, 0]).permutation(total)[: round(attack.rate * total)]] = True
    new = vocabulary.encode_compact(attack.word)[0]
    picked = np.split(chosen, np.cumsum([len(each) for each in spans])[:-1])
    made = [_swapped(row, each[own], new) for row, each, own in zip(rows, spans, picked, strict=True)]
    return Attacked(tuple(row for row, _ in made), tuple(source for _, source in made), int(chosen.sum()), total)


def _words(row: IdArray, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """[n, 2]: start and end (exclusive) of each word."""
    if vocabulary.level == "word":
        end = -1 if vocabulary.end_of_line_id is None else vocabulary.end_of_line_id
        places = np.flatnonzero(row != end)
        return np.stack([places, places + 1], 1)
    spaces = np.array([_character(symbol).isspace() for symbol in vocabulary.symbols])
    inside = np.concatenate([[False], ~spaces[row], [False]]).astype(np.int8)
    edges = np.diff(inside)
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], 1)


def _swapped(row: IdArray, spans: NDArray[np.int64], new: IdArray) -> tuple[IdArray, NDArray[np.int64]]:
    """The text with these spans replaced, and the source of each token."""
    places = np.arange(len(row), dtype=np.int64)
    put = np.full(len(new), -1, dtype=np.int64)
    pieces, sources, done = [], [], 0
    for start, stop in spans.tolist():
        pieces += [row[done:start], new]
        sources += [places[done:start], put]
        done = stop
    return np.concatenate([*pieces, row[done:]]).astype(row.dtype), np.concatenate([*sources, places[done:]])


def _character(symbol: int | str) -> str:
    """Of an id at byte or character level."""
    if symbol in (UNKNOWN, END_OF_LINE):
        return "?"
    return (chr(symbol) if symbol < 128 else "?") if isinstance(symbol, int) else str(symbol)
