"""XTREME's tasks from the hub: the columns of `google/xtreme`, served here by data sets made on the spot."""

import errno
from pathlib import Path
from typing import Any

import pytest

from pointsman._errors import RunError
from pointsman_lab.tasks.crosslingual import hub
from pointsman_lab.tasks.crosslingual.formats import Pair, Question, Tagged
from pointsman_lab.tasks.crosslingual.hub import fetch_task
from pointsman_lab.tasks.crosslingual.xtreme import PANX_TAGS, UPOS, XTREME, load_task

datasets = pytest.importorskip("datasets")


def pairs(label: str, *, language: str | None = None) -> dict[str, str]:
    row = {"sentence1": "one\ttwo", "sentence2": "three"}
    return row | ({"label": label} if language is None else {"language": language, "gold_label": label})


def question(identity: str) -> dict[str, Any]:
    return {
        "id": identity, "title": "", "context": "it is red, they say", "question": "what?",
        "answers": {"text": ["red"], "answer_start": [6]},
    }  # fmt: skip


def tagged(tags: tuple[str, ...], column: str) -> Any:
    features = {"tokens": datasets.Sequence(datasets.Value("string")),
                column: datasets.Sequence(datasets.ClassLabel(names=list(tags)))}  # fmt: skip
    rows = {"tokens": [["New", "York"], ["a"]], column: [[1, 2], [0]]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def served(config: str, split: str) -> Any:
    """What the hub has of a configuration."""
    name = config.partition(".")[0]
    rows: list[dict[str, Any]]
    if config == "default":
        rows = [{"premise": "one\ttwo", "hypothesis": "three", "label": 1}]
    elif name == "XNLI":
        rows = [pairs("neutral", language=language) for language in ("en", "de")]
    elif name == "PAWS-X":
        rows = [pairs("1")]
    elif name == "PAN-X":
        return tagged(PANX_TAGS, "ner_tags")
    elif name == "udpos":
        return tagged(UPOS, "pos_tags")
    elif name == "tydiqa":
        rows = [question(f"{language}-{split}-1") for language in ("english", "swahili")]
    else:
        rows = [question(f"{config} {split}")]
    return datasets.Dataset.from_list(rows)


CONFIGS = (
    "XNLI", "tydiqa", "SQuAD", "PAWS-X.en", "PAWS-X.de", "PAN-X.en", "PAN-X.sw", "udpos.English", "udpos.Afrikans",
    "XQuAD.en", "XQuAD.el", "MLQA.en.en", "MLQA.en.de", "MLQA.de.de",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(repository: str, config: str | None, split: str) -> Any:
        assert (repository, config) == ("nyu-mll/multi_nli", None) or (
            repository == "google/xtreme" and config in CONFIGS
        )
        return served(config or "default", split)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda repository: list(CONFIGS))


@pytest.mark.parametrize(
    ("name", "trained", "tested"),
    [
        ("xnli", {"en"}, {"en", "de"}),
        ("xnli-dev", {"en", "de"}, {"en", "de"}),
        ("pawsx", {"en"}, {"en", "de"}),
        ("pawsx-dev", {"en", "de"}, {"en", "de"}),
        ("pawsx-test", {"en"}, {"en", "de"}),
        ("panx", {"en"}, {"en", "sw"}),
        ("panx-dev", {"en"}, {"en", "sw"}),
        ("udpos", {"en"}, {"en", "af"}),
        ("xquad", {"en"}, {"en", "el"}),
        ("xquad-tydiqa", {"en", "sw"}, {"en", "el"}),
        ("mlqa", {"en"}, {"en", "de"}),
        ("mlqa-dev", {"en", "sw"}, {"en", "de"}),
        ("tydiqa", {"en", "sw"}, {"en", "sw"}),
    ],
)
def test_every_task_is_read_back(name: str, trained: set[str], tested: set[str], tmp_path: Path) -> None:
    folders = {XTREME[name].train.folder, XTREME[name].test.folder}
    for folder in folders:
        fetch_task(folder, tmp_path / folder)
    train, test = (load_task(name, tmp_path, part).rows for part in ("train", "test"))
    assert (set(train), set(test)) == (trained, tested)
    found = [item for part in (train, test) for items in part.values() for item in items]
    for item in found:
        if isinstance(item, Pair):
            assert (item.first, item.second, item.label) == ("one two", "three", "1" if "pawsx" in name else "neutral")
        elif isinstance(item, Question):
            assert item.answers == (("red", 6),)
        else:
            assert isinstance(item, Tagged)
            assert len(item.words) == len(item.tags) in (1, 2)
    assert found
    assert {place.name for place in tmp_path.iterdir()} == folders


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(RunError, match=r"pawsx cannot be written to .*: No space left on device"):
        fetch_task("pawsx", tmp_path / "pawsx")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([{"text": "x"}]))
    with pytest.raises(RunError, match="another form than expected"):
        fetch_task("xnli", tmp_path / "xnli")
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda _: ["XNLI"])
    with pytest.raises(RunError, match="has no such part"):
        fetch_task("xquad", tmp_path / "xquad")

    def unreachable(_: object) -> Any:
        raise ConnectionError("Cannot reach\nthe hub")

    monkeypatch.setattr(datasets, "get_dataset_config_names", unreachable)
    with pytest.raises(RunError, match=r"panx is not under the data folder .* \(no network\?\): Cannot reach the hub"):
        fetch_task("panx", tmp_path / "panx")
    assert not list(tmp_path.iterdir())
    assert set(hub._TASKS) == {source.folder for task in XTREME.values() for source in (task.train, task.test)}
