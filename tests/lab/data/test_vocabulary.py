import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman._errors import RunError
from pointsman_lab.data.vocabulary import Vocabulary


def of_words(text: str) -> Vocabulary:
    return Vocabulary.of_words(Counter(text.replace("\n", " <eos> ").split()))


@given(st.binary(min_size=1))
def test_bytes_round_trip(data: bytes) -> None:
    vocabulary = Vocabulary.of_bytes(data)
    assert vocabulary.size == len(set(data))
    ids = vocabulary.encode(data)
    assert ids.dtype == np.int64
    assert len(ids) == len(data)
    assert vocabulary.decode_bytes(ids) == data


def test_bytes_of_other_parts_come_after_those_of_training() -> None:
    vocabulary = Vocabulary.of_bytes(b"cba", b"zaA")
    assert vocabulary.symbols == (*b"abc", *b"Az")
    assert vocabulary.unknown_id is None


def test_bytes_never_seen_keep_their_place() -> None:
    vocabulary = Vocabulary.of_bytes(b"ab ?")
    ids, unknown = vocabulary.encode_compact("aXb\n\tb")
    assert vocabulary.decode(ids) == "a?b  b"
    assert unknown == 3
    assert ids.dtype == np.uint8


def test_bytes_never_seen_without_stand_ins_are_still_ids() -> None:
    vocabulary = Vocabulary.of_bytes(b"ab")
    assert vocabulary.encode("a\nZ").tolist() == [0, 0, 0]


def test_words_are_ordered_by_count_then_by_themselves() -> None:
    vocabulary = of_words("b a a\nc b a\n")
    assert vocabulary.symbols == ("a", "<eos>", "b", "c", "<unk>")
    assert (vocabulary.end_of_line_id, vocabulary.unknown_id) == (1, 4)


def test_words_blank_lines_case_and_unknown_words() -> None:
    vocabulary = of_words("The the\n\ncat\n")
    ids, unknown = vocabulary.encode_compact("The dog\n\n the  CAT\n")
    words = [vocabulary.symbols[index] for index in ids]
    assert words == ["The", "<unk>", "<eos>", "<eos>", "the", "<unk>", "<eos>"]
    assert unknown == 2
    assert vocabulary.decode(ids) == "The <unk>\n\nthe <unk>\n"


def test_unknown_marks_of_the_text_itself_are_words() -> None:
    vocabulary = of_words("a <unk> <unk>\n")
    assert vocabulary.size == 3
    assert vocabulary.encode_compact("<unk> b")[1] == 1


@given(st.lists(st.lists(st.text("abé<", min_size=1), max_size=4), min_size=1, max_size=5))
def test_words_round_trip(lines: list[list[str]]) -> None:
    text = "\n".join(" ".join(line) for line in lines)
    vocabulary = of_words(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_words_without_newlines() -> None:
    vocabulary = Vocabulary.of_words(Counter(["a", "b"]))
    assert vocabulary.end_of_line_id is None
    assert vocabulary.decode(vocabulary.encode("a\nb b\n")) == "a b b"


@pytest.mark.parametrize("vocabulary", [Vocabulary.of_bytes(b"\x00\xffa"), of_words("é x\n")])
def test_json_round_trip(vocabulary: Vocabulary) -> None:
    again = Vocabulary.from_json(vocabulary.to_json())
    assert again == vocabulary
    assert hash(again) == hash(vocabulary)
    assert again.digest == vocabulary.digest
    assert "\n" not in vocabulary.to_json()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"level": "byte", "symbols": [300]}', '{"level": "words", "symbols": ["a"]}']
)
def test_a_foreign_json_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(RunError, match="not a vocabulary"):
        Vocabulary.from_json(text)


def test_type_grows_with_the_vocabulary() -> None:
    for size, dtype in ((255, np.uint8), (256, np.uint16), (65_536, np.int32)):
        symbols = ["<unk>", *(f"w{index}" for index in range(size))]
        assert Vocabulary("word", symbols).dtype == dtype


def test_ids_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        Vocabulary.of_bytes(b"ab").decode([2])
    with pytest.raises(ValueError, match="ids are from -1"):
        Vocabulary.of_bytes(b"ab").decode(np.array([-1]))


@pytest.mark.parametrize(
    ("level", "symbols", "message"),
    [
        ("line", ["a"], "vocabulary level is 'line'"),
        ("byte", [], "distinct"),
        ("byte", [1, 1], "distinct"),
        ("byte", ["a"], "type int"),
        ("char", ["<unk>", "a"], "vocabulary level is 'char'; allowed: byte, word"),
        ("word", ["a"], "<unk>"),
    ],
)
def test_impossible_vocabularies(level: str, symbols: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary(level, symbols)  # type: ignore[arg-type]


def test_bytes_that_are_not_text_are_refused_above_byte_level() -> None:
    with pytest.raises(RunError, match="byte 2 of the text is not UTF-8"):
        of_words("ab").encode(b"ab\xff")


def test_json_is_plain() -> None:
    assert json.loads(Vocabulary.of_bytes(b"ba").to_json()) == {"level": "byte", "symbols": [97, 98]}
