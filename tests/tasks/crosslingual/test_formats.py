"""Files of the cross-lingual tasks, their splits, and that no reported sentence is in the pre-training text."""

import gzip
import json
import math
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.tasks.crosslingual.formats import Pair, Tagged, read_pairs, read_questions, read_tagged
from pointsman_lab.tasks.crosslingual.xtreme import PANX_TAGS, UPOS, XTREME, available, components, load_task, texts
from pointsman_lab.tasks.masked_language_modelling.text import near, normal, read_text, reported_sentences

LABELS = ("contradiction", "entailment", "neutral")


def question(start: int = 4, text: str = "cat") -> dict[str, object]:
    return {"id": "q1", "question": "Who?", "answers": [{"text": text, "answer_start": start}]}


def write_questions(file: Path, *items: dict[str, object]) -> Path:
    file.write_text(json.dumps({"data": [{"paragraphs": [{"context": "The cat sat.", "qas": list(items)}]}]}))
    return file


def test_pairs(tmp_path: Path) -> None:
    file = tmp_path / "dev-en.tsv.gz"
    with gzip.open(file, "wt", encoding="utf-8") as opened:
        opened.write('He said "so".\tHe spoke.\tentailment\n')
    (pair,) = read_pairs(file, LABELS)["en"]
    assert (pair.first, pair.second, pair.label) == ('He said "so".', "He spoke.", "entailment")


def test_wikiann_and_its_language_prefix(tmp_path: Path) -> None:
    file = tmp_path / "train-en.tsv"
    file.write_text("en:Jane\tB-PER\nat\tO\nen:10:30\tO\n\nde:x\tO\n")
    assert read_tagged(file, PANX_TAGS, "en") == [
        Tagged(("Jane", "at", "10:30"), ("B-PER", "O", "O")),
        Tagged(("de:x",), ("O",)),
    ]


def test_conllu_passes_multi_word_tokens_over(tmp_path: Path) -> None:
    rest = "	_" * 6
    rows = [
        "# text = Au lait",
        f"1-2	Au	_	_{rest}",
        f"1	À	à	ADP{rest}",
        f"2	le	le	DET{rest}",
        f"2.1	x	x	X{rest}",
        f"3	lait	lait	NOUN{rest}",
    ]
    file = tmp_path / "fr.conllu"
    file.write_text("\n".join([*rows, "", ""]))
    assert read_tagged(file, UPOS) == [Tagged(("À", "le", "lait"), ("ADP", "DET", "NOUN"))]


def test_questions(tmp_path: Path) -> None:
    (found,) = read_questions(write_questions(tmp_path / "a.json", question()))
    assert found.answers == (("cat", 4),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a\tb\tneutral\na\tb\n", "line 2 has no label"),
        ("a\n", "1 columns"),
        ("a\tb\tneutrl\n", "did you mean 'neutral'"),
        ("", "has no row"),
    ],
)
def test_pairs_refuse_with_file_and_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "dev-en.tsv"
    file.write_text(content)
    with pytest.raises(RunError, match=f"dev-en.tsv.*{words}"):
        read_pairs(file, LABELS)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("dev-de.tsv", "Jane\tB-PER\nat\tB-PRE\n", "line 2: unknown tag 'B-PRE': did you mean 'B-PER'"),
        ("test-de.tsv", "Jane\n", "line 1 has 1 columns; 2 are expected"),
        ("de.conllu", "# text = a\n1\ta\n", "line 2 has 2 columns; 10 are expected"),
    ],
)
def test_tags_refuse_with_file_and_line(tmp_path: Path, name: str, content: str, words: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(RunError, match=f"{name}.*{words}"):
        read_tagged(file, PANX_TAGS)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (question(3), "'q1' does not stand at character 3"),
        (question(-8), "'q1' does not stand at character -8"),
        (question(0, ""), "'q1' has an empty answer"),
        ({"id": "q1", "question": "Who?"}, r"question 'q1' is not in SQuAD's form \(no 'answers'\)"),
        ({**question(), "answers": [{"text": "cat", "answer_start": math.inf}]}, "question 'q1' is not in SQuAD's"),
        ({}, "no 'id'"),
    ],
)
def test_questions_refuse_with_their_id(tmp_path: Path, item: dict[str, object], words: str) -> None:
    with pytest.raises(RunError, match=f"a.json.*{words}"):
        read_questions(write_questions(tmp_path / "a.json", item))


def test_two_questions_with_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"a.json: 2 questions have the id 'q1'"):
        read_questions(write_questions(tmp_path / "a.json", question(), question()))


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"data": 3}', b"\xff\xfe", b"[" * 100_000, rb'["\ud800"]'])
def test_questions_of_another_form_are_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"a.json: not in SQuAD's form"):
        read_questions(file)


def test_components_join_pairs_that_share_a_sentence() -> None:
    names = components([("a", "b"), ("c", "d"), ("b", "e"), ("f", "d")])
    assert names[0] == names[2] != names[1] == names[3]


