"""Scores of cross-lingual tasks with standard errors: every figure is a ratio of sums over items.

An item's counts are (numerator, denominator): accuracy (right, words), micro F1 (2 right, there + claimed), an answer's
F1 (F1, 1). Standard errors are those of 200 resamples of whole groups of items (pairs of one premise, questions on one
passage). How often a resample has a group is Poisson(1), drawn from a hash of the group's name (the Poisson bootstrap):
the same in every language, whatever rows that language lacks. So the error of a mean over languages is not that of
independent items where they are translations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pointsman_lab.tasks.crosslingual.answers import AnswerScore, normalized, score_answers
from pointsman_lab.tasks.crosslingual.entities import entities, f1_xtreme
from pointsman_lab.tasks.crosslingual.formats import Question, Tagged
from pointsman_lab.tasks.crosslingual.xtreme import Item

RESAMPLES = 200
_AT_MOST = np.cumsum([math.exp(-1) / math.factorial(times) for times in range(8)])
"""The distribution of Poisson(1)."""

Counts = NDArray[np.float64]
Prediction = str | Sequence[str]


@dataclass(frozen=True)
class Score:
    """A figure of one language, as a share.

    Attributes:
        value: the figure. drawn: the same in each of the resamples. others: further figures, by name.
    """

    value: float
    drawn: NDArray[np.float64]
    others: Mapping[str, float]

    @property
    def error(self) -> float:
        """The standard error."""
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
    name: str,
    language: str,
    items: Sequence[Item],
    predictions: Sequence[Prediction],
    groups: Sequence[str],
    seen: frozenset[tuple[str, ...]] = frozenset(),
) -> Score:
    """The figures of one language.

    By what the task's name begins with:

    - xnli, pawsx: accuracy.
    - udpos: accuracy over words; `f1_xtreme`, XTREME's figure, beside it.
    - panx: micro F1 of entities; `accuracy` over words; `f1_new`, without sentences that are also in training.
    - mlqa: F1 and `exact` by MLQA's rules of the language, as XTREME has it; `f1_squad` by SQuAD's.
    - other questions: F1 and `exact` by SQuAD's rules in every language, as XTREME has it; `f1_language` by MLQA's.

    Args:
        predictions: of each item its class, its words' tags, or its answer.
        groups: of the items, as in `XtremeData.groups`.
        seen: the sentences of training, as words.
    """
    first = items[0]
    others: dict[str, float] = {}
    if isinstance(first, Question):
        squad, local = (_answers(items, predictions, rules) for rules in (None, language))  # type: ignore[arg-type]
        shown, other, beside = (local, squad, "f1_squad") if name.startswith("mlqa") else (squad, local, "f1_language")
        counts = np.array([(one.f1, 1.0) for one in shown])
        others = {"exact": float(np.mean([one.exact for one in shown])),
                  beside: float(np.mean([one.f1 for one in other]))}  # fmt: skip
    elif isinstance(first, Tagged):
        truth = [item.tags for item in items]  # type: ignore[union-attr]
        words = np.array([_words(one, given) for one, given in zip(truth, predictions, strict=True)])
        if name.startswith("panx"):
            counts = np.array([_entities(one, given) for one, given in zip(truth, predictions, strict=True)])
            new = [item.words not in seen for item in items]  # type: ignore[union-attr]
            others = {"accuracy": ratio(words), "f1_new": ratio(counts[new])}
        else:
            counts = words
            others = {"f1_xtreme": f1_xtreme(truth, predictions).f1}
    else:
        counts = np.array([(item.label == given, 1.0) for item, given in zip(items, predictions, strict=True)])  # type: ignore[union-attr]
    return Score(ratio(counts), resampled(counts, groups), others)


def mean_error(scores: Sequence[Score]) -> float:
    """The standard error of the mean over languages."""
    return float(np.mean([each.drawn for each in scores], axis=0).std())


def _words(truth: Sequence[str], given: Prediction) -> tuple[float, float]:
    """Words without a tag ("_" of a treebank) do not count."""
    counted = [(one, other) for one, other in zip(truth, given, strict=True) if one != "_"]
    return float(sum(one == other for one, other in counted)), float(len(counted))


def _entities(truth: Sequence[str], given: Prediction) -> tuple[float, float]:
    one, other = set(entities(truth)), set(entities(given))
    return 2.0 * len(one & other), float(len(one) + len(other))


def _answers(items: Sequence[Question], given: Sequence[str], language: str | None) -> list[AnswerScore]:
    """Of each question; `language` as of `score_answers`."""
    return [
        score_answers({item.id: text}, {item.id: [right for right, _ in item.answers]}, language)
        for item, text in zip(items, given, strict=True)
    ]


def best_floor(
    name: str, kind: str, language: str, items: Sequence[Item], groups: Sequence[str],
    floors: Mapping[str, Sequence[Prediction]],
) -> tuple[str, float]:  # fmt: skip
    """The name and the figure of the best prediction without a model."""
    figures = {label: score(name, language, items, given, groups).value for label, given in floors.items()}
    return max(figures.items(), key=lambda pair: pair[1])


def same_words(one: str, other: str) -> int:
    """How many words two texts share, by SQuAD's normalisation."""
    return len(set(normalized(one).split()) & set(normalized(other).split()))
