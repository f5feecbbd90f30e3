"""Tasks of XTREME (Hu et al. 2020) on the files at hand, with honest splits: nothing that is reported is trained on.

Fine-tuning sees English only; every language is evaluated with the same weights. Where only development sets carry
labels, they are split by a hash of the English text, the same rows in every language.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.data.reading import find_file
from pointsman_lab.tasks.crosslingual.formats import (
    Pair,
    Question,
    Tagged,
    read_pairs,
    read_questions,
    read_tagged,
)

Item = Pair | Tagged | Question
XNLI_LABELS = ("contradiction", "entailment", "neutral")
PAWSX_LABELS = ("0", "1")
PANX_TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
UPOS = ("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ",
        "SYM", "VERB", "X")  # fmt: skip


@dataclass(frozen=True)
class XtremeTask:
    """A task.

    Attributes:
        kind: "pairs", "tags" or "questions".
        folder: under the data folder.
        labels: classes or tags; none for questions.
        summary: one line for lists.
        protocol: what is trained on, what is reported.
        read: (folder, part "train" or "test") -> language -> items.
    """

    kind: str
    folder: str
    labels: tuple[str, ...]
    summary: str
    protocol: str
    read: Callable[[Path, str], dict[str, list[Item]]]


def hashed(text: str) -> int:
    """64 bits of a text, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def languages(folder: Path, prefix: str) -> dict[str, Path]:
    """language -> file, of all files `PREFIX-LANG.*` in the folder."""
    return {
        file.name.removeprefix(f"{prefix}-").partition(".")[0]: file
        for file in sorted(folder.glob(f"{prefix}-*"))
        if file.is_file()
    }


def _aligned(folder: Path, labels: Sequence[str]) -> dict[str, list[Pair]]:
    """The development sets, whose rows are translations of each other."""
    pairs = {language: read_pairs(file, labels) for language, file in languages(folder, "dev").items()}
    if "en" not in pairs:
        raise RunError(f"{folder} has no dev-en.tsv: English decides about the split")
    for language, rows in pairs.items():
        if len(rows) != len(pairs["en"]):
            raise RunError(f"{folder}: dev-{language} has {len(rows)} rows, and dev-en {len(pairs['en'])}")
    return pairs


def _xnli(folder: Path, part: str) -> dict[str, list[Item]]:
    pairs = _aligned(folder, XNLI_LABELS)
    tested = [hashed(pair.first) % 3 == 0 for pair in pairs["en"]]
    return {
        language: [pair for pair, test in zip(rows, tested, strict=True) if test == (part == "test")]
        for language, rows in pairs.items()
    }


def _pawsx(folder: Path, part: str) -> dict[str, list[Item]]:
    pairs = _aligned(folder, PAWSX_LABELS)
    groups = components([(pair.first, pair.second) for pair in pairs["en"]])
    tested = [hashed(group) % 3 == 0 for group in groups]
    return {
        language: [
            pair
            for pair, test in zip(rows, tested, strict=True)
            if test == (part == "test") and "NS" not in (pair.first, pair.second)
        ]
        for language, rows in pairs.items()
    }


def _pawsx_test(folder: Path, part: str) -> dict[str, list[Item]]:
    if part == "train":
        return {"en": list(_aligned(folder, PAWSX_LABELS)["en"])}
    pairs = {language: read_pairs(file, PAWSX_LABELS) for language, file in languages(folder, "test").items()}
    aligned = len({len(rows) for rows in pairs.values()}) == 1
    return {
        language: [pair if aligned else replace(pair, row=None) for pair in rows] for language, rows in pairs.items()
    }


