import dataclasses
import gzip
import hashlib
import os
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pointsman._errors import RunError
from pointsman_lab.data import catalog, corpus, download, sources
from pointsman_lab.data.corpus import Corpus, load_corpus
from pointsman_lab.data.vocabulary import Vocabulary

TEXT = "".join(f"line {number} of a small text\n" for number in range(200))
TINY_ENWIK8 = bytes(range(9, 100)) * 10  # 910 bytes: 700, 110 and 100


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tiny_enwik8(monkeypatch: pytest.MonkeyPatch) -> None:
    """enwik8 as a corpus of 910 bytes."""
    tiny = dataclasses.replace(
        catalog.CORPORA["enwik8"], sizes=(700, 110, 100), md5=hashlib.md5(TINY_ENWIK8).hexdigest()
    )
    replace_corpora(monkeypatch, {**catalog.CORPORA, "enwik8": tiny})


def replace_corpora(monkeypatch: pytest.MonkeyPatch, corpora: Mapping[str, catalog.KnownCorpus]) -> None:
    for module in (catalog, sources, corpus, download):
        monkeypatch.setattr(module, "CORPORA", corpora)


def text_of(loaded: Corpus, split: str) -> bytes:
    return loaded.vocabulary.decode_bytes(loaded.split(split))


def write(path: Path, text: str | bytes = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# --- a file, a folder ---------------------------------------------------------------------------------------------


def test_a_file_is_split_by_position(tmp_path: Path, cache: Path) -> None:
    loaded = load_corpus(str(write(tmp_path / "a.txt")), cache_dir=cache)
    size = len(TEXT)
    assert loaded.splits == ("train", "valid", "test")
    assert [len(loaded.split(split)) for split in loaded.splits] == [
        size * 90 // 100,
        size * 95 // 100 - size * 90 // 100,
        size - size * 95 // 100,
    ]
    assert b"".join(text_of(loaded, split) for split in loaded.splits).decode() == TEXT
    assert loaded.name == "a.txt"
    sizes = f"V {len(set(TEXT))}; tokens: train {size * 90 // 100:,}, valid "
    assert f"a.txt: split by position 90 / 5 / 5 %; bytes, newlines kept; {sizes}" in loaded.description
    assert str(tmp_path) not in loaded.description
    assert isinstance(loaded.split("test"), np.memmap)


def test_word_level(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT + "häßlich")
    words = load_corpus(f"{path}:level=word", cache_dir=cache)
    tokens = [str(words.vocabulary.symbols[index]) for split in words.splits for index in words.split(split)]
    expected = f"{TEXT}häßlich\n".replace("\n", " <eos> ").split()
    trained = set(expected[: len(words.split("train"))])
    assert tokens == [word if word in trained else "<unk>" for word in expected]
    assert tokens[-1] == "<eos>"
    assert words.vocabulary.encode("line 1 häßlich")[2] == words.vocabulary.unknown_id
    assert "words, <eos> for each newline" in words.description
    unknown = [word not in trained for word in expected]
    before_test = len(expected) - len(words.split("test"))
    counts = f"valid {sum(unknown[:before_test])}, test {sum(unknown[before_test:])}"
    assert f"not in the vocabulary: {counts}" in words.description


def test_dropped_newlines(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.txt")
    dropped = load_corpus(f"{path}:newlines=drop", cache_dir=cache)
    joined = "".join(dropped.vocabulary.decode(dropped.split(split)) for split in dropped.splits)
    assert joined == TEXT.replace("\n", "")
    words = load_corpus(f"{path}:newlines=drop:level=word", cache_dir=cache)
    assert words.vocabulary.end_of_line_id is None
    assert sum(len(words.split(split)) for split in words.splits) == 200 * 6
    assert "words, newlines dropped" in words.description
    line = load_corpus(f"{write(tmp_path / 'line.txt', 'a b ' * 200)}:level=word", cache_dir=cache)
    assert "words, newlines dropped" in line.description  # there is no <eos>
    with pytest.raises(RunError, match="contains only newlines"):
        load_corpus(f"{write(tmp_path / 'blank.txt', chr(10) * 100)}:newlines=drop", cache_dir=cache)


def test_bytes_that_only_other_parts_hold_are_kept(tmp_path: Path, cache: Path) -> None:
    loaded = load_corpus(str(write(tmp_path / "a.txt", b"ab" * 100 + b"A\xff")), cache_dir=cache)
    assert loaded.vocabulary.symbols == (*b"ab", ord("A"), 255)
    assert text_of(loaded, "test").endswith(b"A\xff")
    assert "not in the vocabulary" not in loaded.description


def test_a_folder_of_texts(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "texts"
    write(folder / "b.txt", "b" * 500)
    write(folder / "a" / "z.md", "z" * 400)
    write(folder / "c.txt", "c" * 100)
    write(folder / ".hidden", "h" * 1000)
    write(folder / "picture.png", b"\x89PNG\0\0" * 100)
    write(folder / "packed.txt.gz", gzip.compress(b"g" * 1000))
    write(folder / "empty.txt", b"")
    loaded = load_corpus(str(folder), cache_dir=cache)
    assert text_of(loaded, "train") == b"z" * 400 + b"b" * 500
    assert text_of(loaded, "valid") == text_of(loaded, "test") == b"c" * 50
    assert "3 files in the order of their names" in loaded.description
    (folder / "linked").symlink_to(tmp_path)
    told = load_corpus(str(folder), cache_dir=cache).description
    assert "(left out as empty, compressed, no text or a linked folder: 4: empty.txt, …);" in told
    assert "left out" not in load_corpus(str(folder / "a"), cache_dir=cache).description


def test_a_folder_with_its_own_parts(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "data" / "mine"
    write(folder / "train.txt", "the training text")
    write(folder / "dev.txt", "the valid text")
    loaded = load_corpus("mine", data_dir=tmp_path / "data", cache_dir=cache)
    assert loaded.splits == ("train", "valid")
    assert text_of(loaded, "valid") == b"the valid text"
    with pytest.raises(RunError, match="mine has no test split: it has: training and validation"):
        loaded.split("test")
    with pytest.raises(RunError, match="no split 'validation': did you mean 'valid'"):
        loaded.split("validation")
    write(folder / "valid.txt", "another")
    with pytest.raises(RunError, match=r"two valid files: dev\.txt and valid\.txt"):
        load_corpus(str(folder), cache_dir=cache)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.txt.gz", b"\x1f\x8b packed", "the train part by its name, is compressed: decompress it first"),
        ("train.parquet", b"PAR1", "the train part by its name, is a Parquet table: write its text into a text file"),
        ("train.txt", b"", "the train part by its name, is empty or not text"),
        ("Dev.bin", b"a\0b", "the valid part by its name, is empty or not text"),
    ],
)
def test_a_part_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, cache: Path, name: str, content: bytes, message: str
) -> None:
    file = write(tmp_path / "set" / name, content)
    for _ in ("alone", "beside another part"):
        with pytest.raises(RunError, match=message):
            load_corpus(str(tmp_path / "set"), cache_dir=cache)
        write(tmp_path / "set" / "test.txt")
    write(tmp_path / "set" / f"{file.stem.partition('.')[0]}.text")  # the part is there
    assert len(load_corpus(str(tmp_path / "set"), cache_dir=cache).splits) > 1


def test_two_files_on_either_side_of_a_cut(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "t" / "a.txt", "ein Wort")
    write(tmp_path / "t" / "b.txt", "nächste Wörter in dieser Datei hier " * 9)
    loaded = load_corpus(f"{tmp_path / 't'}:level=word", cache_dir=cache)
    words = [loaded.vocabulary.decode(loaded.split(split)).split() for split in loaded.splits]
    first = "ein Wort"
    second = "nächste Wörter in dieser Datei hier " * 9
    assert words[0] + words[1] + words[2] == f"{first} {second}".split()
    size = len((first + second).encode())
    trained = len("".join([*words[0], *" " * (len(words[0]) - 1)]).encode())
    assert size * 0.9 <= trained + 1 < size * 0.9 + len("nächste ".encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", r"empty\.txt is empty"),
        ("packed.gz", gzip.compress(b"text", mtime=0), r"packed\.gz is compressed: decompress it first"),
        ("folder/picture.png", b"\0\0\0", "folder .*folder holds no text file"),
        ("latin.txt:level=word", b"caf\xe9 " * 50, r"latin\.txt: byte 3 \(0xe9\) is not UTF-8, which level=word needs"),
    ],
)
def test_bad_files(tmp_path: Path, cache: Path, name: str, content: bytes, message: str) -> None:
    write(tmp_path / name.partition(":")[0], content)
    spec = "folder" if "/" in name else name
    with pytest.raises(RunError, match=message) as caught:
        load_corpus(spec, data_dir=tmp_path, cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("tokens/*"))


