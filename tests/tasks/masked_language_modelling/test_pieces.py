"""Pieces: reproducible, with offsets in the original text."""

import struct
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.data.pieces import Pieces, open_pieces, train_pieces
from pointsman_lab.tasks.masked_language_modelling.text import MultilingualText


def test_training_twice_gives_the_same_model(text: MultilingualText) -> None:
    first, second = (train_pieces(text.train["aa"][:300], 90) for _ in range(2))
    assert first.model == second.model
    assert first.size == 90


def test_ids_are_in_the_order_of_xlm_r(pieces: Pieces) -> None:
    assert pieces.symbols[:4] == ("<s>", "<pad>", "</s>", "<unk>")
    assert pieces.symbols[pieces.mask_id] == "<mask>"
    assert pieces.special.nonzero()[0].tolist() == sorted([0, 1, 2, pieces.mask_id])


def test_offsets_are_those_of_the_original_text(pieces: Pieces) -> None:
    sentence = "ab  cde  ﬁ."  # two spaces and a ligature, which normalisation changes
    ids, offsets = pieces.encode_with_offsets(sentence)
    assert ids.tolist() == pieces.encode(sentence).tolist()
    assert "".join(sentence[start:end] for start, end in offsets) == sentence


def test_characters_count_the_text(pieces: Pieces, text: MultilingualText) -> None:
    sentence = text.train["aa"][5]
    assert pieces.characters[pieces.encode(sentence)].sum() == len(sentence) + 1  # the space that starts the first word


def test_round_trips(pieces: Pieces, text: MultilingualText) -> None:
    sentence = text.train["bb"][0]
    assert pieces.decode(pieces.encode(sentence)) == sentence
    assert Pieces.from_json(pieces.to_json()) == pieces


@pytest.mark.parametrize(
    ("size", "words"),
    [(8, "at least 16"), (20, r"its characters need at least \d+$"), (100_000, r"it gives at most \d+$")],
)
def test_impossible_sizes_are_one_line(text: MultilingualText, size: int, words: str) -> None:
    with pytest.raises(RunError, match=f"{size} pieces.*{words}") as caught:
        train_pieces(text.train["aa"][:50], size)
    assert "\n" not in str(caught.value)


def message(field: int, content: bytes) -> bytes:
    """A field of bytes in protocol buffers' form."""
    size, length = len(content), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([field << 3 | 2]) + length + bytes([size]) + content


def test_a_file_of_the_size_of_xlm_rs(tmp_path: Path) -> None:
    """A made one: XLM-R's own has 250,000 pieces in this order, and `<pad>` and `<mask>` are added by its readers."""
    letters = [chr(0x4E00 + place) for place in range(500)]
    words = [f"\u2581{one}{other}" for one in letters for other in letters]
    names = ["<unk>", "<s>", "</s>", "\u2581", *letters, *words][:250_000]
    kinds = [2, 3, 3] + [1] * (len(names) - 3)
    made = [
        message(1, message(1, name.encode()) + b"\x15" + struct.pack("<f", -len(name)) + bytes([0x18, kind]))
        for name, kind in zip(names, kinds, strict=True)
    ]
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"".join(made))
    found = open_pieces(tmp_path)
    assert (found.size, found.mask_id, found.published) == (250_002, 250_001, True)
    assert found.symbols[:5] == ("<s>", "<pad>", "</s>", "<unk>", "\u2581")
    text = f"{words[7][1:]} {words[1000][1:]}"
    assert found.encode(text).tolist() == [names.index(words[7]) + 1, names.index(words[1000]) + 1]
    assert found.decode(found.encode(text)) == text
    assert found.encode("q").tolist()[-1] == 3


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": "!"}', '{"model": "AAAA"}'])
def test_a_foreign_vocabulary_is_refused(content: str) -> None:
    with pytest.raises(RunError, match=r"SentencePiece model|vocabulary of pieces"):
        Pieces.from_json(content)
