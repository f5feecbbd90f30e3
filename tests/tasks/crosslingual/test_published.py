"""The published splits, in the publishers' files and in those of XTREME's download, as tests write them."""

import hashlib
import json
import random
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.report.paper import paper_tables
from pointsman_lab.tasks.crosslingual.data import load_xtreme
from pointsman_lab.tasks.crosslingual.xtreme import load_task
from tests.tasks.crosslingual.fixtures import sentence

LABELS = ("neutral", "entailment", "contradictory")
XNLI = ("language", "gold_label", "a", "b", "c", "d", "sentence1", "sentence2")


def squad(name: str, count: int) -> str:
    asked = [{"id": f"{name}-{n}", "question": "Who?", "answers": [{"text": "cat", "answer_start": 4}]}
             for n in range(count)]  # fmt: skip
    paragraphs = [{"context": f"The cat sat {name} {n}.", "qas": [one]} for n, one in enumerate(asked)]
    return json.dumps({"data": [{"paragraphs": paragraphs}]})


def tagged(name: str, count: int, tag: str = "B-PER") -> str:
    return "".join(f"{name}{n}\t{tag}\nran\tO\n\n" for n in range(count))


def table(*rows: tuple[object, ...]) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def pairs(name: str, count: int, label: str) -> list[tuple[object, ...]]:
    return [(f"{name} a {n}", f"{name} b {n}", label) for n in range(count)]


CONLLU = "".join(f"1\tw{n}\t_\tNOUN" + "\t_" * 6 + "\n\n" for n in range(70))
PUBLISHERS = {
    "xnli/XNLI-MT-1.0/multinli/multinli.train.en.tsv": table(
        ("premise", "hypo", "label"), *((f"p {n}", f"h {n}", LABELS[n % 3]) for n in range(90))
    ),
    "xnli/XNLI-1.0/xnli.test.tsv": table(
        XNLI, *((lang, LABELS[n % 2], *"abcd", f"{lang} {n}", f"h {n}") for lang in ("de", "en") for n in range(6))
    ),
    "pawsx/x-final/en/train.tsv": table(
        ("id", "sentence1", "sentence2", "label"), *((n, *row) for n, row in enumerate(pairs("t", 90, "1")))
    ),
    **{
        f"pawsx/x-final/{lang}/test_2k.tsv": table(
            ("id", "sentence1", "sentence2", "label"), *((n, *row) for n, row in enumerate(pairs(lang, 6, "0")))
        )
        for lang in ("en", "ko")
    },
    "panx/en-train": tagged("en:Jane", 70),
    "panx/en-test": tagged("en:Ann", 6),
    "panx/sw-test": tagged("sw:Juma", 6),
    "ud/UD_English-EWT/en_ewt-ud-train.conllu": CONLLU,
    "ud/UD_English-GUM/en_gum-ud-train.conllu": CONLLU,
    "ud/UD_English-EWT/en_ewt-ud-test.conllu": CONLLU,
    "ud/UD_Thai-PUD/th_pud-ud-test.conllu": CONLLU,
    "squad/train-v1.1.json": squad("s", 90),
    "xquad/xquad.el.json": squad("x", 6),
    "mlqa/MLQA_V1/test/test-context-de-question-de.json": squad("m", 6),
    "mlqa/MLQA_V1/test/test-context-de-question-en.json": squad("other", 6),
    "mlqa/MLQA_V1/dev/dev-context-de-question-de.json": squad("d", 6),
    "tydiqa/tydiqa-goldp-v1.1-train.json": squad("english", 90),
    "tydiqa/tydiqa-goldp-v1.1-dev/tydiqa-goldp-dev-telugu.json": squad("telugu", 6),
}
XTREMES = {
    "xnli/train-en.tsv": table(*pairs("p", 90, "neutral")),
    "xnli/test-de.tsv": table(("a", "b"), ("c", "d")),
    "panx/train-en.tsv": tagged("Jane", 70),
    "panx/test-sw.tsv": "Juma\nran\n\n",
    "squad/train-v1.1.json": squad("s", 90),
    "mlqa/MLQA_V1/test/test-context-de-question-de.json": squad("m", 6).replace('"cat"', '""'),
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("task", "trained", "tested"),
    [
        ("xnli", ["xnli/XNLI-MT-1.0/multinli/multinli.train.en.tsv"], {"en": 6, "de": 6}),
        ("pawsx", ["pawsx/x-final/en/train.tsv"], {"en": 6, "ko": 6}),
        ("panx", ["panx/en-train"], {"en": 6, "sw": 6}),
        ("udpos", ["ud/UD_English-EWT/en_ewt-ud-train.conllu", "ud/UD_English-GUM/en_gum-ud-train.conllu"],
         {"en": 70, "th": 70}),
        ("xquad", ["squad/train-v1.1.json"], {"el": 6}),
        ("mlqa", ["squad/train-v1.1.json"], {"de": 6}),
        ("tydiqa", ["tydiqa/tydiqa-goldp-v1.1-train.json"], {"te": 6}),
    ],
)  # fmt: skip
def test_the_publishers_files(task: str, trained: list[str], tested: dict[str, int], tmp_path: Path) -> None:
    found = load_xtreme(task, write(tmp_path, PUBLISHERS))
    assert {language: len(items) for language, items in found.tests.items()} == tested
    assert sum(map(len, found.splits.values())) == (140 if task == "udpos" else 70 if task == "panx" else 90)
    read = [hashlib.sha256((tmp_path / name).read_bytes()).digest() for name in trained]
    assert f"sha256 {hashlib.sha256(b''.join(read)).hexdigest()[:12]}" in found.description
    assert all(name.rpartition("/")[2].partition(".")[0][:6] in found.description for name in trained)
    assert all(f"{language} {count}" in found.description for language, count in tested.items())
    if task == "xnli":
        assert {item.label for item in found.splits["train"]} == {"neutral", "entailment", "contradiction"}  # type: ignore[union-attr]
    if task == "panx":
        assert [items[0].words[0] for items in found.tests.values()] == ["Ann0", "Juma0"]  # type: ignore[union-attr]