def test_what_is_not_there(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(RunError, match=r"'enwik9': did you mean 'enwik8'.*or the path of a text file or folder"):
        load_corpus("enwik9", cache_dir=cache)
    with pytest.raises(RunError, match="there is no file or folder no/such"):
        load_corpus("no/such", cache_dir=cache)
    with pytest.raises(RunError, match=r"the data folder .*gone is not a folder"):
        load_corpus("stdlib", data_dir=tmp_path / "gone", cache_dir=cache)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="pipe is not an ordinary file"):
        load_corpus(str(tmp_path / "pipe"), cache_dir=cache)


@pytest.mark.parametrize("name", [".", "./", "./mine.txt", "../here", "../here/mine.txt"])
def test_a_path_from_the_current_folder_is_read_there(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path / "data" / "mine.txt", "d" * 500)
    write(tmp_path / "here" / "mine.txt", "h" * 500)
    write(cache / "downloads" / "mine.txt", "c" * 500)
    monkeypatch.chdir(tmp_path / "here")
    for folder in (None, tmp_path / "data"):
        assert text_of(load_corpus(name, data_dir=folder, cache_dir=cache), "test") == b"h" * 25
    assert text_of(load_corpus("mine.txt", data_dir=tmp_path / "data", cache_dir=cache), "test") == b"d" * 25


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read everything")
def test_no_permission(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "secret.txt")
    path.chmod(0)
    with pytest.raises(RunError, match=r"no permission to read .*secret\.txt"):
        load_corpus(str(path), cache_dir=cache)


