"""Vocabularies: token ids at byte or word level.

- **byte**: lossless on its corpus. Ids are the bytes of the training split in ascending order, then the bytes that
  occur only in other splits (none in enwik8, so V = 205 there). There is no `<unk>`: in other text, a byte that does
  not occur in the corpus becomes a space if it is white space, else `?`, or id 0 where the corpus has none, so that
  lengths do not change.
- **word**: split at white space, case-sensitive, `<eos>` for each newline, `<unk>` for a word that does not occur in
  the training split; ids in order of decreasing frequency, then alphabetically.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError
from pointsman_lab._files import parse_json
from pointsman_lab.data.catalog import Level

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
LEVELS = ("byte", "word")
_WHITE_SPACE = b" \t\n\r\v\f"

IdArray = NDArray[np.integer[Any]]


class Symbols(ABC):
    """What ids or labels stand for: a `Vocabulary`, or what another task has. They are equal by kind and digest."""

    level: Any

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ids."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of vocabulary.json."""

    @cached_property
    def digest(self) -> str:
        """A 64-bit hash (hexadecimal)."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(level={self.level!r}, size={self.size})"


class Vocabulary(Symbols):
    """The mapping between token ids and symbols.

    Args:
        level: "byte" or "word".
        symbols: of id 0, 1, …: byte values at byte level, else strings.

    Raises:
        ValueError: an unknown level, a repeated symbol, no symbols, or symbols of the wrong type.
    """

    def __init__(self, level: Level, symbols: Sequence[int] | Sequence[str]) -> None:
        if level not in LEVELS:
            raise ValueError(f"vocabulary level is {level!r}; allowed: {', '.join(LEVELS)}")
        kind = int if level == "byte" else str
        if not symbols or len(set(symbols)) != len(symbols) or not all(isinstance(symbol, kind) for symbol in symbols):
            raise ValueError(f"a {level}-level vocabulary needs distinct symbols of type {kind.__name__}")
        if level == "byte" and not all(0 <= int(symbol) < 256 for symbol in symbols):
            raise ValueError("a byte-level vocabulary holds values from 0 to 255")
        if level != "byte" and UNKNOWN not in symbols:
            raise ValueError(f"a {level}-level vocabulary needs the symbol {UNKNOWN}")
        self.level: Level = level
        self.symbols: tuple[int | str, ...] = tuple(symbols)

    @classmethod
    def of_bytes(cls, training: Iterable[int], others: Iterable[int] = ()) -> Vocabulary:
        """Bytes of the training split, then those that occur only in other splits."""
        first = sorted(set(training))
        return cls("byte", [*first, *sorted(set(others) - set(first))])

    @classmethod
    def of_words(cls, counts: Mapping[str, int]) -> Vocabulary:
        """The words by decreasing count; `<unk>` is last if it does not occur in the text."""
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls("word", ordered if UNKNOWN in counts else [*ordered, UNKNOWN])

    @property
    def size(self) -> int:
        """V, the number of ids."""
        return len(self.symbols)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest integer type that holds every id."""
        return np.dtype(np.uint8 if self.size <= 1 << 8 else np.uint16 if self.size <= 1 << 16 else np.int32)

    @property
    def unknown_id(self) -> int | None:
        """The id of `<unk>`; None at byte level, which has none."""
        return None if self.level == "byte" else self._index[UNKNOWN]

    @property
    def end_id(self) -> int | None:
        """The id that ends a text; None: none does."""
        return None

    @property
    def end_of_line_id(self) -> int | None:
        """The id of `<eos>` in a word-level vocabulary that keeps newlines, else None."""
        return self._index.get(END_OF_LINE) if self.level == "word" else None

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Ids [tokens] of any text: a string, or its bytes in UTF-8.

        At word level each newline becomes `<eos>`; none is added at the end.

        Raises:
            RunError: bytes that are not UTF-8, at word level.
        """
        return self.encode_compact(text)[0].astype(np.int64)

    def encode_compact(self, text: str | bytes) -> tuple[IdArray, int]:
        """Ids [tokens] in `dtype`, and the number of unknown tokens (an `<unk>` in the text itself does not count)."""
        if self.level == "byte":
            raw = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
            values = np.frombuffer(raw, dtype=np.uint8)
            return self._byte_ids[values], int(np.count_nonzero(self._byte_unknown[values]))
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise RunError(f"byte {error.start} of the text is not UTF-8: a word-level run needs it") from None
        words = split_words(text, keep_newlines=END_OF_LINE in self._index)
        found = np.fromiter(map(self._index.get, words, repeat(-1)), dtype=np.int32, count=len(words))
        unknown = found < 0
        ids = np.where(unknown, self._index[UNKNOWN], found).astype(self.dtype)
        return ids, int(np.count_nonzero(unknown))

    def decode_bytes(self, ids: Iterable[int] | NDArray[Any]) -> bytes:
        """The bytes of the ids: at byte level exactly the encoded text.

        Raises:
            ValueError: an id outside 0 … V - 1.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).reshape(-1)
        if array.size and (array.min() < 0 or array.max() >= self.size):
            raise ValueError(f"ids are from {array.min()} to {array.max()}; the vocabulary has 0 to {self.size - 1}")
        if self.level == "byte":
            return np.array(self.symbols, dtype=np.uint8)[array].tobytes()
        words = ["\n" if self.symbols[index] == END_OF_LINE else str(self.symbols[index]) for index in array]
        text = " ".join(words).replace(" \n", "\n").replace("\n ", "\n")
        return text.encode("utf-8", errors="surrogatepass")

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        """The text of the ids; bytes that are not UTF-8, as of a truncated character, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads."""
        return json.dumps({"level": self.level, "symbols": self.symbols}, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """The vocabulary from the text of `to_json` (`subwords.read_vocabulary` reads those of subwords, too).

        Raises:
            RunError: the text is not a vocabulary.
        """
        try:
            data = parse_json(text)
            return cls(data["level"], data["symbols"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"not a vocabulary: {error}") from None

    @cached_property
    def _index(self) -> dict[str, int]:
        return {str(symbol): index for index, symbol in enumerate(self.symbols)}

    @cached_property
    def _byte_unknown(self) -> NDArray[np.bool_]:
        unknown = np.ones(256, dtype=np.bool_)
        unknown[[int(symbol) for symbol in self.symbols]] = False
        return unknown

    @cached_property
    def _byte_ids(self) -> IdArray:
        ids = {int(symbol): index for index, symbol in enumerate(self.symbols)}
        mark = ids.get(ord("?"), 0)
        space = ids.get(ord(" "), mark)
        known = [ids.get(value, space if value in _WHITE_SPACE else mark) for value in range(256)]
        return np.array(known, dtype=self.dtype)


def split_words(text: str, *, keep_newlines: bool) -> list[str]:
    """Words, split at white space; if newlines are kept, each one becomes the word `<eos>`."""
    return (text.replace("\n", f" {END_OF_LINE} ") if keep_newlines else text).split()
