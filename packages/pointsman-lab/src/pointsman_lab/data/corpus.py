"""Corpora: named or given by path, tokenized once and cached as memory-mapped arrays of token ids."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import stamp, user_cache_folder
from pointsman_lab.data.cache import FORMAT, Tokens, cached
from pointsman_lab.data.catalog import CORPORA, SPLITS, DataSpec, Level, data_folder, parse_data
from pointsman_lab.data.download import DataProgress, download
from pointsman_lab.data.pieces import in_parts
from pointsman_lab.data.reading import Reader, check_md5, reading
from pointsman_lab.data.sources import Source, local_source
from pointsman_lab.data.subwords import PIECES, learn_pieces, number_of_pieces, open_tokenizer
from pointsman_lab.data.vocabulary import IdArray, Vocabulary, split_words


@dataclass(frozen=True)
class Corpus:
    """Token ids of a corpus's splits.

    Attributes:
        name: the label in tables: the corpus's name or the last part of its path, with the preparation.
        vocabulary: of the ids.
        description: the protocol line: source, level, vocabulary, splits and their sizes.
        fingerprint: a 64-bit hash (hexadecimal) of all ids and the vocabulary.
    """

    name: str
    vocabulary: Vocabulary
    description: str
    fingerprint: str
    _arrays: Mapping[str, IdArray] = field(repr=False)
    _source: Source = field(repr=False)

    @property
    def splits(self) -> tuple[str, ...]:
        """Some of train, valid, test."""
        return tuple(self._arrays)

    def split(self, name: str) -> IdArray:
        """Ids [tokens] of "train", "valid" or "test", read-only, in the smallest type that holds V; memory-mapped.

        Raises:
            RunError: the corpus has no such split.
        """
        if name not in SPLITS:
            raise RunError(f"there is no split {name!r}: {did_you_mean(name, SPLITS)}")
        if name not in self._arrays:
            raise self._source.no_part(name)
        return self._arrays[name]


LEARN_FROM = 10_000_000
"""Characters at the start of the training split that `pieces:V` learns from."""


def open_corpus(
    spec: str, *, vocabulary: Vocabulary | None = None, tokenizer: str = "", progress: DataProgress | None = None
) -> Corpus:
    """`load_corpus` with the folder that POINTSMAN_DATA names."""
    return load_corpus(spec, data_dir=data_folder(), vocabulary=vocabulary, tokenizer=tokenizer, progress=progress)


def open_text(spec: str) -> Corpus:
    """`open_corpus` by bytes, whatever the corpus's level: decoded they are the text as its files have it."""
    return open_corpus(str(replace(parse_data(spec), level="byte")))


def load_corpus(
    spec: str,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    vocabulary: Vocabulary | None = None,
    tokenizer: str = "",
    progress: DataProgress | None = None,
) -> Corpus:
    """Loads the corpus `NAME|PATH[:newlines=keep|drop][:level=byte|word]`.

    A name is looked up in `data_dir` and in earlier downloads, and downloaded otherwise. Anything else is a file or
    folder, relative to `data_dir` or by its path. The tokens are cached in `cache_dir` (default: the user's cache
    folder) under a key of the files' paths, sizes and times and of the options.

    Args:
        vocabulary: that of a trained run, to evaluate or fine-tune it; default: built from the training split.
        tokenizer: without a vocabulary: `pieces:V`, or the path of a tokenizer (`subwords`); "": the corpus's level.

    Raises:
        RunError: one line, for every error of the user's.
    """
    wanted = parse_data(spec)
    if vocabulary is None and tokenizer:
        vocabulary = open_tokenizer(tokenizer)
    pieces = number_of_pieces(tokenizer) if vocabulary is None and tokenizer.startswith(PIECES) else None
    level: Level | None = vocabulary.level if vocabulary else "subword" if pieces else None
    if level and wanted.level and wanted.level != level:
        raise RunError(f"data {spec!r} asks for level={wanted.level}, but the run's vocabulary is {level}-level")
    if data_dir is not None and not data_dir.is_dir():
        raise RunError(f"the data folder {data_dir} is not a folder")
    cache = cache_dir or user_cache_folder()
    source = _find(wanted, data_dir, cache, level, progress)
    build = _Build(source, wanted, vocabulary, progress, pieces)
    tokens = cached(build.key, cache, build)
    label = str(DataSpec(source.name, wanted.newlines, wanted.level))
    return Corpus(
        label, tokens.vocabulary, _describe(label, source, wanted, tokens), _fingerprint(tokens), tokens.arrays, source
    )


def _find(
    wanted: DataSpec, data_dir: Path | None, cache: Path, level: Level | None, progress: DataProgress | None
) -> Source:
    downloads = cache / "downloads"
    folders = [data_dir, downloads] if data_dir else [downloads]
    source = local_source(wanted, folders, level)
    name = source.name if source else wanted.name
    begun = source and source.missing and {of[0].path.parent for of in source.parts.values()} == {downloads / name}
    if source is None or begun:
        download(name, downloads, progress)
        source = local_source(wanted, folders, level)
    assert source is not None, "local_source finds every downloaded corpus"
    return source


