"""Pieces of words: a vocabulary trained by SentencePiece on the text at hand (Kudo 2018, unigram model).

Ids are in XLM-R's order: 0 `<s>`, 1 `<pad>`, 2 `</s>`, 3 `<unk>`, then the pieces; `<mask>` is one of them. XLM-R's own
`sentencepiece.bpe.model` has `<unk>`, `<s>`, `</s>` first and neither `<pad>` nor `<mask>`: its pieces are one further
here, and `<mask>` is the last id, as in fairseq (250,002 in all). Training is single-threaded: the same text always
gives the same pieces, which several threads do not promise.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError, needing
from pointsman_lab._files import parse_json, read_ordinary
from pointsman_lab.data.streams import drawing
from pointsman_lab.data.vocabulary import Symbols

START, PAD, END, UNKNOWN = 0, 1, 2, 3
MASK = "<mask>"
_TRAINING_CHARACTERS = 2_000_000
_PUBLISHED = (1, -1, 2, 0)
"""Where XLM-R's model has `<s>`, `<pad>`, `</s>`, `<unk>`."""
PUBLISHED_NAME = "sentencepiece.bpe.model"


class Pieces(Symbols):
    """A SentencePiece model.

    Attributes:
        published: whether it has the form of XLM-R's.
    """

    level = "piece"

    def __init__(self, model: bytes) -> None:
        processor = sentencepiece_library().SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except (RuntimeError, TypeError) as error:
            raise RunError(f"not a SentencePiece model: {error}") from None
        special = (processor.bos_id(), processor.pad_id(), processor.eos_id(), processor.unk_id())
        has_mask = processor.piece_to_id(MASK) != processor.unk_id()
        self.published = special == _PUBLISHED and not has_mask
        if not self.published and (special != (START, PAD, END, UNKNOWN) or not has_mask):
            raise RunError(
                f"the SentencePiece model has <s>, <pad>, </s>, <unk> at {special} and needs them at (0, 1, 2, 3), "
                f"with a piece {MASK}, or, as XLM-R's, at {_PUBLISHED} without one"
            )
        self.model = model
        self._processor = processor

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """What id 0, 1, … stand for."""
        own = tuple(self._processor.id_to_piece(index) for index in range(self._processor.get_piece_size()))
        return ("<s>", "<pad>", "</s>", "<unk>", *own[3:], MASK) if self.published else own

    @property
    def size(self) -> int:
        """V, the number of ids."""
        return int(self._processor.get_piece_size()) + 2 * self.published

    @cached_property
    def mask_id(self) -> int:
        return self.size - 1 if self.published else int(self._processor.piece_to_id(MASK))

    @cached_property
    def special(self) -> NDArray[np.bool_]:
        """[V], True for ids that are no text: `<s>`, `<pad>`, `</s>`, `<mask>`."""
        special = np.zeros(self.size, dtype=np.bool_)
        special[[START, PAD, END, self.mask_id]] = True
        return special

    @cached_property
    def characters(self) -> NDArray[np.int64]:
        """[V], how many characters of text a piece stands for: a space is one, `<unk>` is one, special pieces none."""
        lengths = np.array([len(symbol) for symbol in self.symbols], dtype=np.int64)
        lengths[self.special] = 0
        lengths[UNKNOWN] = 1
        return lengths

    @cached_property
    def digest(self) -> str:
        """64 bits in hexadecimal that tell models apart."""
        return hashlib.sha256(self.model).hexdigest()[:16]

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids [n], without `<s>` and `</s>`."""
        return self._shifted(self._processor.encode(text, out_type=int))

    def _shifted(self, found: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(found, dtype=np.int64)
        return np.where(ids == _PUBLISHED[3], UNKNOWN, ids + 1) if self.published else ids

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids [n], and where each piece starts and ends in `text` [n, 2], in characters.

        The offsets are those of the original text, not of the normalised one: spans of answers need them.
        """
        found = self._processor.encode(text, return_type="offset_mapping")
        ids, offsets = found["ids"], found["offsets"]
        return self._shifted(ids), np.asarray(offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special pieces have none."""
        kept = [int(index) for index in ids]
        if self.published:
            kept = [max(0, index - 1) if index != UNKNOWN else 0 for index in kept if not self.special[index]]
        return str(self._processor.decode(kept))

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads, the model in base64."""
        return json.dumps({"level": self.level, "model": base64.b64encode(self.model).decode("ascii")})

    @classmethod
    def from_json(cls, text: str) -> Pieces:
        """The pieces that `to_json` wrote."""
        try:
            data = parse_json(text)
            model = base64.b64decode(data["model"], validate=True)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"not a vocabulary of pieces: {error}") from None
        return cls(model)


