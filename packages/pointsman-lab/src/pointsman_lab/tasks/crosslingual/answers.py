"""Exact match and F1 of answers: SQuAD 1.1's rules, and MLQA's for other languages.

XTREME scores XQuAD and TyDiQA by SQuAD's rules in every language: lower case, ASCII punctuation and English articles
removed, words at white space. MLQA is scored by its own: the punctuation of Unicode and the language's own articles are
removed, and Chinese is split into characters.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "ar": r"\sال^|ال",
}
_PUNCTUATION = {chr(code) for code in range(sys.maxunicode) if unicodedata.category(chr(code)).startswith("P")} | set(
    string.punctuation
)
_BY_CHARACTER = ("zh",)


class AnswerScore(NamedTuple):
    """Shares from 0 to 1: answers that match exactly, and the mean F1 of their words."""

    exact: float
    f1: float


def normalized(text: str) -> str:
    """SQuAD 1.1's form of an answer."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def normalized_in(language: str) -> Callable[[str], list[str]]:
    """MLQA's words of an answer in this language."""

    def words(text: str) -> list[str]:
        kept = "".join(character for character in text.lower() if character not in _PUNCTUATION)
        if language in _ARTICLES:
            kept = re.sub(_ARTICLES[language], " ", kept)
        return _mixed(kept) if language in _BY_CHARACTER else kept.split()

    return words


def _mixed(text: str) -> list[str]:
    """Chinese characters one by one, other words at white space."""
    found: list[str] = []
    for word in text.split():
        found += re.findall(r"[\u4e00-\u9fa5]|[^\u4e00-\u9fa5]+", word)
    return found


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
    """The best of each question's answers counts; a missing prediction scores 0.

    Args:
        predictions: question id -> text.
        answers: question id -> right answers.
        language: MLQA's rules in this language; None: SQuAD's.
    """
    words = (lambda text: normalized(text).split()) if language is None else normalized_in(language)
    exact = f1 = 0.0
    for identity, right in answers.items():
        if identity in predictions:
            given = words(predictions[identity])
            exact += max(given == words(answer) for answer in right)
            f1 += max(word_f1(given, words(answer)) for answer in right)
    count = max(1, len(answers))
    return AnswerScore(exact / count, f1 / count)
