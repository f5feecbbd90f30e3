"""Text attacks: words replaced by "AAA", and character noise; deterministic, at an exact rate.

Attacks work on token ids in the run's vocabulary. At byte and character level each symbol is encoded on its own, so
that replacing ids equals replacing text before encoding. At word level a word is a token, and letters are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.data.vocabulary import END_OF_LINE, UNKNOWN, IdArray, Vocabulary

Kind = Literal["word", "char"]
RATES = (0.01, 0.025, 0.05, 0.1)
"""Rates of a sweep. The papers give no rate; 2.5 % fits their perplexities best (our inference)."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Attack:
    """An attack on a text.

    Attributes:
        kind: "word": each chosen word becomes `word`; "char": each chosen letter becomes another lower-case letter.
        rate: share of words or letters, rounded to a whole number over all texts.
        seed: of the choice. A higher rate attacks a superset of the words or letters of a lower rate.
        word: the replacement.
    """

    kind: Kind
    rate: float
    seed: int = 0
    word: str = "AAA"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise RunError(f"attack {self.kind!r}: {did_you_mean(self.kind, get_args(Kind))}")
        if isinstance(self.rate, bool) or not (math.isfinite(self.rate) and 0 <= self.rate <= 1):
            raise RunError(f"attack rate {self.rate}: allowed are numbers from 0 to 1")
        if not self.word or self.word.split() != [self.word]:
            raise RunError(f"attack word {self.word!r}: allowed is one word without white space")

    def to_dict(self) -> dict[str, Any]:
        """The attack's entry in results."""
        return asdict(self)

    def __str__(self) -> str:
        share = f"{100 * self.rate:.3g} %"
        return f"{share} of the words become {self.word}" if self.kind == "word" else f"{share} of the letters change"


@dataclass(frozen=True)
class Attacked:
    """Attacked texts.

    Attributes:
        rows: ids of each text [tokens].
        sources: for each text [tokens] int64, the position of each token in the clean text; -1 of what the attack put.
        chosen, candidates: the number of attacked words or letters, and of all words or letters.
    """

    rows: tuple[IdArray, ...]
    sources: tuple[NDArray[np.int64], ...]
    chosen: int
    candidates: int


def attack_texts(rows: Sequence[IdArray], vocabulary: Vocabulary, attack: Attack) -> Attacked:
    """Attacks texts given as ids: exactly round(rate x candidates) words or letters over all texts.

    Raises:
        RunError: character noise with a vocabulary of fewer than two lower-case letters.
    """
    if vocabulary.level == "subword":
        raise RunError("attacks need a run on bytes, characters or words: this one's tokens are subwords")
    if vocabulary.level == "word":
        return _attack_word_ids(rows, vocabulary, attack)
    spans = [_spans(row, vocabulary, attack.kind) for row in rows]
    picked = _pick([len(each) for each in spans], attack)
    if attack.kind == "char":
        return _substituted(rows, spans, picked, vocabulary, attack)
    new = vocabulary.encode_compact(attack.word)[0]
    made = [_swapped(row, each[chosen], new) for row, each, chosen in zip(rows, spans, picked, strict=True)]
    return _gathered(made, picked)


def _spans(row: IdArray, vocabulary: Vocabulary, kind: Kind) -> NDArray[np.int64]:
    """[n, 2]: start and end (exclusive) of each word, or of each letter."""
    if kind == "char":
        places = np.flatnonzero(_letters(vocabulary)[row])
        return np.stack([places, places + 1], 1)
    inside = np.concatenate([[False], ~_spaces(vocabulary)[row], [False]]).astype(np.int8)
    edges = np.diff(inside)
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], 1)


def _pick(counts: Sequence[int], attack: Attack) -> list[Mask]:
    """The chosen candidates of each text: the start of one permutation of all candidates."""
    total = sum(counts)
    chosen = np.zeros(total, dtype=np.bool_)
    order = np.random.default_rng([attack.seed, get_args(Kind).index(attack.kind)]).permutation(total)
    chosen[order[: round(attack.rate * total)]] = True
    return np.split(chosen, np.cumsum(counts)[:-1])


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


def _substituted(
    rows: Sequence[IdArray], spans: Sequence[NDArray[np.int64]], picked: Sequence[Mask], vocabulary: Vocabulary,
    attack: Attack,
) -> Attacked:  # fmt: skip
    known = np.array(sorted({int(id_) for letter in LETTERS if (id_ := _symbol_id(vocabulary, letter)) is not None}))
    if len(known) < 2:
        raise RunError("character noise needs a vocabulary with at least two lower-case letters")
    draw = np.random.default_rng([attack.seed, len(get_args(Kind))])
    made = []
    for row, each, chosen in zip(rows, spans, picked, strict=True):
        # one draw for every candidate, so that a higher rate keeps the letters of a lower one
        other = known[draw.integers(len(known), size=len(each))]
        next_one = known[(np.searchsorted(known, other) + 1) % len(known)]
        places = each[chosen][:, 0]
        new = np.where(other == row[each[:, 0]], next_one, other)[chosen]
        changed, source = row.copy(), np.arange(len(row), dtype=np.int64)
        changed[places], source[places] = new, -1
        made.append((changed, source))
    return _gathered(made, picked)


def _attack_word_ids(rows: Sequence[IdArray], vocabulary: Vocabulary, attack: Attack) -> Attacked:
    if attack.kind == "char":
        raise RunError("attack char: changed letters make words unknown to a run on words; allowed here is word")
    end = -1 if vocabulary.end_of_line_id is None else vocabulary.end_of_line_id
    candidates: list[NDArray[Any]] = [np.flatnonzero(row != end) for row in rows]
    new = vocabulary.encode_compact(attack.word)[0][0]
    made = []
    picked = _pick([len(each) for each in candidates], attack)
    for row, each, chosen in zip(rows, candidates, picked, strict=True):
        changed, source = row.copy(), np.arange(len(row), dtype=np.int64)
        changed[each[chosen]], source[each[chosen]] = new, -1
        made.append((changed, source))
    return _gathered(made, picked)


def _gathered(made: Sequence[tuple[IdArray, NDArray[np.int64]]], picked: Sequence[Mask]) -> Attacked:
    return Attacked(
        tuple(row for row, _ in made),
        tuple(source for _, source in made),
        sum(int(chosen.sum()) for chosen in picked),
        sum(len(chosen) for chosen in picked),
    )


def _spaces(vocabulary: Vocabulary) -> Mask:
    """[V] bool: white space, at byte or character level."""
    return np.array([str(_character(symbol)).isspace() for symbol in vocabulary.symbols])


def _letters(vocabulary: Vocabulary) -> Mask:
    """[V] bool: letters, at byte level those of ASCII, at character level all."""
    shown = [_character(symbol) for symbol in vocabulary.symbols]
    return np.array([one.isalpha() and (one.isascii() or vocabulary.level == "char") for one in shown])


def _character(symbol: int | str) -> str:
    if symbol in (UNKNOWN, END_OF_LINE):
        return "?"
    return (chr(symbol) if symbol < 128 else "?") if isinstance(symbol, int) else symbol


def _symbol_id(vocabulary: Vocabulary, letter: str) -> int | None:
    symbol = ord(letter) if vocabulary.level == "byte" else letter
    return vocabulary.symbols.index(symbol) if symbol in vocabulary.symbols else None
