"""Tasks of XTREME (Hu et al. 2020): which files each is trained on and reported on.

Fine-tuning sees English only; every language is evaluated with the same weights. The tasks named as XTREME names them
have its published splits. Those with `-dev` in their names need no more than development sets; these are split by a
hash of the English text, the same rows in every language, so that nothing that is reported is trained on.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import open_named
from pointsman_lab.data.catalog import hashed
from pointsman_lab.data.reading import files_below
from pointsman_lab.tasks.crosslingual.formats import Pair, Question, Tagged, read_pairs, read_questions, read_tagged

Item = Pair | Tagged | Question
Rows = dict[str, list[Item]]
"""Language -> items."""

XNLI_LABELS = ("contradiction", "entailment", "neutral")
PAWSX_LABELS = ("0", "1")
PANX_TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
UPOS = ("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ",
        "SYM", "VERB", "X")  # fmt: skip
ENGLISH = "en"
CODES: Mapping[str, str] = {
    "afrikans": "af", "arabic": "ar", "basque": "eu", "bengali": "bn", "bulgarian": "bg", "chinese": "zh",
    "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi", "french": "fr", "german": "de",
    "greek": "el", "hebrew": "he", "hindi": "hi", "hungarian": "hu", "indonesian": "id", "italian": "it",
    "japanese": "ja", "kazakh": "kk", "korean": "ko", "marathi": "mr", "persian": "fa", "portuguese": "pt",
    "russian": "ru", "spanish": "es", "swahili": "sw", "tagalog": "tl", "tamil": "ta", "telugu": "te",
    "thai": "th", "turkish": "tr", "urdu": "ur", "vietnamese": "vi", "yoruba": "yo",
}  # fmt: skip
"""Names of languages in lower case, in files of TyDiQA."""


@dataclass(frozen=True)
class Source:
    """The files of a part.

    Attributes:
        folder: under the data folder.
        names: the ends of the files' paths, in any folder below, plain or .gz: LANG is a language, * a part of a name.
            Of each language the first of these names that a file has counts: the publishers' files come before those
            of XTREME's download, whose tests have no labels. Files of several languages go with no others.
        grouped: English rows of files that hold both parts, in all languages alike -> names of their groups, of which
            one in three is tested; None: the files are of one part.
    """

    folder: str
    names: tuple[str, ...]
    grouped: Callable[[Sequence[Any]], Sequence[str]] | None = None

    def files(self, data_dir: Path) -> dict[str, list[Path]]:
        """language -> its files ("" where the file has several languages); empty where there are none."""
        folder = task_folder(self.folder, data_dir)
        present = [] if folder is None else files_below(folder)
        every: dict[str, list[Path]] = {}
        for name in self.names:
            pattern = re.escape(name).replace(r"\*", "[^/]*").replace("LANG", "(?P<language>[A-Za-z]+)", 1)
            wanted = re.compile(f"(?:.*/)?{pattern.replace('LANG', '(?P=language)')}(?:[.]gz)?")
            found: dict[str, list[Path]] = {}
            for file in present:
                if match := wanted.fullmatch(file.relative_to(folder or data_dir).as_posix()):
                    language = match.groupdict().get("language", "").lower()
                    found.setdefault(CODES.get(language, language), []).append(file)
            if not every or "" not in every | found:
                every = found | every
        return every


@dataclass(frozen=True)
class XtremeTask:
    """A task.

    Attributes:
        kind: "pairs", "tags" or "questions".
        labels: classes or tags; none for questions.
        train, test: where its parts lie.
        how: what the protocol line says of the split, besides the files; "" of published splits.
    """

    kind: str
    labels: tuple[str, ...]
    train: Source
    test: Source
    how: str = ""


@dataclass(frozen=True)
class Part:
    """What was read: language -> items, and the files."""

    rows: Rows
    files: tuple[Path, ...]

    def described(self, data_dir: Path) -> str:
        """Names of files, rows of each language, a checksum of all files."""
        names = [file.relative_to(data_dir).as_posix() for file in self.files]
        start = os.path.commonprefix(names)  # noqa: RUF071  characters, not folders
        end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]  # noqa: RUF071
        named = f"{start}{{{','.join(name[len(start) : len(name) - len(end)] for name in names)}}}{end}"
        sums = hashlib.sha256()
        for file in self.files:
            with open_named(file) as opened:
                sums.update(hashlib.sha256(opened.read()).digest())
        sizes = ", ".join(f"{language} {len(rows):,}" for language, rows in self.rows.items())
        return f"{named if len(names) > 1 else names[0]} ({sizes}; sha256 {sums.hexdigest()[:12]})"


def _split(rows: Rows, grouped: Callable[[Sequence[Any]], Sequence[str]], part: str) -> Rows:
    """The rows of a part, by the English ones with their translations; rows without a text are left out."""
    if ENGLISH not in rows:
        raise RunError("the development set has no English part, which decides about the split")
    english = rows[ENGLISH]
    for language, own in rows.items():
        if len(own) != len(english):
            raise RunError(f"the development set has {len(own)} rows in {language!r}, and {len(english)} in 'en'")
    kept = [(hashed(group) % 3 == 0) == (part == "test") for group in grouped(english)]
    return {
        language: [row for row, of_part in zip(own, kept, strict=True) if of_part and "NS" not in texts(row)]
        for language, own in rows.items()
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


_XNLI_TEST = Source("xnli", ("xnli.test.tsv", "test-LANG.tsv"))
_XNLI_DEV = Source("xnli", ("xnli.dev.tsv", "dev-LANG.tsv"), lambda rows: [pair.first for pair in rows])
_PAWSX_TEST = Source("pawsx", ("LANG/test_2k.tsv", "test-LANG.tsv"))
_PAWSX_DEV = Source("pawsx", ("LANG/dev_2k.tsv", "dev-LANG.tsv"), lambda rows: components([row.texts for row in rows]))
_PANX_TRAIN = Source("panx", ("LANG-train", "LANG/train", "train-LANG.tsv"))
_TYDIQA_TRAIN = Source("tydiqa", ("tydiqa.goldp.LANG.train.json", "tydiqa-goldp-v1.1-train.json"))
_SQUAD = Source("squad", ("train-v1.1.json",))
_XQUAD = Source("xquad", ("xquad.LANG.json",))

XTREME: Mapping[str, XtremeTask] = {
    "xnli": XtremeTask(
        "pairs", XNLI_LABELS,
        Source("xnli", ("multinli.train.en.tsv", "multinli_1.0_train.txt", "train-en.tsv")), _XNLI_TEST,
    ),
    "xnli-dev": XtremeTask("pairs", XNLI_LABELS, _XNLI_DEV, _XNLI_DEV, "development sets split by the English premise"),
    "pawsx": XtremeTask("pairs", PAWSX_LABELS, Source("pawsx", ("en/train.tsv", "train-en.tsv")), _PAWSX_TEST),
    "pawsx-dev": XtremeTask(
        "pairs", PAWSX_LABELS, _PAWSX_DEV, _PAWSX_DEV,
        "development sets split by connected components of shared sentences",
    ),
    "pawsx-test": XtremeTask("pairs", PAWSX_LABELS, Source("pawsx", ("en/dev_2k.tsv", "dev-en.tsv")), _PAWSX_TEST),
    "udpos": XtremeTask(
        "tags", UPOS, Source("ud", ("LANG_*-ud-train.conllu", "train-LANG.tsv")),
        Source("ud", ("LANG_*-ud-test.conllu", "test-LANG.tsv")),
    ),
    "panx": XtremeTask("tags", PANX_TAGS, _PANX_TRAIN, Source("panx", ("LANG-test", "LANG/test", "test-LANG.tsv"))),
    "panx-dev": XtremeTask(
        "tags", PANX_TAGS, _PANX_TRAIN,
        Source("panx", ("LANG-dev", "LANG/dev", "dev-LANG.tsv")), "development sets reported",
    ),
    "tydiqa": XtremeTask(
        "questions", (), _TYDIQA_TRAIN,
        Source("tydiqa", ("tydiqa-goldp-dev-LANG.json", "tydiqa.goldp.LANG.dev.json")),
    ),
    "xquad": XtremeTask("questions", (), _SQUAD, _XQUAD),
    "xquad-tydiqa": XtremeTask("questions", (), _TYDIQA_TRAIN, _XQUAD),
    "mlqa": XtremeTask("questions", (), _SQUAD, Source("mlqa", ("test-context-LANG-question-LANG.json",))),
    "mlqa-dev": XtremeTask("questions", (), _TYDIQA_TRAIN, Source("mlqa", ("dev-context-LANG-question-LANG.json",))),
}  # fmt: skip


def load_task(
    name: str, data_dir: Path, part: str, *, languages: Sequence[str] | None = None, labelled: bool = True
) -> Part:
    """The part "train" or "test" of a task.

    Args:
        languages: those to read; None: all.
        labelled: False: for the text alone, labels and answers need not be there.
    """
    task = XTREME[name]
    source = task.train if part == "train" else task.test
    files = source.files(data_dir)
    if not files:
        other = next((each for each in XTREME if each.startswith(f"{name}-") and available(each, data_dir)), None)
        raise RunError(
            f"the task {name} has no {part} part: {data_dir / source.folder} (POINTSMAN_DATA names the data folder) "
            f"has no file {' or '.join(source.names)}" + (f"; {other} needs only what lies there" if other else "")
        )
    rows: Rows = {}
    read: list[Path] = []
    for language, own in files.items():
        if languages is None or language in ("", *languages) or source.grouped:
            for file in own:
                read.append(file)
                for key, items in _read(task, file, language, labelled).items():
                    rows.setdefault(key, []).extend(items)
    if task.kind == "pairs" and len({len(items) for items in rows.values()}) > 1 and not source.grouped:
        rows = {
            key: [replace(item, row=None) for item in items if isinstance(item, Pair)] for key, items in rows.items()
        }
    rows = _split(rows, source.grouped, part) if source.grouped else rows
    return Part(rows if languages is None else {key: rows[key] for key in languages if key in rows}, tuple(read))


def _read(task: XtremeTask, file: Path, language: str, labelled: bool) -> Rows:
    labels = task.labels if labelled else None
    found: Rows = {}
    if task.kind == "pairs":
        found.update(read_pairs(file, labels, language or ENGLISH))  # type: ignore[arg-type]
    elif task.kind == "tags":
        found[language] = list(read_tagged(file, (*labels, "_") if labels else None, language))
    else:
        several = file.name.startswith("tydiqa-goldp-v1.1-train")  # an id begins with the name of its language
        for item in read_questions(file, answered=labelled):
            own = CODES.get(item.id.partition("-")[0], "") if several else language or ENGLISH
            found.setdefault(own, []).append(item)
    return found


def available(name: str, data_dir: Path) -> bool:
    """Whether both parts of a task lie in the data folder."""
    return bool(XTREME[name].train.files(data_dir) and XTREME[name].test.files(data_dir))


def task_folder(folder: str, data_dir: Path) -> Path | None:
    """Where the files of a folder of tasks lie, if they do; XTREME names that of udpos after the task."""
    places = (data_dir / folder, data_dir / ("udpos" if folder == "ud" else folder))
    return next((place for place in places if place.is_dir()), None)


def texts(item: Item) -> Iterator[str]:
    """The sentences of an item, as they stand in it."""
    if isinstance(item, Pair):
        yield from item.texts
    elif isinstance(item, Tagged):
        yield " ".join(item.words)
    else:
        yield item.question
        yield item.context