def components(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """For each pair a name of its connected component: pairs that share a sentence, directly or not, share the name."""
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        parent.setdefault(text, text)
        while parent[text] != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for first, second in pairs:
        one, other = sorted((root(first), root(second)))
        parent[other] = one
    return [root(first) for first, _ in pairs]


def _panx(folder: Path, part: str) -> dict[str, list[Item]]:
    prefix = "train" if part == "train" else "dev"
    return {language: list(read_tagged(file, PANX_TAGS)) for language, file in languages(folder, prefix).items()}


_TREEBANKS = MappingProxyType({"en": "en_ewt", "fr": "fr_sequoia", "de": "de_pud"})


def _udpos(folder: Path, part: str) -> dict[str, list[Item]]:
    """Three treebanks as published, or `train-LANG.tsv` and `test-LANG.tsv` as XTREME's script writes them."""
    files = languages(folder, part)
    for language, bank in _TREEBANKS.items():
        if file := find_file(folder, f"{bank}-ud-{part}.conllu"):
            files[language] = file
    return {language: list(read_tagged(file, (*UPOS, "_"))) for language, file in files.items()}


def _xquad(folder: Path, part: str) -> dict[str, list[Item]]:
    if part == "train":
        return {}
    files = sorted(folder.glob("xquad.*.json*"))
    return {file.name.split(".")[1]: list(read_questions(file)) for file in files}


def _mlqa(folder: Path, part: str) -> dict[str, list[Item]]:
    if part == "train":
        return {}
    files = sorted(folder.rglob("dev-context-*-question-*.json*"))
    return {
        file.name.split("-")[2]: list(read_questions(file))
        for file in files
        if file.name.split("-")[2] == file.name.split("-")[4].partition(".")[0]
    }


def _tydiqa(folder: Path, part: str) -> dict[str, list[Item]]:
    name = "train" if part == "train" else "dev"
    files = sorted(folder.rglob(f"tydiqa.goldp.*.{name}.json*"))
    return {file.name.split(".")[2]: list(read_questions(file)) for file in files}


XTREME: Mapping[str, XtremeTask] = MappingProxyType(
    {
        "xnli": XtremeTask(
            "pairs", "xnli", XNLI_LABELS, "does the premise entail the hypothesis? 15 languages",
            "XNLI-dev, split by the premise: 562 premises train (English), 268 test", _xnli,
        ),
        "pawsx": XtremeTask(
            "pairs", "pawsx", PAWSX_LABELS, "do both sentences say the same? 7 languages",
            "PAWS-X dev, split by connected components of shared sentences", _pawsx,
        ),
        "pawsx-test": XtremeTask(
            "pairs", "pawsx", PAWSX_LABELS, "pawsx on the published test sets",
            "English dev; published tests", _pawsx_test,
        ),
        "udpos": XtremeTask(
            "tags", "ud", UPOS, "parts of speech: English-EWT, French-Sequoia, German-PUD",
            "published splits; English train", _udpos,
        ),
        "panx": XtremeTask(
            "tags", "panx", PANX_TAGS, "named entities of WikiAnn, 12 languages", "English train; dev reported", _panx
        ),
        "tydiqa": XtremeTask(
            "questions", "tydiqa", (), "questions on a passage, 9 languages", "published: English train, dev", _tydiqa
        ),
        "xquad": XtremeTask(
            "questions", "xquad", (), "questions on a passage, 12 languages", "trained on TyDiQA's English", _xquad
        ),
        "mlqa": XtremeTask(
            "questions", "mlqa", (), "questions on a passage, 7 languages",
            "MLQA dev by MLQA's rules, trained on TyDiQA's English", _mlqa,
        ),
    }
)  # fmt: skip


def load_task(name: str, data_dir: Path, part: str) -> dict[str, list[Item]]:
    """language -> items of the part "train" or "test".

    Raises:
        RunError: an unknown task, or files that are missing or damaged.
    """
    if name not in XTREME:
        raise RunError(f"unknown task {name!r}: {did_you_mean(name, XTREME)}")
    folder = task_folder(name, data_dir)
    if folder is None:
        place = data_dir / XTREME[name].folder
        raise RunError(f"the task {name} needs the folder {place} (POINTSMAN_DATA names the data folder)")
    return XTREME[name].read(folder, part)


def task_folder(name: str, data_dir: Path) -> Path | None:
    """Where a task's files lie, if they do."""
    places = (data_dir / XTREME[name].folder, data_dir / name)  # the second is XTREME's name of it
    return next((place for place in places if place.is_dir()), None)


def texts(item: Item) -> Iterator[str]:
    """The sentences of an item, as they stand in it."""
    if isinstance(item, Pair):
        yield item.first
        yield item.second
    elif isinstance(item, Tagged):
        yield " ".join(item.words)
    else:
        yield item.question
        yield item.context
