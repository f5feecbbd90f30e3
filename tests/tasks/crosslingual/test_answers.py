"""Exact match and F1 of answers: the published rules by hand."""

from __future__ import annotations

import pytest

from pointsman_lab.tasks.crosslingual.answers import normalized, normalized_in, score_answers


def test_squad_removes_articles_case_and_ascii_punctuation() -> None:
    assert normalized("The  Cat, an animal!") == "cat animal"
    assert normalized("«Chat»") == "«chat»"


def test_the_best_answer_counts_and_a_missing_one_scores_0() -> None:
    answers = {"a": ["the red cat", "dog"], "b": ["x"]}
    score = score_answers({"a": "red dog"}, answers)
    assert score.exact == 0
    assert score.f1 == pytest.approx((2 * 0.5 * 1 / 1.5) / 2)
    assert score_answers({"a": "The dog.", "b": "x"}, answers) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("de", "Der „alte“ Mann", ["alte", "mann"]),
        ("es", "¿la casa?", ["casa"]),
        ("zh", "北京。2008年", ["北", "京", "2008", "年"]),
        ("hi", "एक किताब।", ["एक", "किताब"]),
    ],
)
def test_mlqa_follows_the_language(language: str, text: str, words: list[str]) -> None:
    assert normalized_in(language)(text) == words


def test_chinese_counts_characters_only_by_mlqa() -> None:
    answers = {"a": ["北京"]}
    assert score_answers({"a": "北"}, answers).f1 == 0
    assert score_answers({"a": "北"}, answers, "zh").f1 == pytest.approx(2 / 3)
