"""Classification tasks: formats, splits, the published files, and every mistake in one line."""

import gzip
import json
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.finetuning import Finetuning
from pointsman_lab.tasks.classification.data import load_task, parse_task

ROWS = [("good film", "pos"), ("bad film", "neg"), ("fine, really", "pos"), ('a "dull" one', "neg")]


def folder_of(folder: Path, **parts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in parts.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def csv_text(rows: list[tuple[str, str]], header: str = "text,label") -> str:
    quoted = ['"' + text.replace('"', '""') + f'",{label}' for text, label in rows]
    return "\n".join([header, *quoted]) + "\n"


def test_every_format_gives_the_same_examples(tmp_path: Path) -> None:
    texts = {
        "a.csv": csv_text(ROWS),
        "a.tsv": "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS),
        "a.jsonl": "".join(json.dumps({"id": 1, "label": label, "text": text}) + "\n" for text, label in ROWS),
        "a.txt": "".join(f"__label__{label}\t{text}\n" for text, label in ROWS),
    }
    for name, content in texts.items():
        folder = tmp_path / name
        folder.mkdir()
        for part in ("train", "test"):
            (folder / name.replace("a.", f"{part}.")).write_text("\ufeff" + content if name == "a.csv" else content)
        task = load_task(str(folder))
        assert task.classes == ("neg", "pos")
        assert task.splits["train"].texts == tuple(text for text, _ in ROWS), name
        assert task.splits["test"].labels == (1, 0, 1, 0)
        assert task.reported == "test"
        assert task.watched is None


def test_packed_files_and_named_columns(tmp_path: Path) -> None:
    for part in ("train", "test"):
        with gzip.open(tmp_path / f"{part}.csv.gz", "wt") as file:
            file.write(csv_text(ROWS, header="body,stars"))
    task = load_task(f"{tmp_path}:text=body:label=stars")
    assert len(task.splits["test"]) == 4
    assert parse_task("sst2") == ("sst2", parse_task("imdb")[1])


def test_a_folder_without_a_test_part_reports_dev(tmp_path: Path) -> None:
    task = load_task(str(folder_of(tmp_path, train__csv=csv_text(ROWS), val__csv=csv_text(ROWS))))
    assert (task.reported, task.watched) == ("dev", "dev")


@pytest.mark.parametrize(("name", "called"), [(".", "here"), ("..", "texts"), ("../here/", "here")])
def test_a_path_from_the_current_folder_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, called: str
) -> None:
    for place, rows in (("data/texts/here", ROWS[::-1]), ("texts/here", ROWS), ("texts", ROWS)):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        folder_of(tmp_path / place, train__csv=csv_text(rows), test__csv=csv_text(rows))
    monkeypatch.chdir(tmp_path / "texts" / "here")
    task = load_task(name, data_dir=tmp_path / "data" / "texts")
    assert (task.name, task.splits["test"].texts) == (called, tuple(text for text, _ in ROWS))
    assert Finetuning(name).variant == called  # the run's folder


def test_numeric_labels_are_in_order_of_value(tmp_path: Path) -> None:
    rows = [(f"text {label}", str(label)) for label in (10, 9, 2, -1)]
    assert load_task(str(folder_of(tmp_path, train__csv=csv_text(rows), test__csv=csv_text(rows)))).classes == (
        "-1", "2", "9", "10",
    )  # fmt: skip


def test_a_single_file_is_divided_by_its_texts(tmp_path: Path) -> None:
    rows = [(f"text number {i}", str(i % 2)) for i in range(400)]
    (tmp_path / "a.csv").write_text(csv_text(rows * 2))
    (tmp_path / "b.csv").write_text(csv_text(rows[::-1]))
    one, other = load_task(str(tmp_path / "a.csv")), load_task(str(tmp_path / "b.csv"))
    for split in ("train", "valid", "test"):
        assert set(one.splits[split].texts) == set(other.splits[split].texts)
    parts = [set(part.texts) for part in one.splits.values()]
    assert sum(map(len, parts)) == 400  # no text is in two parts
    assert 300 < len(parts[0]) < 340
    assert one.fingerprint != other.fingerprint


