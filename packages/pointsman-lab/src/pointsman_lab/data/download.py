"""Downloads a named corpus from the Hugging Face hub or from its author's page.

Files are written to a temporary name, verified, and then renamed.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from pointsman._errors import RunError, needing
from pointsman_lab._files import open_named, open_new, scratch_folder
from pointsman_lab.data.catalog import CORPORA
from pointsman_lab.data.reading import BLOCK, check_md5

DataProgress = Callable[[str, int, int], None]
"""Called as progress(what, done, total), both in bytes; total is 0 while unknown."""

WIKITEXT_REPOSITORY = "Salesforce/wikitext"
PAGES = {"enwik8": "https://mattmahoney.net/dc/enwik8.zip", "text8": "https://mattmahoney.net/dc/text8.zip"}
WIKITEXT_TOKENS = {
    "wikitext-2": {"train": 2_088_628, "valid": 217_646, "test": 245_569},
    "wikitext-103": {"train": 103_227_021, "valid": 217_646, "test": 245_569},
}
_HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_TIMEOUT_SECONDS = 30
NOT_HERE = "is not under the data folder (POINTSMAN_DATA)"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def download(name: str, folder: Path, progress: DataProgress | None = None) -> None:
    """Puts the files of a named corpus into `folder / name`."""
    target = folder / name
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{name} cannot be downloaded: {target} cannot be created: {error.strerror}") from None
    if name in PAGES:
        from_address(name, PAGES[name], target / f"{name}.zip", progress)
    else:
        _from_hub(name, target, progress)


def from_address(name: str, address: str, path: Path, progress: DataProgress | None) -> None:
    """Downloads the file of `name`, whose text has the size and MD5 of the catalog."""
    size, md5 = sum(CORPORA[name].sizes), CORPORA[name].md5

    def write(aside: Path) -> None:
        with urlopen(address, timeout=_TIMEOUT_SECONDS) as answer, open_new(aside) as file:
            total = int(answer.headers.get("Content-Length") or 0)
            done = 0
            while block := answer.read(BLOCK):
                file.write(block)
                done += len(block)
                if progress:
                    progress(f"downloading {path.name.removesuffix('.zip')}", done, total)
        for done in check_md5(aside, size, md5):
            if progress:
                progress(f"checking {path.name.removesuffix('.zip')}", done, size)

    _write_aside(name, path, write)


def _from_hub(name: str, target: Path, progress: DataProgress | None) -> None:
    for split, expected in WIKITEXT_TOKENS[name].items():

        def write(path: Path, split: str = split, expected: int = expected) -> None:
            rows = hub_rows(name, f"{name}-v1", _HUB_SPLITS[split])
            tokens = 0
            with open_new(path) as file:
                for line in _lines(rows, f"reading {name} {split}", progress):
                    file.write(line.encode() + b"\n")
                    tokens += len(line.split()) + 1
            if tokens != expected:
                raise RunError(f"{name} {split} from the hub has {tokens:,} tokens, expected {expected:,}")

        path = target / CORPORA[name].parts[split]
        if not path.exists():
            _write_aside(name, path, write)


def hub_rows(name: str, config: str, split: str) -> Any:
    """The rows of one split of WikiText from the Hugging Face hub, without its library's warnings about retries."""
    with needing(f"{name} {NOT_HERE}, and the hub needs", "hf"):
        import datasets
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return datasets.load_dataset(WIKITEXT_REPOSITORY, config, split=split)
    except Exception as error:  # without a network, the hub's libraries raise their own types
        if isinstance(error, OSError) and error.errno in (*NO_SPACE, errno.EACCES):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"{name} {NOT_HERE} and cannot be downloaded (no network?): {reason}") from None
    finally:
        logger.setLevel(level)


def _lines(rows: Any, what: str, progress: DataProgress | None) -> Iterator[str]:
    """The lines of the published file: one per row, blank lines as empty text."""
    total = len(rows)
    for done, row in enumerate(rows, start=1):
        yield str(row["text"]).removesuffix("\n")
        if progress and done % 1000 == 0:
            progress(what, done, total)


def _write_aside(name: str, path: Path, write: Callable[[Path], None]) -> None:
    aside = path
    try:
        with scratch_folder(path.parent) as folder:
            aside = folder / path.name
            write(aside)
            with open_named(aside) as file:
                os.fsync(file.fileno())
            aside.replace(path)
    except RunError as error:
        raise RunError(str(error).replace(str(aside), f"the download of {path.name}")) from None
    except Exception as error:  # without a network, the hub's libraries raise their own types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise RunError(f"no space left in {path.parent} for the download of {name}") from None
        if isinstance(error, PermissionError):
            raise RunError(f"no permission to write the download of {name} into {path.parent}") from None
        raise RunError(f"{name} {NOT_HERE} and cannot be downloaded (no network?): {reason}") from None