def test_multilingual_folders(tmp_path: Path) -> None:
    (tmp_path / "en.txt").write_text("One  two.\n\nThree.\n")
    (tmp_path / "de").mkdir()
    (tmp_path / "de" / "train.txt").write_text("Eins.\n")
    (tmp_path / "de" / "valid.txt").write_text("Zwei.\n")
    text = read_text(f"multilingual:{tmp_path}")
    assert dict(text.train) == {"de": ("Eins.",), "en": ("One two.", "", "Three.")}
    assert dict(text.valid) == {"de": ("Zwei.",)}
    assert list(read_text(f"multilingual:{tmp_path}:languages=en").train) == ["en"]
    with pytest.raises(RunError, match="no text in 'fr'"):
        read_text(f"multilingual:{tmp_path}:languages=fr")
    (tmp_path / "de.wiki.txt").write_text("Drei.\n")
    assert dict(read_text(f"multilingual:{tmp_path}").train) == {**text.train, "de.wiki": ("Drei.",)}
    (tmp_path / "de.wiki.txt").unlink()
    for other in ("de.txt", "en.txt.gz"):
        (tmp_path / other).write_bytes(gzip.compress(b"x\n") if other.endswith(".gz") else b"x\n")
        with pytest.raises(RunError, match=rf"{other[:2]!r} has two files, one is {other}: leave one there"):
            read_text(f"multilingual:{tmp_path}")
        (tmp_path / other).unlink()
    (tmp_path / "sw.txt").write_text("\n")
    with pytest.raises(RunError, match="'sw' has no text"):
        read_text(f"multilingual:{tmp_path}")
    (tmp_path / "sw.txt").unlink()
    (tmp_path / "de" / "valid.txt").write_text("\n")
    with pytest.raises(RunError, match="'de' has no text for validation"):
        read_text(f"multilingual:{tmp_path}")


def test_xnli_is_split_by_premise(data_dir: Path) -> None:
    train, test = (load_task("xnli-dev", data_dir, part).rows for part in ("train", "test"))
    assert (len(train["en"]), len(test["en"])) == (1686, 804)
    assert len({len(items) for items in test.values()}) == 1
    premises = [{next(texts(item)) for item in part["de"]} for part in (train, test)]
    assert not premises[0] & premises[1]


def test_pawsx_is_also_reported_on_the_published_tests(data_dir: Path) -> None:
    train, test = (load_task("pawsx-test", data_dir, part).rows for part in ("train", "test"))
    assert {language: len(items) for language, items in train.items()} == {"en": 2000}
    assert {language: len(items) for language, items in test.items()} == {"de": 2000, "zh": 2000}
    shares = [sum(item.label == "0" for item in items if isinstance(item, Pair)) / 2000 for items in test.values()]
    assert shares == [0.5525, 0.553]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_reported_sentence_is_in_the_pre_training_text(data_dir: Path) -> None:
    reported = set(map(near, reported_sentences(data_dir)))
    text = read_text("xtreme-text", data_dir)
    for language, sentences in text.train.items():
        assert not reported.intersection(map(near, sentences)), language
    for name in filter(lambda name: available(name, data_dir), XTREME):
        items = next(iter(load_task(name, data_dir, "test").rows.values()))
        assert all(near(sentence) in reported for sentence in texts(items[0]))


def test_a_treebanks_reported_text_is_left_out_as_it_is_written(tmp_path: Path) -> None:
    row = "1\tThanks\t_\tNOUN" + "\t_" * 6 + "\n2\t!\t_\tPUNCT" + "\t_" * 6 + "\n\n"
    (tmp_path / "ud").mkdir()
    for part, more in (("train", "# text = Only here.\n" + row), ("test", "")):
        near_one = "# text = THANKS …!\n" + row if more else ""
        (tmp_path / f"ud/en_ewt-ud-{part}.conllu").write_text(f"# text = Thanks!\n{row}{near_one}{more}")
    text = read_text("xtreme-text", tmp_path)
    assert list(filter(None, text.train["en"])) == ["Only here."]
    assert text.note.endswith("by case, punctuation or spaces only: en 1 and 1")
    assert normal("Ａ  b") == "A b"
    assert near("?!") == "?!"


def test_mixed_line_ends_are_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "both.tsv").write_bytes(b"a\tb\tneutral\r\nc\td\tneutral\n")
    assert [pair.second for pair in read_pairs(tmp_path / "both.tsv", ["neutral"])["en"]] == ["b", "d"]
    (tmp_path / "old.tsv").write_bytes(b"a\tb\tneutral\nc\td\tneutral\re\tf\tneutral\n")
    with pytest.raises(RunError, match=r"old.tsv: line 2 has a carriage return inside"):
        read_pairs(tmp_path / "old.tsv", ["neutral"])