@dataclass(frozen=True)
class _Build:
    """Tokenizes a source: builds the vocabulary in a first pass, the ids in a second."""

    source: Source
    wanted: DataSpec
    vocabulary: Vocabulary | None
    progress: DataProgress | None
    pieces: int | None = None

    @property
    def keep_newlines(self) -> bool:
        return self.wanted.newlines == "keep"

    @property
    def key(self) -> str:
        """The cache key: depends on the files, the options, the vocabulary and the format."""
        files: dict[str, tuple[int, int, int]] = {}
        stretches: dict[str, list[tuple[str, int, int]]] = {}
        for split, spans in self.source.parts.items():
            stretches[split] = []
            for span in spans:
                path = str(span.path.resolve())
                with reading(span.path):
                    files[path] = stamp(span.path)
                stretches[split].append((path, span.start, span.stop))
        vocabulary = self.vocabulary.digest if self.vocabulary else None
        what = [FORMAT, files, stretches, self.source.level, self.keep_newlines, vocabulary]
        text = json.dumps([*what, self.pieces] if self.pieces else what, sort_keys=True)
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in self.source.name)
        return f"{name[:40].lstrip('.')}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def __call__(self) -> Tokens:
        source = self.source
        if source.checksum:
            path, size, md5 = source.checksum
            for done in check_md5(path, size, md5):
                self._report("checking", done, size)
        vocabulary = self.vocabulary or self._vocabulary()
        unknown = dict.fromkeys(source.parts, 0)
        blocks: dict[str, list[IdArray]] = {split: [] for split in source.parts}
        for split, block in self._blocks("tokenizing", source.parts, source.size):
            ids, unknown_here = vocabulary.encode_compact(block)
            blocks[split].append(ids)
            unknown[split] += unknown_here
        self._report("tokenizing", source.size, source.size)
        return Tokens.of(vocabulary, blocks, unknown)

    def _vocabulary(self) -> Vocabulary:
        """Built from the training split; at byte level it includes the bytes of all splits and is lossless."""
        splits = list(self.source.parts) if self.source.level == "byte" else ["train"]
        if "train" in splits and "train" not in self.source.parts:
            reason = f"a {self.source.level}-level vocabulary comes from it (or from a trained run, in evaluation)"
            raise RunError(f"{self.source.no_part('train')}; {reason}")
        if self.pieces:
            return learn_pieces(self._sentences(), self.pieces)
        seen = {split: np.zeros(256, dtype=np.bool_) for split in splits}
        words: Counter[str] = Counter()
        for split, block in self._blocks("reading", splits, self.source.size):
            if isinstance(block, bytes):
                seen[split][np.frombuffer(block, dtype=np.uint8)] = True
            else:
                words.update(split_words(block, keep_newlines=self.keep_newlines))
        if self.source.level == "word":
            return Vocabulary.of_words(words)
        values = {split: [int(value) for value in np.flatnonzero(here)] for split, here in seen.items()}
        if not any(values.values()):
            raise RunError(f"{self.source.name} contains only newlines, and newlines=drop drops them")
        return Vocabulary.of_bytes(values.get("train", []), [value for part in values.values() for value in part])

    def _sentences(self) -> Iterator[str]:
        """The lines of the training split's start, with their ends; long ones in parts."""
        done = 0
        for _, text in self._blocks("learning pieces from", ["train"], LEARN_FROM):
            assert isinstance(text, str)
            for line in text.splitlines(keepends=True):
                yield from in_parts(line)
            done += len(text)
            if done >= LEARN_FROM:
                return

    def _blocks(self, what: str, splits: Iterable[str], total: int) -> Iterator[tuple[str, bytes | str]]:
        """(split, prepared block) of the text of these splits; `total` is for the progress."""
        done = 0
        with Reader() as reader:
            for split in splits:
                for span in self.source.parts[split]:
                    for block in reader.blocks(span, self.source.level):
                        done += len(block)
                        self._report(what, done, total)
                        yield split, self._prepared(block)

    def _prepared(self, block: bytes | str) -> bytes | str:
        if self.keep_newlines:
            return block
        if isinstance(block, bytes):
            return block.replace(b"\n", b"")
        return block.replace("\n", " ")

    def _report(self, what: str, done: int, total: int) -> None:
        if self.progress:
            self.progress(f"{what} {self.source.name}", done, total)


def _describe(label: str, source: Source, wanted: DataSpec, tokens: Tokens) -> str:
    parts = ", ".join(f"{split} {len(ids):,}" for split, ids in tokens.arrays.items())
    unit = {"byte": "bytes", "word": "words", "subword": "subwords"}[source.level]
    kept = wanted.newlines == "keep" and (source.level != "word" or tokens.vocabulary.end_of_line_id is not None)
    end = "newlines dropped" if not kept else "<eos> for each newline" if source.level == "word" else "newlines kept"
    known = CORPORA.get(source.name)
    note = source.note if known is None or known.files or source.name == "stdlib" else "the published parts"
    text = f"{label}: {note}; {unit}, {end}; V {tokens.vocabulary.size:,}; tokens: {parts}"
    unknown = ", ".join(f"{split} {count:,}" for split, count in tokens.unknown.items() if count)
    return f"{text}; not in the vocabulary: {unknown}" if unknown else text


def _fingerprint(tokens: Tokens) -> str:
    parts = {split: (len(ids), tokens.crc32[split]) for split, ids in tokens.arrays.items()}
    return hashlib.sha256(json.dumps([parts, tokens.vocabulary.digest]).encode()).hexdigest()[:16]