# --- the cache's key, the fingerprint, the vocabulary of a run ------------------------------------------------------


def test_the_cache_follows_the_file(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "data" / "a.txt")
    first = load_corpus(str(path), cache_dir=cache)
    again = load_corpus(str(path), cache_dir=cache)
    assert len(list((cache / "tokens").iterdir())) == 1
    assert first.fingerprint == again.fingerprint
    write(path, TEXT.replace("small", "large"))
    os.utime(path, (1, 1))
    other = load_corpus(str(path), cache_dir=cache)
    assert len(list((cache / "tokens").iterdir())) == 2
    assert other.fingerprint != first.fingerprint
    assert text_of(other, "train").startswith(b"line 0 of a large text")
    write(path, TEXT.replace("small", "broad"))  # of the same size, and as `cp -p` leaves it of the same time
    os.utime(path, (1, 1))
    assert text_of(load_corpus(str(path), cache_dir=cache), "train").startswith(b"line 0 of a broad text")
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]


def test_without_a_cache_the_data_are_the_same(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.txt")
    blocked = write(tmp_path / "blocked")
    with pytest.warns(UserWarning, match="tokens stay in memory"):
        in_memory = load_corpus(str(path), cache_dir=blocked)
    cached = load_corpus(str(path), cache_dir=cache)
    assert in_memory.fingerprint == cached.fingerprint
    assert in_memory.description == cached.description
    assert np.array_equal(in_memory.split("train"), cached.split("train"))


def test_the_vocabulary_of_a_run(tmp_path: Path, cache: Path) -> None:
    trained = Vocabulary.of_bytes(b"abcdefghijklmnopqrstuvwxyz ?")
    loaded = load_corpus(str(write(tmp_path / "a.txt", "Hello there\n" * 20)), cache_dir=cache, vocabulary=trained)
    assert loaded.vocabulary == trained
    assert text_of(loaded, "train").startswith(b"?ello there ?ello")
    assert "not in the vocabulary: train 36, valid 2, test 2" in loaded.description
    assert load_corpus(str(tmp_path / "a.txt"), cache_dir=cache).vocabulary != trained
    with pytest.raises(RunError, match="asks for level=word, but the run's vocabulary is byte-level"):
        load_corpus(f"{tmp_path / 'a.txt'}:level=word", cache_dir=cache, vocabulary=trained)


def test_progress_reaches_the_end(tmp_path: Path, cache: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load_corpus(str(write(tmp_path / "a.txt")), cache_dir=cache, progress=lambda *call: calls.append(call))
    assert calls[0][0] == "reading a.txt"
    assert calls[-1] == ("tokenizing a.txt", len(TEXT), len(TEXT))
    assert all(0 < done <= total for _, done, total in calls)


# --- named corpora --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_enwik8")
@pytest.mark.parametrize("place", ["enwik8/enwik8.gz", "enwik8/enwik8", "enwik8.zip", "enwik8"])
@pytest.mark.parametrize("by_path", [False, True])
def test_enwik8_is_found_in_all_its_forms(tmp_path: Path, cache: Path, place: str, by_path: bool) -> None:
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("enwik8", TINY_ENWIK8)
    else:
        path.write_bytes(gzip.compress(TINY_ENWIK8) if path.suffix == ".gz" else TINY_ENWIK8)
    spec = str(path) if by_path else "enwik8"
    loaded = load_corpus(spec, data_dir=None if by_path else tmp_path / "data", cache_dir=cache)
    assert loaded.name == "enwik8"
    assert [len(loaded.split(split)) for split in loaded.splits] == [700, 110, 100]
    assert b"".join(text_of(loaded, split) for split in loaded.splits) == TINY_ENWIK8
    dropped = load_corpus(f"{spec}:newlines=drop", data_dir=None if by_path else tmp_path / "data", cache_dir=cache)
    assert dropped.vocabulary.size == loaded.vocabulary.size - 1 == 90
    assert text_of(dropped, "valid") == TINY_ENWIK8[700:810].replace(b"\n", b"")


@pytest.mark.usefixtures("tiny_enwik8")
def test_a_wrong_enwik8_is_refused(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "enwik8", TINY_ENWIK8[:-1] + b"!")
    with pytest.raises(RunError, match=r"has the md5 .* damaged, or another file"):
        load_corpus("enwik8", data_dir=tmp_path, cache_dir=cache)
    write(path, TINY_ENWIK8[:-1])
    with pytest.raises(RunError, match="has 909 bytes of text, expected 910"):
        load_corpus("enwik8", data_dir=tmp_path, cache_dir=cache)


def test_wikitext_comes_in_parts(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "wikitext-103"
    write(folder / "wiki.train.tokens", " \n = A <unk> = \n \n a a b \n")
    write(folder / "wiki.valid.tokens", " a c \n")
    write(folder / "wiki.test.tokens", " b \n")
    loaded = load_corpus("wikitext-103", data_dir=tmp_path, cache_dir=cache)
    assert loaded.vocabulary.symbols == ("<eos>", "=", "a", "<unk>", "A", "b")
    assert loaded.vocabulary.decode(loaded.split("train")) == "\n= A <unk> =\n\na a b\n"
    assert loaded.split("valid").tolist() == [2, 3, 0]
    by_path = load_corpus(str(folder), cache_dir=cache)
    assert by_path.name == "wikitext-103"
    assert by_path.fingerprint == loaded.fingerprint
    folder.rename(tmp_path / "another-name")
    assert load_corpus(str(tmp_path / "another-name"), cache_dir=cache).fingerprint == loaded.fingerprint


def test_without_a_training_part(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "wikitext-2"
    write(folder / "wiki.valid.tokens", " a c \n")
    write(folder / "wiki.test.tokens", " b \n")
    message = (
        r"wikitext-2 has no training split \(wiki\.train\.tokens is missing\): it can be evaluated, not trained on"
    )
    with pytest.raises(RunError, match=message):
        load_corpus("wikitext-2", data_dir=tmp_path, cache_dir=cache)
    vocabulary = Vocabulary.of_words({"a": 2, "b": 1, "<eos>": 3})
    for loaded in (
        load_corpus("wikitext-2", data_dir=tmp_path, cache_dir=cache, vocabulary=vocabulary),
        load_corpus("wikitext-2:level=byte", data_dir=tmp_path, cache_dir=cache),
    ):
        assert loaded.splits == ("valid", "test")
        assert len(loaded.split("valid")) > 0
        with pytest.raises(RunError, match=message):
            loaded.split("train")


def test_stdlib_is_the_same_everywhere_and_leaks_nothing(cache: Path) -> None:
    loaded = load_corpus("stdlib", cache_dir=cache)
    sizes = {split: len(loaded.split(split)) for split in loaded.splits}
    assert sizes["train"] > 10 * sizes["valid"] > 100_000
    assert sizes["train"] > 10 * sizes["test"] > 100_000
    source = sources._stdlib("byte")
    root = Path(sysconfig.get_path("stdlib"))
    names = {split: [span.path.relative_to(root).as_posix() for span in spans] for split, spans in source.parts.items()}
    assert all(part == sorted(part) for part in names.values())
    assert not set(names["train"]) & (set(names["valid"]) | set(names["test"]))
    assert not set(names["valid"]) & set(names["test"])
    everything = [name for part in names.values() for name in part]
    assert {"abc.py", "asyncio/tasks.py", "json/decoder.py"} <= set(everything)
    assert not [
        name for name in everything if "/test/" in f"/{name}" or "site-packages" in name or "sysconfigdata" in name
    ]
    assert text_of(loaded, "train") == b"".join((root / name).read_bytes() for name in names["train"])
    assert "abc.py" in names["train"]  # the split may never move: results would not compare


# --- downloads ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_enwik8")
def test_a_missing_corpus_is_downloaded_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "far" / "enwik8.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("enwik8", TINY_ENWIK8)
    monkeypatch.setitem(download.PAGES, "enwik8", archive.as_uri())
    stages: list[str] = []
    loaded = load_corpus("enwik8", cache_dir=cache, progress=lambda what, done, total: stages.append(what))
    assert text_of(loaded, "test") == TINY_ENWIK8[810:]
    assert stages[0] == "downloading enwik8"
    archive.unlink()
    assert load_corpus("enwik8", cache_dir=cache).fingerprint == loaded.fingerprint
    assert [path.name for path in (cache / "downloads" / "enwik8").iterdir()] == ["enwik8.zip"]


@pytest.mark.usefixtures("tiny_enwik8")
def test_a_download_that_is_not_the_corpus_is_thrown_away(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "other.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("enwik8", TINY_ENWIK8[::-1])
    monkeypatch.setitem(download.PAGES, "enwik8", archive.as_uri())
    with pytest.raises(RunError, match=r"the download of enwik8\.zip has the md5"):
        load_corpus("enwik8", cache_dir=cache)
    assert list((cache / "downloads" / "enwik8").iterdir()) == []


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_no_network_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(download.PAGES, name, "http://127.0.0.1:9/corpus.zip")
    with pytest.raises(
        RunError,
        match=rf"{name} is not under the data folder \(POINTSMAN_DATA\) and cannot be downloaded \(no network\?\)",
    ) as caught:
        load_corpus(name, cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert list((cache / "downloads" / name).iterdir()) == []


ROWS = {"train": ["", " = Title = \n", "", " a b <unk> \n"], "validation": [" a \n"], "test": [" b \n"]}


def fake_hub(monkeypatch: pytest.MonkeyPatch, rows: Mapping[str, list[str]] | Exception) -> None:
    module = ModuleType("datasets")

    def load_dataset(repository: str, name: str, split: str) -> list[dict[str, str]]:
        assert (repository, name) == ("Salesforce/wikitext", "wikitext-2-v1")
        if isinstance(rows, Exception):
            raise rows
        return [{"text": text} for text in rows[split]]

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_wikitext_comes_from_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, ROWS)
    monkeypatch.setitem(download.WIKITEXT_TOKENS, "wikitext-2", {"train": 10, "valid": 2, "test": 2})
    loaded = load_corpus("wikitext-2", cache_dir=cache)
    assert loaded.vocabulary.decode(loaded.split("train")) == "\n= Title =\n\na b <unk>\n"
    assert loaded.splits == ("train", "valid", "test")
    fake_hub(monkeypatch, ConnectionError("not asked again"))
    assert load_corpus("wikitext-2", cache_dir=cache).fingerprint == loaded.fingerprint


@pytest.mark.parametrize("by_path", [False, True])
def test_a_download_that_broke_off_goes_on(cache: Path, monkeypatch: pytest.MonkeyPatch, by_path: bool) -> None:
    fake_hub(monkeypatch, {**ROWS, "train": []})
    monkeypatch.setitem(download.WIKITEXT_TOKENS, "wikitext-2", {"train": 10, "valid": 2, "test": 2})
    folder = cache / "downloads/wikitext-2"
    write(folder / "wiki.train.tokens", "the first file\n")
    loaded = load_corpus(str(folder) if by_path else "wikitext-2", cache_dir=cache)
    assert loaded.splits == ("train", "valid", "test")
    assert loaded.vocabulary.decode(loaded.split("train")) == "the first file\n"


def test_the_hub_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, ROWS)
    with pytest.raises(RunError, match="wikitext-2 train from the hub has 10 tokens, expected 2,088,628"):
        load_corpus("wikitext-2", cache_dir=cache)
    fake_hub(monkeypatch, RuntimeError("Cannot reach\nthe hub"))
    with pytest.raises(RunError, match=r"cannot be downloaded \(no network\?\): Cannot reach the hub"):
        load_corpus("wikitext-2", cache_dir=cache)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RunError, match=r"pip install 'pointsman\[hf\]'"):
        load_corpus("wikitext-2", cache_dir=cache)


def test_no_place_for_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"enwik8 cannot be downloaded: .* cannot be created"):
        load_corpus("enwik8", cache_dir=write(tmp_path / "file"))


# --- real data ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_enwik8(cache: Path, data_dir: Path) -> None:
    kept = load_corpus("enwik8", data_dir=data_dir, cache_dir=cache)
    assert kept.vocabulary.size == 205
    assert [len(kept.split(split)) for split in kept.splits] == [90_000_000, 5_000_000, 5_000_000]
    assert kept.split("train").dtype == np.uint8
    assert "not in the vocabulary" not in kept.description
    assert [len(np.unique(kept.split(split))) for split in kept.splits] == [205, 203, 198]
    dropped = load_corpus("enwik8:newlines=drop", data_dir=data_dir, cache_dir=cache)
    assert dropped.vocabulary.size == 204
    for split in kept.splits:
        newlines = int(np.count_nonzero(kept.split(split) == kept.vocabulary.encode("\n")[0]))
        assert len(dropped.split(split)) == len(kept.split(split)) - newlines


def test_the_real_wikitext_has_its_published_numbers_of_tokens(cache: Path, data_dir: Path) -> None:
    vocabulary = Vocabulary.of_words({"the": 1, "<eos>": 1, "<unk>": 1})
    loaded = load_corpus("wikitext-2", data_dir=data_dir, cache_dir=cache, vocabulary=vocabulary)
    assert (len(loaded.split("valid")), len(loaded.split("test"))) == (217_646, 245_569)


def test_the_text_of_a_part_needs_no_training_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " \n = A <unk> = \n  two  spaces é\n"
    write(tmp_path / "wikitext-2" / "wiki.test.tokens", text)
    write(tmp_path / "wikitext-2" / "wiki.valid.tokens", text)
    monkeypatch.setenv("POINTSMAN_DATA", str(tmp_path))
    with pytest.raises(RunError, match="has no training split"):
        corpus.open_corpus("wikitext-2")
    for spec in ("wikitext-2", "wikitext-2:level=word"):
        opened = corpus.open_text(spec)
        assert opened.vocabulary.decode(opened.split("test")) == text
