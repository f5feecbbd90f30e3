"""Scores of cross-lingual tasks with standard errors: every figure is a ratio of sums over items.

An item's counts are (numerator, denominator): accuracy (right, words), micro F1 (2 right, there + claimed), an answer's
F1 (F1, 1). Standard errors are those of 200 resamples of whole groups of items (pairs of one premise, questions on one
passage). How often a resample has a group is Poisson(1), drawn from a hash of the group's name (the Poisson bootstrap):
the same in every language, whatever rows that language lacks. So the error of a mean over languages is not that of
independent items where they are translations.

XTREME scores XQuAD and TyDiQA by SQuAD 1.1's rules in every language: lower case, ASCII punctuation and English
articles removed, words at white space. MLQA is scored by its own: the punctuation of Unicode and the language's own
articles are removed, and Chinese is split into characters.

Entities follow conlleval: one starts at a B- tag, at an I- tag after O or after another type, and ends where the next
one starts or at O. `f1_xtreme` applies the same function to bare tags, as XTREME's script for parts of speech does: the
first letter is then read as the position in a chunk and the rest as its type, so that runs of equal tags count as one
chunk.
"""

import hashlib
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman_lab.tasks.crosslingual.formats import Question, Tagged

RESAMPLES = 200
_AT_MOST = np.cumsum([math.exp(-1) / math.factorial(times) for times in range(8)])
"""The distribution of Poisson(1)."""

Counts = NDArray[np.float64]
Prediction = str | Sequence[str]

_ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "ar": r"\sال^|ال",
}


class AnswerScore(NamedTuple):
    """Shares from 0 to 1: answers that match exactly, and the mean F1 of their words."""

    exact: float
    f1: float


def words_of(text: str, language: str | None = None) -> list[str]:
    """The words of an answer by MLQA's rules of a language; None: by those of SQuAD 1.1."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    if language is not None:
        kept = "".join(character for character in kept if unicodedata.category(character)[0] != "P")
    if articles := _ARTICLES.get(language or "en"):
        kept = re.sub(articles, " ", kept)
    if language == "zh":  # Chinese characters one by one, other words at white space
        return re.findall(r"[\u4e00-\u9fa5]|[^\u4e00-\u9fa5\s]+", kept)
    return kept.split()


def word_f1(given: Sequence[str], expected: Sequence[str]) -> float:
    """F1 of two bags of words; SQuAD's: 0 where they share none."""
    same = sum((Counter(given) & Counter(expected)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(given), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def score_answers(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]], language: str | None = None
) -> AnswerScore:
    """The best of each question's answers counts; a missing prediction scores 0."""
    exact = f1 = 0.0
    for identity, right in answers.items():
        if identity in predictions:
            given, expected = words_of(predictions[identity], language), [words_of(one, language) for one in right]
            exact += given in expected
            f1 += max(word_f1(given, words) for words in expected)
    count = max(1, len(answers))
    return AnswerScore(exact / count, f1 / count)


