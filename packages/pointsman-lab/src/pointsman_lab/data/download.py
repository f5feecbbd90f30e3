"""Downloads a named corpus from the Hugging Face hub or from its author's page.

Files are written to a temporary name, verified, and then renamed.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        _from_page(name, target / f"{name}.zip", progress)
        return
    for split, expected in WIKITEXT_TOKENS[name].items():
        path = target / CORPORA[name].parts[split]
        if not path.exists():
            _from_hub(name, split, expected, path, progress)


def _from_page(name: str, path: Path, progress: DataProgress | None) -> None:
    """Downloads the file of `name`, whose text has the size and MD5 of the catalog."""
    size = sum(CORPORA[name].sizes)
    with _aside(name, path) as aside:
        with urlopen(PAGES[name], timeout=_TIMEOUT_SECONDS) as answer, open_new(aside) as file:
            total = int(answer.headers.get("Content-Length") or 0)
            done = 0
            while block := answer.read(BLOCK):
                file.write(block)
                done += len(block)
                if progress:
                    progress(f"downloading {name}", done, total)
        for done in check_md5(aside, size, CORPORA[name].md5):
            if progress:
                progress(f"checking {name}", done, size)


def _from_hub(name: str, split: str, expected: int, path: Path, progress: DataProgress | None) -> None:
    """Writes the published file of a split: one line per row, blank lines as empty text."""
    with _aside(name, path) as aside:
        rows = _hub_rows(name, f"{name}-v1", _HUB_SPLITS[split])
        tokens, total = 0, len(rows)
        with open_new(aside) as file:
            for done, row in enumerate(rows, start=1):
                line = str(row["text"]).removesuffix("\n")
                file.write(line.encode() + b"\n")
                tokens += len(line.split()) + 1
                if progress and done % 1000 == 0:
                    progress(f"reading {name} {split}", done, total)
        if tokens != expected:
            raise RunError(f"{name} {split} from the hub has {tokens:,} tokens, expected {expected:,}")


def _hub_rows(name: str, config: str, split: str) -> Any:
    """The rows of one split of WikiText from the Hugging Face hub, without its library's warnings about retries."""
    with needing(f"{name} {NOT_HERE}, and the hub needs", "hf"):
        import datasets
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return datasets.load_dataset(WIKITEXT_REPOSITORY, config, split=split)
    finally:
        logger.setLevel(level)


@contextmanager
def _aside(name: str, path: Path) -> Iterator[Path]:
    """A scratch file that takes the place of `path` once it is whole; errors tell what failed of the download."""
    aside = path
    try:
        with scratch_folder(path.parent) as folder:
            aside = folder / path.name
            yield aside
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