GOOD = csv_text(ROWS)
BAD = [
    (
        {"test__csv": csv_text([*ROWS, ("new", "neutral")])},
        r"test.csv, line 6: label 'neutral' does not occur.*neg, pos",
    ),
    ({"test__csv": csv_text([("  ", "pos")])}, r"test.csv, line 2: the text is empty"),
    ({"test__csv": "sentence,stars\na,1\n"}, r"no label column: found 'sentence', 'stars'; needed: text \| .*category"),
    ({"test__csv": "a,b\nx,1\n"}, r"no text and label column"),
    ({"train__csv": csv_text([ROWS[0]])}, r"one class, 'pos'; at least two"),
    ({"test__csv": 'text,label\n"open,pos\n'}, r"not a valid CSV file"),
    ({"test__csv": "text,label\nonly one\n"}, r"test.csv, line 2: 1 columns"),
    ({"test__csv": "text,label\n"}, r"contains no example"),
    ({"test__csv": "text,label\nx,\n"}, r"the label is empty"),
    ({"test__tsv": GOOD}, r"two test files"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_mistakes_in_a_folder_are_one_line(tmp_path: Path, change: dict[str, str], message: str) -> None:
    folder_of(tmp_path, train__csv=GOOD, test__csv=GOOD)
    folder_of(tmp_path, **change)
    with pytest.raises(RunError, match=message) as caught:
        load_task(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{oops", "line 1: not JSON"),
        ("a.jsonl", b"[1]", "line 1: a JSON object"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: nested too deeply"),
        ("a.jsonl", rb'{"text": "\ud800", "label": 1}', "a.jsonl, line 1: half a surrogate pair"),
        ("a.jsonl", b'{"text": 3, "label": 1}', "must be a text"),
        ("a.jsonl", b'{"text": "good", "label": 1, "label": 0}', "line 1: the key 'label' is there twice"),
        ("a.csv", b"text,label\n\xff,1\n", "not UTF-8"),
        ("a.csv", b"label,text\n0,bad\n1,great, really great\n", "line 3: 3 columns; the header names 2: quote a text"),
        ("a.tsv", b"label\ttext\n1\tgreat\tgreat\n", "line 2: 3 columns; the header names 2: a text has a tab"),
        ("a.txt", b"no label here\n", "a fastText line begins with __label__"),
        ("a.txt", b"__label__x good\n__label__x __label__y both\n", "a.txt, line 2: several labels; a text has one"),
        ("a.csv", b"text,label,label\ngood,x,y\n", "a.csv: 2 columns are called 'label': leave one"),
        ("a.tsv", b"text\ttext\tlabel\ngood\tbad\tx\n", "a.tsv: 2 columns are called 'text'"),
        ("a.parquet", b"x", "allowed are .csv"),
        ("a.csv", csv_text(ROWS).encode(), "too few to divide"),
        ("a.csv.gz", b"not packed", "is damaged"),
    ],
)
def test_mistakes_in_a_file_are_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=message):
        load_task(str(tmp_path / name))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sst3", "unknown task 'sst3': did you mean 'sst[25]'"),
        ("nowhere/x.csv", "there is no file or folder"),
        ("", "names no task"),
        ("a.csv:text=a:text=b", "text is given twice"),
        ("sst2:text=nonsense", "text= and label= name the columns of files; sst2 has its own"),
    ],
)
def test_unknown_tasks(spec: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        load_task(spec)


def test_one_column_is_not_both_text_and_label(tmp_path: Path) -> None:
    folder_of(tmp_path, a__csv=csv_text(ROWS))
    with pytest.raises(RunError, match="the column 'label' cannot be both text and label"):
        load_task(f"{tmp_path / 'a.csv'}:text=label:label=label")


def test_a_folder_without_parts(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"needs train\.\* and test\.\*.*none of them"):
        load_task(str(tmp_path))


def test_the_published_files(data_dir: Path) -> None:
    sizes = {
        "sst2": (2, {"train": 6920, "valid": 872, "test": 1821}),
        "sst2-glue": (2, {"train": 67349, "dev": 872}),
        "sst5": (5, {"train": 8544, "valid": 1101, "test": 2210}),
        "imdb": (2, {"train": 25000, "test": 25000}),
        "banking77": (77, {"train": 10003, "test": 3080}),
    }
    for name, (classes, expected) in sizes.items():
        task = load_task(name, data_dir=data_dir)
        assert {split: len(part) for split, part in task.splits.items()} == expected
        assert len(task.classes) == classes
        assert task.reported == ("dev" if name == "sst2-glue" else "test")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"sst5 needs .*sst_train.txt: POINTSMAN_DATA names the data folder"):
        load_task("sst5", data_dir=tmp_path)
    with pytest.raises(RunError, match="set POINTSMAN_DATA"):
        load_task("imdb")


def test_a_long_text_is_a_text(tmp_path: Path) -> None:
    rows = csv_text([("word " * 40_000, "a"), ("short", "b")] * 4)
    task = load_task(str(folder_of(tmp_path, train__csv=rows, test__csv=rows)))
    assert max(map(len, task.splits["test"].texts)) > 131_072