def open_pieces(path: Path) -> Pieces:
    """Those of a SentencePiece model file, or of XLM-R's in a folder."""
    file = path / PUBLISHED_NAME if path.is_dir() else path
    try:
        return Pieces(read_ordinary(file))
    except RunError as error:
        raise RunError(f"{file}: {error}") from None
    except OSError as error:
        raise RunError(f"{file}: no SentencePiece model that can be read ({error.strerror or error})") from None


@dataclass(frozen=True)
class MultilingualText:
    """Sentences by language; an empty one ends a document."""

    name: str
    train: Mapping[str, tuple[str, ...]]
    valid: Mapping[str, tuple[str, ...]]
    note: str = ""


def shares(sizes: Mapping[str, int], exponent: float) -> dict[str, float]:
    """Sampling shares p_l ~ (n_l / sum n)^a (Conneau and Lample 2019): a = 1 as they are, a = 0 all alike."""
    if not 0 <= exponent <= 1:
        raise RunError(f"sampling exponent {exponent}: allowed are numbers from 0 to 1")
    total = sum(sizes.values())
    weights = {language: (size / total) ** exponent for language, size in sizes.items()}
    return {language: weight / sum(weights.values()) for language, weight in weights.items()}


def learn_pieces(text: MultilingualText, size: int, *, exponent: float = 0.7) -> Pieces:
    """Trains pieces on 2 million characters, drawn over the languages with this exponent."""
    characters = {language: sum(map(len, sentences)) for language, sentences in text.train.items()}
    chosen: list[str] = []
    for number, (language, share) in enumerate(shares(characters, exponent).items()):
        sentences = [sentence for sentence in text.train[language] if sentence]
        order = drawing(0, number).permutation(len(sentences))
        budget = share * _TRAINING_CHARACTERS
        for index in order:
            if budget <= 0:
                break
            chosen += in_parts(sentences[index])
            budget -= len(sentences[index])
    try:
        return train_pieces(sorted(chosen), size)
    except RunError as error:
        raise RunError(f"{text.name}: {error}") from None


def in_parts(line: str) -> list[str]:
    """A line in parts of a thousand characters: SentencePiece leaves out lines above 4,192 bytes, and says nothing."""
    return [line[start : start + 1000] for start in range(0, len(line), 1000)]


def train_pieces(sentences: Iterable[str], size: int) -> Pieces:
    """Trains a unigram model of `size` pieces; the same sentences in the same order give the same model."""
    if size < 16:
        raise RunError(f"{size} pieces: at least 16 are needed")
    return Pieces(
        train_model(
            sentences, size, coverage=0.9995, normalization_rule_name="nmt_nfkc", bos_id=START, pad_id=PAD,
            eos_id=END, unk_id=UNKNOWN, user_defined_symbols=[MASK],
        )
    )  # fmt: skip


def train_model(sentences: Iterable[str], size: int, *, coverage: float, **options: Any) -> bytes:
    """Trains a unigram model; the content of a SentencePiece model file. `options` are SentencePiece's."""
    model = io.BytesIO()
    try:
        sentencepiece_library().SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, vocab_size=size, model_type="unigram",
            character_coverage=coverage, num_threads=1, minloglevel=2, **options,
        )  # fmt: skip
    except RuntimeError as error:
        told = str(error)
        if few := re.search(r"required_chars\. \d+ vs (\d+)", told):
            reason = f"its characters need at least {few[1]}"
        elif many := re.search(r"too high .* value <= (\d+)", told):
            reason = f"it gives at most {many[1]}"
        else:
            reason = told.rpartition("] ")[2].strip() or told
        raise RunError(f"{size} pieces cannot be trained on this text: {reason}") from None
    return model.getvalue()


def sentencepiece_library() -> Any:
    """The module `sentencepiece`; RunError if it is not installed."""
    with needing("pieces need sentencepiece", "text"):
        import sentencepiece
    return sentencepiece
