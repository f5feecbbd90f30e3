"""Multi30k is downloaded into the data folder where files of it are missing; the page is a local folder here."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

pytest.importorskip("sentencepiece")

from pointsman._errors import RunError
from pointsman_lab.tasks.translation import data as download
from pointsman_lab.tasks.translation.data import load_parallel

STEMS = ("train", "val", "test_2016_flickr")
TEXTS = {f"{stem}.{language}": f"{stem} {language}\n".encode() for stem in STEMS for language in ("en", "de", "fr")}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "page"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(text))
    sums = {name: (len(text), hashlib.md5(text, usedforsecurity=False).hexdigest()) for name, text in TEXTS.items()}
    monkeypatch.setattr(download, "MULTI30K", sums)
    monkeypatch.setattr(download, "MULTI30K_PAGE", folder.as_uri())
    return folder


def test_only_what_is_missing_and_asked_for_is_downloaded(tmp_path: Path, page: Path) -> None:
    data = tmp_path / "data"
    (data / "multi30k").mkdir(parents=True)
    (data / "multi30k" / "train.en").write_text("mine\n")
    (data / "multi30k" / "test_2017.en").write_text("mine\n")
    (data / "multi30k" / "test_2017.de").write_text("meins\n")
    text = load_parallel("multi30k:from=de", data)
    assert text.parts["train"]["de"] == (("train de", "mine"),)
    assert text.parts["test"]["de"] == (("meins", "mine"),)
    names = {file.name for file in (data / "multi30k").iterdir()}
    assert names == {"train.en", "train.de.gz", "val.en.gz", "val.de.gz", "test_2017.en", "test_2017.de"}
    for file in page.iterdir():
        file.unlink()
    assert load_parallel("multi30k:from=de", data).fingerprint == text.fingerprint, "nothing is asked for again"
    with pytest.raises(RunError, match=r"cannot be downloaded \(no network\?\)"):
        load_parallel("multi30k:from=fr", data)


def test_another_file_is_not_kept(tmp_path: Path, page: Path) -> None:
    (page / "val.de.gz").write_bytes(gzip.compress(b"something else\n"))
    with pytest.raises(RunError, match=r"the download of val\.de\.gz has 15 bytes"):
        load_parallel("multi30k:from=de", tmp_path / "data")
    assert not [file.name for file in (tmp_path / "data" / "multi30k").iterdir() if file.name.startswith("val.de")]


def test_a_language_that_it_does_not_have(tmp_path: Path, page: Path) -> None:
    with pytest.raises(RunError, match=r"has no train\.xx"):
        load_parallel("multi30k:from=xx", tmp_path / "data")
