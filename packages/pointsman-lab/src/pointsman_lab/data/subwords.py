"""Subwords: vocabularies that a tokenizer of the `tokenizers` library defines.

The tokenizer is named by a setting of the run: `pieces:V`, V pieces that SentencePiece learns on the training split, or
the path of a `tokenizer.json`, of a SentencePiece model or of a folder with the tokenizer of a Hugging Face model.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError, needing
from pointsman_lab._files import parse_json, read_ordinary, user_path, write_whole
from pointsman_lab.data.pieces import sentencepiece_library, train_model
from pointsman_lab.data.reading import reading
from pointsman_lab.data.vocabulary import IdArray, Vocabulary

PIECES = "pieces:"
LEAST = 300  # pieces: 256 of them stand for single bytes
MOST_IDS = 1 << 22
CHUNK = 1 << 16
"""Characters that are tokenized at a time, up to the last end of a line among them."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The only files beside a `tokenizer.json` that an export writes again."""


class Subwords(Vocabulary):
    """The ids of a tokenizer. Encoding adds no special tokens.

    Args:
        definition: the content of its `tokenizer.json`.
        files: the content of the files beside it, by name (`COMPANIONS`).
    """

    def __init__(self, definition: str, files: Mapping[str, str] | None = None) -> None:
        self.definition, self.files = definition, dict(files or {})
        for name, text in self.files.items():  # a run may come from somebody else: a name could lead anywhere
            if name not in COMPANIONS or not isinstance(text, str):
                told = ", ".join(COMPANIONS)
                raise RunError(f"a tokenizer has no text file {str(name)[:80]!r} beside it; allowed are {told}")
        try:
            self.tokenizer: Any = _library().Tokenizer.from_str(definition)
        except Exception as error:  # the library raises plain Exception
            raise RunError(f"not a tokenizer: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        names = {index: token for token, index in self.tokenizer.get_vocab(with_added_tokens=True).items()}
        if not names:
            raise RunError("the tokenizer has no ids")
        if max(names) >= MOST_IDS:
            raise RunError(f"the tokenizer has the id {max(names):,}; allowed are ids below {MOST_IDS:,}")
        self.level = "subword"
        self.symbols = tuple(names.get(index, "") for index in range(max(names) + 1))

    @cached_property
    def unknown_id(self) -> int | None:
        """The id that stands for text without one; None of a tokenizer that has ids for everything."""
        model = parse_json(self.definition)["model"]
        if model.get("byte_fallback"):
            return None
        if isinstance(model.get("unk_id"), int):
            return int(model["unk_id"])
        found = None if model.get("unk_token") is None else self.tokenizer.token_to_id(model["unk_token"])
        return None if found is None else int(found)

    @cached_property
    def end_id(self) -> int | None:
        """The id of the `eos_token` in `tokenizer_config.json`."""
        try:
            token = parse_json(self.files["tokenizer_config.json"])["eos_token"]
        except (KeyError, ValueError, TypeError):
            return None
        token = token.get("content") if isinstance(token, dict) else token
        return self.tokenizer.token_to_id(token) if isinstance(token, str) else None

    def encode_compact(self, text: str | bytes) -> tuple[IdArray, int]:
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise RunError(f"byte {error.start} of the text is not UTF-8: subwords need it") from None
        found = self.tokenizer.encode_batch(list(_chunks(text)), add_special_tokens=False)
        ids = np.concatenate([np.zeros(0, self.dtype), *(np.asarray(one.ids, self.dtype) for one in found)])
        return ids, 0 if self.unknown_id is None else int(np.count_nonzero(ids == self.unknown_id))

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        array = [int(index) for index in ids]
        if array and not 0 <= min(array) <= max(array) < self.size:
            raise ValueError(f"ids are from {min(array)} to {max(array)}; the vocabulary has 0 to {self.size - 1}")
        return str(self.tokenizer.decode(array, skip_special_tokens=False))

    def decode_bytes(self, ids: Iterable[int] | NDArray[Any]) -> bytes:
        return self.decode(ids).encode("utf-8", errors="replace")

    def to_json(self) -> str:
        values = {"level": self.level, "tokenizer": self.definition, "files": self.files}
        return json.dumps(values, ensure_ascii=True)


def read_vocabulary(text: str) -> Vocabulary:
    """What the `to_json` of a vocabulary wrote, of subwords or another level."""
    try:
        data = parse_json(text)
        if data["level"] == "subword":
            return Subwords(data["tokenizer"], data["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"not a vocabulary: {error}") from None
    return Vocabulary.from_json(text)


def open_tokenizer(name: str) -> Subwords | None:
    """The tokenizer of a setting; None of `pieces:V`, which the data define."""
    if name.startswith(PIECES):
        number_of_pieces(name)
        return None
    path = user_path(name)
    if path.is_file():
        return _from_model(path) if path.suffix == ".model" else _from_json(path)
    if not path.is_dir():
        raise RunError(f"tokenizer {name!r}: no file and no folder; allowed are pieces:V and paths of tokenizers")
    if (given := path / "tokenizer.json").is_file():
        return _from_json(given, {name: _read(path / name) for name in COMPANIONS if (path / name).is_file()})
    if not has_tokenizer(path):
        raise RunError(f"tokenizer {name!r}: the folder holds no tokenizer")
    from pointsman.hf.loading import load_tokenizer

    backend = getattr(load_tokenizer(str(path)), "backend_tokenizer", None)
    if backend is None:
        raise RunError(f"tokenizer {name!r}: it has no form that the tokenizers library knows (a tokenizer.json)")
    return Subwords(backend.to_str())


def _from_json(path: Path, files: Mapping[str, str] | None = None) -> Subwords:
    text = _read(path)
    try:
        return Subwords(text, files)
    except RunError as error:
        raise RunError(f"{path}: {error}") from None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer, in any of the forms that transformers knows."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json",
                                                      "vocab.json", "spiece.model"))  # fmt: skip


def number_of_pieces(name: str) -> int:
    """V of `pieces:V`; RunError if it is no whole number from `LEAST`."""
    text = name.removeprefix(PIECES)
    if not text.isdecimal() or int(text) < LEAST:
        raise RunError(f"tokenizer {name!r}: pieces: takes a whole number from {LEAST}")
    return int(text)


def learn_pieces(sentences: Iterable[str], size: int) -> Subwords:
    """A lossless unigram vocabulary (Kudo 2018): 0 `<unk>`, 256 bytes, then pieces. One thread: the same text always
    gives the same pieces.
    """
    return _of_processor(piece_model(sentences, size))


def piece_model(sentences: Iterable[str], size: int) -> bytes:
    """The SentencePiece model of `learn_pieces`."""
    return train_model(
        sentences, size, coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=False, byte_fallback=True, bos_id=-1, eos_id=-1, pad_id=-1, unk_id=0,
    )  # fmt: skip


def _from_model(path: Path) -> Subwords:
    try:
        with reading(path):
            return _of_processor(read_ordinary(path), path)
    except (RuntimeError, TypeError) as error:
        raise RunError(f"{path}: not a SentencePiece model: {error}") from None


def _of_processor(model: bytes, name: object = "pieces") -> Subwords:
    """A unigram model of SentencePiece as a tokenizer of `tokenizers`, for text that needs no normalization."""
    library = _library()
    pieces = sentencepiece_library().SentencePieceProcessor()
    pieces.LoadFromSerializedProto(model)
    vocabulary = [(pieces.id_to_piece(index), pieces.get_score(index)) for index in range(pieces.get_piece_size())]
    if all(score.is_integer() for _, score in vocabulary):  # ranks of merges, not log-probabilities
        raise RunError(f"{name}: a BPE model; allowed are unigram models, or the folder with its tokenizer.json")
    tokenizer = library.Tokenizer(
        library.models.Unigram(vocabulary, unk_id=pieces.unk_id(), byte_fallback=pieces.piece_to_id("<0x0A>") > 0)
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    parts = library.decoders
    tokenizer.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse()])
    word = max((piece for piece, _ in vocabulary if piece.isascii() and piece.isalnum()), key=len, default="")
    wide = "".join(chr(ord(letter) + 0xFEE0) for letter in word)  # another form of the same letters
    for text in (f"{word}  {word} ", f"{wide} {word}"):
        if pieces.encode(text) != tokenizer.encode(text).ids:
            raise RunError(f"{name}: it changes text first; allowed is the folder with its tokenizer.json")
    return Subwords(tokenizer.to_str())


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + CHUNK
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _read(path: Path) -> str:
    try:
        with reading(path):
            return read_ordinary(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: not UTF-8 (byte at {error.start:,})") from None


def _library() -> Any:
    with needing("subwords need tokenizers", "hf"):
        import tokenizers
    return tokenizers


def as_tokenizer(vocabulary: Vocabulary) -> Any:
    """A `tokenizers.Tokenizer` with the ids of any vocabulary.

    Bytes become a byte-level BPE without merges, words a lookup of what stands between white space. A byte that the
    vocabulary lacks becomes "?" (or id 0), an unknown word `<unk>`.
    """
    if isinstance(vocabulary, Subwords):
        return vocabulary.tokenizer
    library = _library()
    models, before = library.models, library.pre_tokenizers
    if vocabulary.level == "byte":
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters = bytes_to_unicode()  # type: ignore[no-untyped-call]  # of GPT-2: byte -> the letter for it
        ids = {letters[int(symbol)]: index for index, symbol in enumerate(vocabulary.symbols)}
        unknown = "?" if "?" in ids else next(iter(ids))
        tokenizer = library.Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=unknown))
        tokenizer.pre_tokenizer = before.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        return tokenizer
    ids = {str(symbol): index for index, symbol in enumerate(vocabulary.symbols)}
    tokenizer = library.Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    if vocabulary.end_of_line_id is not None:
        tokenizer.normalizer = library.normalizers.Replace("\n", " <eos> ")
    tokenizer.pre_tokenizer = before.WhitespaceSplit()
    return tokenizer


def save_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes the files from which `AutoTokenizer.from_pretrained(folder)` makes the same ids."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = as_tokenizer(vocabulary)
    if isinstance(vocabulary, Subwords) and "tokenizer_config.json" in vocabulary.files:
        tokenizer.save(str(folder / "tokenizer.json"))
        for name, text in vocabulary.files.items():
            write_whole(folder / name, text)
        return
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(folder)
