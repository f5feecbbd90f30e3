"""The data of a cross-lingual task, and what its figures are without a model.

English rows to train on, and a test part in every language. A floor (the majority, words alone, a gazetteer, the
nearest sentence) is learned from the English training rows, as the models are, and applied to every language.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.data.catalog import hashed, parse_languages, parse_options
from pointsman_lab.tasks.crosslingual.formats import Pair, Question, Tagged
from pointsman_lab.tasks.crosslingual.scores import Prediction, entities, same_words
from pointsman_lab.tasks.crosslingual.xtreme import ENGLISH, XTREME, Item, components, load_task, task_folder

VALIDATION = 20  # one English training row in so many, by a hash of its text, is held out


@dataclass(frozen=True)
class XtremeData:
    """A task's rows.

    Attributes:
        name: the task. kind: "pairs", "tags" or "questions". classes: its labels or tags; none for questions.
        splits: "train" and "valid", both English.
        tests: language -> the reported items. groups: of these items (`parallel_groups`).
        description: the protocol line.
    """

    name: str
    kind: str
    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Item]]
    tests: Mapping[str, Sequence[Item]]
    groups: Mapping[str, Sequence[str]]
    description: str

    reported = "test"

    @cached_property
    def fingerprint(self) -> str:
        """A 64-bit hash (hexadecimal) of all rows."""
        found = hashlib.sha256(repr(self.classes).encode())
        for name, items in (*self.splits.items(), *self.tests.items()):
            found.update(repr((name, len(items))).encode())
            for item in items:
                found.update(repr(item).encode())
        return found.hexdigest()[:16]


def load_xtreme(spec: str, data_dir: Path | None) -> XtremeData:
    """`TASK[:languages=en+de]`, from the published files in the data folder."""
    name, *options = spec.split(":")
    asked = parse_options(f"task {spec!r}", options, {"languages": ()}).get("languages", "")
    wanted = parse_languages(f"task {spec!r}", asked)
    if data_dir is None:
        raise RunError(f"the task {name} needs the data folder: set POINTSMAN_DATA")
    task = XTREME[name]
    trained = load_task(name, data_dir, "train", languages=[ENGLISH])
    rows = trained.rows.get(ENGLISH, [])
    reported = load_task(name, data_dir, "test")
    tests = reported.rows
    chosen = wanted or sorted(tests, key=lambda language: (language != ENGLISH, language))
    for language in chosen:
        if language not in tests:
            raise RunError(f"task {spec!r}: no test part in {language!r}: {did_you_mean(language, tests)}")
        if not tests[language]:
            raise RunError(
                f"the task {name}: the test part in {language!r} is empty in {task_folder(task.test.folder, data_dir)}"
            )
    held = [hashed(f"valid {group}") % VALIDATION == 0 for group in groups_of(rows)]
    splits = {
        "train": [row for row, out in zip(rows, held, strict=True) if not out],
        "valid": [row for row, out in zip(rows, held, strict=True) if out],
    }
    if not splits["train"] or not splits["valid"]:
        raise RunError(f"the task {name}: too few English rows to train on ({len(rows)}) in {data_dir}")
    groups = parallel_groups(tests)
    how = task.how
    if name == "panx-dev":
        known = set(groups_of(rows))
        same = sum(group in known for language in chosen for group in groups[language])
        how = f"{how}, {same:,} of their sentences are in the English training set, too"
    shown = replace(reported, rows={language: tests[language] for language in chosen})
    return XtremeData(
        name, task.kind, task.labels, splits, shown.rows,
        {language: groups[language] for language in chosen},
        f"{name}: {f'{how}; ' if how else ''}trained on {trained.described(data_dir)}, of which "
        f"{len(splits['valid']):,} for validation; reported: {shown.described(data_dir)}",
    )  # fmt: skip


def groups_of(items: Sequence[Any]) -> list[str]:
    """For each item a name of what it must not be separated from, and is resampled with.

    Pairs that share a sentence, questions on one passage, tagged sentences of the same words.
    """
    if items and isinstance(items[0], Pair):
        return components([item.texts for item in items])
    return [item.context if isinstance(item, Question) else " ".join(item.words) for item in items]


def original(item: Item) -> int | str | None:
    """What an item and its translations have in common: the row of a pair, the id of a question; None of words."""
    if isinstance(item, Tagged):
        return None
    return item.id if isinstance(item, Question) else item.row


def parallel_groups(tests: Mapping[str, Sequence[Item]]) -> dict[str, list[str]]:
    """language -> `groups_of` its items, where a translation is in the group of its English item.

    Two pairs may share a sentence in English and none in a translation. Without English the first language decides.
    """
    first = tests.get(ENGLISH) or next(iter(tests.values()))
    names = dict(zip(map(original, first), groups_of(first), strict=True))
    names.pop(None, None)
    return {
        language: [names.get(original(item), own) for item, own in zip(items, groups_of(items), strict=True)]
        for language, items in tests.items()
    }


Key = TypeVar("Key")
_SENTENCE = re.compile(r"[^.!?。！？।؟]+[.!?。！？।؟]*")


def floors(name: str, train: Sequence[Any], items: Sequence[Any]) -> Mapping[str, Sequence[Prediction]]:
    """Name of a floor -> its prediction for each item.

    - pairs: the commonest class of training, and naive Bayes on the words of the second sentence alone.
    - udpos: a word's commonest tag in training, NOUN for a new word.
    - panx: the longest entities of training that occur in the sentence (a gazetteer).
    - questions: the sentence of the passage that shares most words with the question.
    """
    if isinstance(items[0], Pair):
        common = Counter(pair.label for pair in train).most_common(1)[0][0]
        bayes = _Bayes(train)
        return {"majority": [common] * len(items), "second sentence alone": [bayes(item.second) for item in items]}
    if isinstance(items[0], Question):
        return {"nearest sentence": [_nearest(item) for item in items]}
    if name.startswith("panx"):
        known = _commonest((row.words[one.start : one.end], one.kind) for row in train for one in entities(row.tags))
        return {"gazetteer": [_looked_up(item.words, known) for item in items]}
    tags = _commonest(pair for row in train for pair in zip(row.words, row.tags, strict=True))
    return {"commonest tag": [[tags.get(word, "NOUN") for word in item.words] for item in items]}


class _Bayes:
    """Naive Bayes over the words of a sentence, with one added to every count."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.classes = Counter(pair.label for pair in pairs)
        self.counts = {label: Counter[str]() for label in self.classes}
        for pair in pairs:
            self.counts[pair.label].update(pair.second.lower().split())
        self.words = len(set().union(*self.counts.values()))
        self.sums = {label: sum(found.values()) for label, found in self.counts.items()}

    def __call__(self, text: str) -> str:
        words = text.lower().split()

        def chance(label: str) -> float:
            total = self.sums[label] + self.words + 1
            return math.log(self.classes[label]) + sum(
                math.log((self.counts[label][word] + 1) / total) for word in words
            )

        return max(sorted(self.classes), key=chance)


def _commonest(pairs: Iterable[tuple[Key, str]]) -> dict[Key, str]:
    """Key -> the value that stands most often beside it."""
    counts: dict[Key, Counter[str]] = {}
    for key, value in pairs:
        counts.setdefault(key, Counter())[value] += 1
    return {key: values.most_common(1)[0][0] for key, values in counts.items()}


def _looked_up(words: Sequence[str], known: Mapping[tuple[str, ...], str]) -> list[str]:
    tags = ["O"] * len(words)
    place = 0
    while place < len(words):
        for size in range(min(8, len(words) - place), 0, -1):
            if kind := known.get(tuple(words[place : place + size])):
                tags[place : place + size] = [f"B-{kind}", *[f"I-{kind}"] * (size - 1)]
                place += size
                break
        else:
            place += 1
    return tags


def _nearest(item: Question) -> str:
    sentences = [found.group().strip() for found in _SENTENCE.finditer(item.context) if found.group().strip()]
    return max(sentences or [item.context], key=lambda sentence: same_words(sentence, item.question))