def test_linked_folders_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", PUBLISHERS) / "pawsx/x-final/ko"
    folder.symlink_to(folder.rename(tmp_path / "elsewhere"))
    assert set(load_task("pawsx", tmp_path / "data", "test").rows) == {"en", "ko"}


def test_a_file_of_one_form_hides_no_other_language(tmp_path: Path) -> None:
    other = "un\tNUM\n\n" * 3
    write(tmp_path, {"ud/de_x-ud-test.conllu": CONLLU, "ud/test-de.tsv": other, "ud/test-fr.tsv": other})
    rows = load_task("udpos", tmp_path, "test").rows
    assert {language: len(items) for language, items in rows.items()} == {"de": 70, "fr": 3}
    write(tmp_path, {"xnli/xnli.test.tsv": PUBLISHERS["xnli/XNLI-1.0/xnli.test.tsv"], "xnli/test-fr.tsv": "no\n"})
    assert list(load_task("xnli", tmp_path, "test").rows) == ["de", "en"], "a file of several languages goes alone"


@pytest.mark.parametrize("task", ["xnli", "panx", "mlqa"])
def test_tests_without_labels_name_the_file_and_say_why(task: str, tmp_path: Path) -> None:
    write(tmp_path, XTREMES)
    with pytest.raises(RunError, match=r"test-.*XTREME's download .* of its tests"):
        load_xtreme(task, tmp_path)
    assert load_task(task, tmp_path, "test", labelled=False).rows  # text that pre-training must not read


def test_a_task_without_its_files_names_the_one_that_can_do_with_less(tmp_path: Path) -> None:
    write(tmp_path, {"xnli/dev-en.tsv": table(*pairs("d", 9, "neutral"))})
    with pytest.raises(RunError, match=r"xnli has no train part: .* no file multinli.* xnli-dev needs only what lies"):
        load_xtreme("xnli", tmp_path)


@pytest.mark.slow
def test_the_documented_commands_fill_the_papers_first_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentencepiece")
    draw = random.Random(0)
    monkeypatch.setenv("POINTSMAN_DATA", str(write(tmp_path / "data", PUBLISHERS)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(write(tmp_path, {"text/en.txt": "\n".join(sentence(draw) + "." for _ in range(1500))}))
    sizes = {"num_layers": 2, "dim": 16, "num_heads": 2, "head_dim": 8, "hidden_dim": 24, "num_experts": 4}
    small = {"pieces": 96, "batch_size": 8, "segment_length": 32, "warmup_steps": 0, "validate_every": 0,
             "model.moe_layers": "after:1"} | {f"model.{name}": size for name, size in sizes.items()}  # fmt: skip
    settings = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    how = ["--top-k", "1", "--jobs", "1", "--device", "cpu", "--out", "grid"]
    grid = ["--preset", "tiny-mlm", "--data", "multilingual:text", "--routers", "plain,switch,xmoe", "--seeds", "1"]
    assert main(["compare", *grid, "--steps", "2", "--eval-tokens", "256", *settings, *how]) == 0
    tasks = "udpos,panx,xquad,mlqa,tydiqa,xnli,pawsx"
    assert main(["compare", "--task", tasks, "--task-steps", "1", "--length", "48", *how]) == 0
    assert main(["report", "grid", "--paper", "x-moe"]) == 0
    first = paper_tables(tmp_path / "grid", "x-moe").tables[0]
    [found] = first.ours.values()
    columns = len(first.published.columns)  # the last is XTREME's average
    assert found.keys() == {(line, column) for line in range(3) for column in range(columns)}
