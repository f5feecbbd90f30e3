"""What a task's figures are without a model: the majority, words alone, a gazetteer, the nearest sentence.

A floor is learned from the English training rows, as the models are, and applied to every language.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from pointsman_lab.tasks.crosslingual.formats import Pair, Question, Tagged
from pointsman_lab.tasks.crosslingual.scores import Prediction, entities, same_words
from pointsman_lab.tasks.crosslingual.xtreme import Item

_SENTENCE = re.compile(r"[^.!?。！？।؟]+[.!?。！？।؟]*")


def floors(name: str, train: Sequence[Item], items: Sequence[Item]) -> Mapping[str, Sequence[Prediction]]:
    """Name of a floor -> its prediction for each item.

    - pairs: the commonest class of training, and naive Bayes on the words of the second sentence alone.
    - udpos: a word's commonest tag in training, NOUN for a new word.
    - panx: the longest entities of training that occur in the sentence (a gazetteer).
    - questions: the sentence of the passage that shares most words with the question.
    """
    first = items[0]
    if isinstance(first, Pair):
        pairs = [item for item in train if isinstance(item, Pair)]
        common = Counter(pair.label for pair in pairs).most_common(1)[0][0]
        bayes = _Bayes(pairs)
        return {
            "majority": [common] * len(items),
            "second sentence alone": [bayes(item.second) for item in items if isinstance(item, Pair)],
        }
    if isinstance(first, Tagged):
        rows = [item for item in train if isinstance(item, Tagged)]
        sentences = [item for item in items if isinstance(item, Tagged)]
        if name.startswith("panx"):
            known = _gazetteer(rows)
            return {"gazetteer": [_looked_up(item.words, known) for item in sentences]}
        counts: dict[str, Counter[str]] = {}
        for row in rows:
            for word, tag in zip(row.words, row.tags, strict=True):
                counts.setdefault(word, Counter())[tag] += 1
        tags = {word: found.most_common(1)[0][0] for word, found in counts.items()}
        return {"commonest tag": [[tags.get(word, "NOUN") for word in item.words] for item in sentences]}
    return {"nearest sentence": [_nearest(item) for item in items if isinstance(item, Question)]}


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


def _gazetteer(rows: Sequence[Tagged]) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        for entity in entities(row.tags):
            found.setdefault(row.words[entity.start : entity.end], Counter())[entity.kind] += 1
    return {words: kinds.most_common(1)[0][0] for words, kinds in found.items()}


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
