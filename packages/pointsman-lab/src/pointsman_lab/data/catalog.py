"""The named corpora, and the grammar of `--data`: `NAME|PATH[:newlines=keep|drop][:level=byte|word]`.

Imports neither torch nor numpy, so that `--help` is fast.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pointsman._errors import RunError, did_you_mean

Level = Literal["byte", "word", "subword"]
"""What a token is. Subwords are what a tokenizer makes, not a choice of `--data`."""
Newlines = Literal["keep", "drop"]
SPLITS = ("train", "valid", "test")

_OPTIONS: Mapping[str, tuple[str, ...]] = {"newlines": get_args(Newlines), "level": ("byte", "word")}
_OPTION_START = re.compile(r":(?=[A-Za-z_]\w*(?:=|:|$))")  # not the colon of C:\text, nor one inside a path


@dataclass(frozen=True)
class KnownCorpus:
    """A corpus with a name.

    Attributes:
        level: the default unit of tokens.
        files: for a corpus in one file: its possible names, in order of preference.
        parts: for a corpus with one file per split: split -> file name.
        sizes: for a corpus in one file: bytes of the unpacked train, valid and test splits.
        md5: of the unpacked file.
    """

    level: Level = "byte"
    files: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[int, int, int] = (0, 0, 0)
    md5: str = ""


def _in_one_file(name: str, md5: str) -> KnownCorpus:
    sizes = (90_000_000, 5_000_000, 5_000_000)
    return KnownCorpus(files=(name, f"{name}.gz", f"{name}.zip"), sizes=sizes, md5=md5)


_WIKI_PARTS = {split: f"wiki.{split}.tokens" for split in SPLITS}

CORPORA: Mapping[str, KnownCorpus] = {
    "stdlib": KnownCorpus(),
    "enwik8": _in_one_file("enwik8", "a1fa5ffddb56f4953e226637dabbb36a"),
    "text8": _in_one_file("text8", "3bea1919949baf155f99411df5fada7e"),
    "wikitext-2": KnownCorpus(level="word", parts=_WIKI_PARTS),
    "wikitext-103": KnownCorpus(level="word", parts=_WIKI_PARTS),
}


@dataclass(frozen=True)
class DataSpec:
    """A parsed `--data`: a name or a path, and the preparation. `level` None means the corpus's default."""

    name: str
    newlines: Newlines = "keep"
    level: Level | None = None

    def __str__(self) -> str:
        newlines = ":newlines=drop" if self.newlines == "drop" else ""
        level = f":level={self.level}" if self.level else ""
        return f"{self.name}{newlines}{level}"


def parse_data(text: str) -> DataSpec:
    """Reads `NAME|PATH[:option=value]*`."""
    if os.path.exists(text):  # a path may hold a colon
        return DataSpec(text)
    name, *options = _OPTION_START.split(text)
    if not name:
        raise RunError(f"data {text!r} names no corpus and no path; {_choices('')}")
    values: dict[str, Any] = parse_options(f"data {text!r}", options, _OPTIONS)
    return DataSpec(name, **values)


def parse_options(where: str, options: Iterable[str], allowed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The values of `key=value`, each key once.

    Args:
        where: the start of an error.
        allowed: key -> its values; none: any text.
    """
    values: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in allowed:
            raise RunError(f"{where}: unknown option {key!r}: {did_you_mean(key, allowed)}")
        if not value or (allowed[key] and value not in allowed[key]):
            told = did_you_mean(value, allowed[key]) if allowed[key] else "a value is missing"
            raise RunError(f"{where}: {key}={value!r}: {told}")
        if key in values:
            raise RunError(f"{where}: {key} is given twice")
        values[key] = value
    return values


def parse_languages(where: str, text: str) -> tuple[str, ...]:
    """The languages of `en+de`, each once; "": none."""
    found = tuple(text.split("+")) if text else ()
    if twice := [language for language in found if found.count(language) > 1]:
        raise RunError(f"{where}: {twice[0]!r} is named twice; allowed are different languages, as en+de")
    return found


def hashed(text: str) -> int:
    """64 bits of a text, equal on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def data_folder() -> Path | None:
    """The user's data folder, which POINTSMAN_DATA names."""
    folder = os.environ.get("POINTSMAN_DATA")
    return Path(folder) if folder else None


def unknown_data(name: str) -> RunError:
    """The error for a name that is neither a corpus nor a path."""
    if Path(name).suffix or "/" in name:
        return RunError(f"there is no file or folder {name!r} here: --data takes the path of yours")
    return RunError(f"no corpus and no file or folder is called {name!r}: {_choices(name)}")


def _choices(name: str) -> str:
    return f"{did_you_mean(name, CORPORA)}, or the path of a text file or folder"