class Entity(NamedTuple):
    """Words from `start` up to, not including, `end`."""

    kind: str
    start: int
    end: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities in the tags of one sentence."""
    found: list[Entity] = []
    before, kind, start = "O", "", 0
    for place, tag in enumerate([*tags, "O"]):
        position, _, name = tag.partition("-")
        name = name or "_"
        other = name != kind
        ends = before in "ES" or (before in "BI" and position in "BSO") or (before not in "O." and other)
        starts = position in "BS" or (before in "ESO" and position in "EI") or (position not in "O." and other)
        if ends:
            found.append(Entity(kind, start, place))
        if starts:
            start = place
        before, kind = position, name
    return found


def entity_counts(truth: Sequence[str], given: Sequence[str]) -> tuple[float, float]:
    """Of micro F1: an entity counts if type and both borders are right."""
    one, other = set(entities(truth)), set(entities(given))
    return 2.0 * len(one & other), float(len(one) + len(other))


def f1_xtreme(truth: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> float:
    """XTREME's F1 of parts of speech: that of entities, each tag read as a letter and a type.

    As in XTREME's script the sentences are one sequence with an O between them, which decides about tags of one letter.
    """
    one, other = (
        [word for tags in sentences for word in [*(f"{tag[0]}-{tag[1:]}" for tag in tags), "O"]]
        for sentences in (truth, predicted)
    )
    return ratio(np.array([entity_counts(one, other)]))


@dataclass(frozen=True)
class Score:
    """A figure of one language, as a share, with its standard error `error`.

    Attributes:
        value: the figure. drawn: the same in each of the resamples. others: further figures, by name.
    """

    value: float
    drawn: NDArray[np.float64]
    others: Mapping[str, float]

    @property
    def error(self) -> float:
        return float(self.drawn.std())


def ratio(counts: Counts) -> float:
    """The figure of items [n, 2]."""
    top, bottom = counts.sum(0)
    return float(top / bottom) if bottom else 0.0


def resampled(counts: Counts, groups: Sequence[str]) -> NDArray[np.float64]:
    """The figure in 200 resamples of the groups; that of all items where a resample is empty."""
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    sums = np.zeros((len(number), 2))
    np.add.at(sums, [number[group] for group in groups], counts)
    times = np.stack([_times(group) for group in number])
    found = np.einsum("gr,gc->rc", times, sums)  # not @: BLAS's bits depend on the number of threads
    return np.array([top / bottom if bottom else ratio(counts) for top, bottom in found])


def _times(group: str) -> Counts:
    """[200], how often each resample has this group."""
    drawn = np.frombuffer(hashlib.shake_128(group.encode()).digest(2 * RESAMPLES), "<u2")
    return np.searchsorted(_AT_MOST, drawn / 2**16, side="right").astype(np.float64)


def metric_of(kind: str, name: str) -> str:
    """The name of a task's first figure."""
    return "f1" if kind == "questions" or name.startswith("panx") else "accuracy"


def score(
    name: str, language: str, items: Sequence[Any], predictions: Sequence[Prediction], groups: Sequence[str]
) -> Score:
    """The figures of one language.

    By what the task's name begins with:

    - xnli, pawsx: accuracy.
    - udpos: accuracy over words; `f1_xtreme`, XTREME's figure, beside it.
    - panx: micro F1 of entities; `accuracy` over words.
    - questions: F1 and `exact`, as XTREME has it: of mlqa by MLQA's rules of the language, of others by SQuAD's.
    """
    pairs: list[tuple[Any, Any]] = list(zip(items, predictions, strict=True))
    others: dict[str, float] = {}
    if isinstance(items[0], Question):
        rules = language if name.startswith("mlqa") else None
        found = [score_answers({"": given}, {"": [right for right, _ in item.answers]}, rules) for item, given in pairs]
        counts = np.array([(one.f1, 1.0) for one in found])
        others = {"exact": float(np.mean([one.exact for one in found]))}
    elif isinstance(items[0], Tagged):
        counts = words = np.array([_words(item.tags, given) for item, given in pairs])
        if name.startswith("panx"):
            counts = np.array([entity_counts(item.tags, given) for item, given in pairs])
            others = {"accuracy": ratio(words)}
        else:
            others = {"f1_xtreme": f1_xtreme([item.tags for item in items], predictions)}
    else:
        counts = np.array([(item.label == given, 1.0) for item, given in pairs])
    return Score(ratio(counts), resampled(counts, groups), others)


def mean_error(scores: Sequence[Score]) -> float:
    """The standard error of the mean over languages."""
    return float(np.mean([each.drawn for each in scores], axis=0).std())


def _words(truth: Sequence[str], given: Prediction) -> tuple[float, float]:
    """Words without a tag ("_" of a treebank) do not count."""
    counted = [(one, other) for one, other in zip(truth, given, strict=True) if one != "_"]
    return float(sum(one == other for one, other in counted)), float(len(counted))


def same_words(one: str, other: str) -> int:
    """How many words two texts share, by SQuAD's normalisation."""
    return len(set(words_of(one)) & set(words_of(other)))
