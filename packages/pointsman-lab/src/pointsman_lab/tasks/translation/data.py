"""Parallel text for translation: pairs of sentences, in pieces shared by all languages.

`multi30k:from=de+fr+cs:to=en` lies in the data folder, `parallel:PATH:from=de:to=en` in a folder of its own. Files are
`train.LANG[.gz]`, `val.LANG` and `test*.LANG`, one sentence a line; line n of both languages is a pair.
`wmt:FOLDER[:from=fr+cs][:to=en]` has a text of its own for each source language, each with its own target side:
`train.fr-en.fr[.gz]` and `train.fr-en.en`, `valid.fr-en.*`, `newstest2014.fr-en.*`.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import user_path
from pointsman_lab.data.catalog import data_folder, parse_languages, parse_options
from pointsman_lab.data.pieces import END, MultilingualText, Pieces, learn_pieces
from pointsman_lab.data.reading import find_file, read_lines

Ids = NDArray[np.int64]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ParallelText:
    """Pairs (source, target) by source language.

    Attributes:
        name: for tables. target: the target language.
        parts: "train", "valid" and "test" -> source language -> pairs.
        notes: source language -> what the protocol line says of it besides: its test, pairs that were left out.
    """

    name: str
    target: str
    parts: Mapping[str, Mapping[str, Pairs]]
    notes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """A 64-bit hash (hexadecimal) of all pairs."""
        return hashlib.sha256(repr(self.parts).encode()).hexdigest()[:16]

    @property
    def description(self) -> str:
        """The protocol line."""
        sizes = "; ".join(
            f"{part} " + ", ".join(f"{language} {len(pairs):,}" for language, pairs in languages.items())
            for part, languages in self.parts.items()
        )
        notes = "".join(f"; {language}: {note}" for language, note in self.notes.items())
        return f"{self.name}: into {self.target}; {sizes}{notes}"

    def pieces(self, size: int, exponent: float) -> Pieces:
        """Pieces learned from the training part, of all languages together."""
        texts = {language: tuple(one for one, _ in pairs) for language, pairs in self.parts["train"].items()}
        sides = list(dict.fromkeys(tuple(other for _, other in pairs) for pairs in self.parts["train"].values()))
        texts[self.target] = tuple(other for side in sides for other in side)  # a side that all share counts once
        return learn_pieces(MultilingualText(self.name, texts, {}), size, exponent=exponent)


def open_parallel(spec: str) -> ParallelText:
    """Reads `multi30k[:from=de+fr][:to=en]`, `parallel:PATH:from=de:to=en` or `wmt:FOLDER[:from=fr+cs][:to=en]`."""
    name, *options = spec.split(":")
    if name in ("parallel", "wmt") and options and "=" not in options[0]:
        root, options = user_path(options[0]), options[1:]
    elif name == "multi30k":
        if (data_dir := data_folder()) is None:
            raise RunError("multi30k lies in the data folder: set POINTSMAN_DATA")
        root = data_dir / "multi30k"
    else:
        raise RunError(
            f"data {spec!r}: a translation model reads multi30k, parallel:PATH or wmt:FOLDER; "
            f"{did_you_mean(name, ['multi30k', 'parallel', 'wmt'])}"
        )
    usual = {"from": "de+fr+cs" if name == "multi30k" else "", "to": "en"}
    chosen = usual | parse_options(f"data {spec!r}", options, dict.fromkeys(usual, ()))
    sources = [language for language in parse_languages(f"data {spec!r}", chosen["from"]) if language]
    if not root.is_dir():
        raise RunError(f"there is no folder {root}")
    target = chosen["to"]
    if name == "wmt":
        stems = _wmt_stems(root, sources, target)
    elif not sources or target in sources:
        raise RunError(f"data {spec!r}: from={chosen['from']} to={target}: name other languages than the target")
    else:
        alike = {"train": "train", "valid": "val", "test": _test_stem(root, target)}
        stems = dict.fromkeys(sources, alike)
    parts: dict[str, dict[str, Pairs]] = {"train": {}, "valid": {}, "test": {}}
    notes: dict[str, str] = {}
    for language, own in stems.items():
        for part, of in parts.items():
            lines = _pairs(root, own[part], language, target, part, whole=name != "wmt" or part != "train")
            of[language] = kept = tuple(pair for pair in lines if all(pair))
            if len(kept) < len(lines):
                notes[language] = f"{len(lines) - len(kept):,} training pairs with an empty side left out, "
        if name == "wmt":
            notes[language] = f"{notes.get(language, '')}test {own['test']}"
    folder = os.path.basename(os.path.abspath(root))  # also of "." and ".."
    return ParallelText(f"{folder}:from={'+'.join(stems)}:to={target}", target, parts, notes)


_WMT = re.compile(
    r"(?P<stem>train|valid|dev|(?:news)?test[^.]*)[.](?P<one>[a-z]+)-(?P<other>[a-z]+)[.](?P<side>[a-z]+)"
)
_NAMES = {"train": "train.{0}-{1}.{0}", "valid": "valid.{0}-{1}.{0}", "test": "newstest2014.{0}-{1}.{0}"}


def _wmt_stems(root: Path, sources: list[str], target: str) -> dict[str, dict[str, str]]:
    """Source language -> part -> stem of its own files; all languages that lie there where none is named."""
    stems: dict[str, dict[str, str]] = {}
    for file in sorted(root.iterdir()):
        match = _WMT.fullmatch(file.name.removesuffix(".gz"))
        if match and target in (match["one"], match["other"]) and match["side"] != target:
            part = {"train": "train", "valid": "valid", "dev": "valid"}.get(match["stem"], "test")
            own = stems.setdefault(match["side"], {})
            stem = f"{match['stem']}.{match['one']}-{match['other']}"
            if part in own:
                raise RunError(f"{root}: {match['side']} has two {part} parts, {own[part]} and {stem}: leave one there")
            own[part] = stem
    found = {language: stems.get(language, {}) for language in sources or sorted(stems)}
    if not found:
        raise RunError(f"{root} has no text into {target}: {_NAMES['train'].format('fr', target)} is expected")
    for language, own in found.items():
        for part, name in _NAMES.items():
            if part not in own:
                expected = name.format(language, target)
                raise RunError(f"{root} has no {part} part of {language} into {target}: {expected} is expected")
    return found


def _test_stem(root: Path, language: str) -> str:
    found = sorted({file.name.removesuffix(".gz") for file in root.glob(f"test*.{language}*")})
    if len(found) != 1:
        raise RunError(f"{root}: one file test*.{language} is expected, found {', '.join(found) or 'none'}")
    return found[0].removesuffix(f".{language}")


def _pairs(root: Path, stem: str, source: str, target: str, part: str, *, whole: bool = True) -> Pairs:
    lines = []
    for language in (source, target):
        file = find_file(root, f"{stem}.{language}")
        if file is None:
            raise RunError(f"{root} has no {stem}.{language}: the {part} part of {source} into {target} needs it")
        lines.append((file, [line.strip() for _, line in read_lines(file)]))
    (one, ours), (other, theirs) = lines
    if len(ours) != len(theirs):
        raise RunError(f"{one} has {len(ours)} lines, and {other} {len(theirs)}: they are no pairs")
    if not ours:
        raise RunError(f"{one} has no text")
    for file, side in lines if whole else ():
        if "" in side:
            raise RunError(f"{file}: line {side.index('') + 1} is empty")
    return tuple(zip(ours, theirs, strict=True))


def ended(ids: Ids, length: int) -> Ids:
    """The pieces of a sentence and `</s>`; of `length` pieces and more the last ones are cut."""
    return np.array([*ids[: length - 1], END], dtype=np.int64)
