import gzip
import hashlib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman._errors import RunError
from pointsman_lab._shapes import MOST_LINE
from pointsman_lab.data import reading
from pointsman_lab.data.pieces import UNKNOWN, MultilingualText, learn_pieces
from pointsman_lab.data.reading import Reader, Span, align, check_md5, read_lines
from pointsman_lab.tasks.classification.files import Columns, read_labelled


def whole(path: Path) -> Span:
    return Span(path, 0, path.stat().st_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reading")


@settings(deadline=None)
@given(text=st.text("ab \né𝄞", max_size=60), block=st.integers(1, 9), cut=st.integers(0, 60))
def test_blocks_end_between_tokens(folder: Path, text: str, block: int, cut: int) -> None:
    path = folder / "text"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch, Reader() as reader:
        patch.setattr(reading, "BLOCK", block)
        assert b"".join(reader.raw(whole(path))) == text.encode()
        assert "".join(map(str, reader.blocks(whole(path), "subword"))) == text
        words = [word for piece in reader.blocks(whole(path), "word") for word in str(piece).split()]
        assert words == text.split()
        size = path.stat().st_size
        for level in ("subword", "word"):
            place = align(path, min(cut, size), size, level)  # type: ignore[arg-type]
            halves = [Span(path, 0, place, whole_end=place == size), Span(path, place, size)]
            pieces = [str(piece) for half in halves for piece in reader.blocks(half, level)]  # type: ignore[arg-type]
            if level == "subword":
                assert "".join(pieces) == text
            else:
                assert [word for piece in pieces for word in piece.split()] == text.split()


def test_the_last_line_gets_its_newline_at_word_level_only(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a b\nc")
    with Reader() as reader:
        assert "".join(map(str, reader.blocks(whole(path), "word"))) == "a b\nc\n"
        assert "".join(map(str, reader.blocks(whole(path), "subword"))) == "a b\nc"
        assert "".join(map(str, reader.blocks(Span(path, 0, 1, whole_end=False), "word"))) == "a"


@pytest.mark.parametrize("level", ["subword", "word"])
def test_bytes_that_are_not_text_are_named_by_file_and_offset(
    tmp_path: Path, level: reading.Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK", 7)
    path = tmp_path / "latin1.txt"
    path.write_bytes("naïve ".encode() * 5 + b"caf\xe9 au lait " * 3)
    with Reader() as reader, pytest.raises(RunError, match=r"latin1\.txt: byte 38 \(0xe9\) is not UTF-8.*level=byte"):
        list(reader.blocks(whole(path), level))
    with Reader() as reader:
        assert b"".join(reader.raw(whole(path))) == path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbfab\xff")
    with Reader() as reader, pytest.raises(RunError, match=r"byte 5 \(0xff\)"):
        list(reader.blocks(whole(path), level))


def test_packed_files_read_like_plain_ones(tmp_path: Path) -> None:
    text = bytes(range(256)) * 50
    plain, packed, archive = tmp_path / "t", tmp_path / "t.gz", tmp_path / "t.zip"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("t", text)
    for path in (plain, packed, archive):
        with Reader() as reader:
            parts = [
                b"".join(reader.raw(Span(path, start, stop))) for start, stop in ((0, 5000), (5000, 9000), (10, 20))
            ]
        assert parts == [text[:5000], text[5000:9000], text[10:20]]
        assert list(check_md5(path, len(text), hashlib.md5(text).hexdigest()))[-1] == len(text)


def test_damaged_files(tmp_path: Path) -> None:
    packed = gzip.compress(b"some text " * 1000)
    for name, data in (("cut.gz", packed[:-20]), ("other.gz", b"not packed"), ("bad.zip", b"PK not a zip")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(RunError, match=f"{name} is damaged"):
            list(check_md5(path, 10_000, ""))


def test_wrong_sizes_and_checksums(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc")
    with pytest.raises(RunError, match="has 3 bytes of text, expected 4"):
        list(check_md5(path, 4, ""))
    with pytest.raises(RunError, match="has the md5 900150983cd24fb0d6963f7d28e17f72, expected 0000: damaged"):
        list(check_md5(path, 3, "0000"))
    with Reader() as reader, pytest.raises(RunError, match="ends 2 bytes too early"):
        list(reader.raw(Span(path, 0, 5)))
    with Reader() as reader, pytest.raises(RunError, match="there is no file"):
        list(reader.raw(Span(tmp_path / "gone", 0, 5)))


def test_an_archive_must_hold_one_file(tmp_path: Path) -> None:
    path = tmp_path / "two.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", "a")
        file.writestr("b", "b")
    with pytest.raises(RunError, match="must hold one file, and holds 2"):
        list(check_md5(path, 1, ""))


def test_no_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(reading, "open_unpacked", refuse)  # the user who runs the tests may be allowed everything
    with Reader() as reader, pytest.raises(RunError, match=r"no permission to read .*secret\.txt"):
        list(reader.raw(Span(tmp_path / "secret.txt", 0, 5)))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfone two\nthree\n")
    assert list(reading.read_lines(file)) == [(1, "one two"), (2, "three")]
    with Reader() as reader:
        for level in ("word", "subword"):
            assert "".join(map(str, reader.blocks(whole(file), level))) == "one two\nthree\n"  # type: ignore[arg-type]
        assert b"".join(reader.blocks(whole(file), "byte")) == file.read_bytes()  # type: ignore[arg-type]


def test_long_lines_teach_pieces_too() -> None:
    words = ["да", "нет", "может", "быть", "слово", "дело"]
    line = " ".join(words[place % 6] for place in range(2000))
    pieces = learn_pieces(MultilingualText("mine", {"ru": (line,)}, {}), 30)
    assert UNKNOWN not in pieces.encode("может быть слово")


def test_a_small_archive_that_becomes_much_is_not_unpacked_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(3 * reading.BLOCK)))
    with pytest.raises(RunError, match=r"bomb\.gz has more than the 1,000 bytes"):
        list(check_md5(path, 1_000, ""))
    path.write_bytes(gzip.compress(b"a\tb\n" + bytes(MOST_LINE + 1)))
    lines = read_lines(path)
    assert next(lines) == (1, "a\tb")
    with pytest.raises(RunError, match=r"bomb\.gz: line 2 has more than"):
        next(lines)
    path.rename(tmp_path / "bomb.tsv.gz")
    with pytest.raises(RunError, match=r"bomb\.tsv\.gz, line 2: more than"):
        read_labelled(tmp_path / "bomb.tsv.gz", Columns(header=False, text="0", label="1"))


def test_an_archive_that_is_encrypted_or_packed_otherwise(tmp_path: Path) -> None:
    for name, kind in (("e.zip", zipfile.ZIP_STORED), ("b.zip", zipfile.ZIP_BZIP2)):
        with zipfile.ZipFile(tmp_path / name, "w", kind) as file:
            file.writestr("t", "some text")
    content = bytearray((tmp_path / "e.zip").read_bytes())
    content[6] |= 1  # of the local header
    content[content.index(b"PK\x01\x02") + 8] |= 1  # and of the directory
    (tmp_path / "e.zip").write_bytes(content)
    for name in ("e.zip", "b.zip"):
        with pytest.raises(RunError, match=rf"{name}: encrypted, or packed in another way"):
            list(check_md5(tmp_path / name, 9, ""))
