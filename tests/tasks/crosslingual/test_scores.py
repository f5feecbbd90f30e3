"""Answers by the published rules, by hand; F1 of entities, held against seqeval."""

import random
import warnings

import numpy as np
import pytest

from pointsman_lab.tasks.crosslingual.scores import (
    Entity,
    entities,
    entity_counts,
    f1_xtreme,
    ratio,
    score_answers,
    words_of,
)
from pointsman_lab.tasks.crosslingual.xtreme import PANX_TAGS, UPOS


def test_squad_removes_articles_case_and_ascii_punctuation() -> None:
    assert words_of("The  Cat, an animal!") == ["cat", "animal"]
    assert words_of("«Chat»") == ["«chat»"]


def test_the_best_answer_counts_and_a_missing_one_scores_0() -> None:
    answers = {"a": ["the red cat", "dog"], "b": ["x"]}
    score = score_answers({"a": "red dog"}, answers)
    assert score.exact == 0
    assert score.f1 == pytest.approx((2 * 0.5 * 1 / 1.5) / 2)
    assert score_answers({"a": "The dog.", "b": "x"}, answers) == (1.0, 1.0)
    assert score_answers({"b": "x x y"}, {"b": ["x y"]}).f1 == pytest.approx(2 * (2 / 3) / (2 / 3 + 1)), "bags of words"


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
    assert words_of(text, language) == words


def test_chinese_counts_characters_only_by_mlqa() -> None:
    answers = {"a": ["北京"]}
    assert score_answers({"a": "北"}, answers).f1 == 0
    assert score_answers({"a": "北"}, answers, "zh").f1 == pytest.approx(2 / 3)


def test_entities_by_hand() -> None:
    assert entities(["B-PER", "I-PER", "O", "I-LOC", "I-ORG", "B-ORG"]) == [
        Entity("PER", 0, 2),
        Entity("LOC", 3, 4),
        Entity("ORG", 4, 5),
        Entity("ORG", 5, 6),
    ]
    assert entity_counts(["B-PER", "I-PER", "O"], ["B-PER", "O", "B-LOC"]) == (0, 3)
    assert entity_counts(["B-PER", "O", "B-LOC"], ["B-PER", "O", "O"]) == (2, 3)


def entity_f1(truth: list[list[str]], guess: list[list[str]]) -> float:
    return ratio(np.array([entity_counts(one, other) for one, other in zip(truth, guess, strict=True)]))


@pytest.mark.parametrize(("tags", "ours"), [(PANX_TAGS, entity_f1), (UPOS, f1_xtreme)], ids=["entities", "tags"])
def test_equal_to_seqeval(tags: tuple[str, ...], ours: object) -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    assert callable(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns that parts of speech are no entities
        draw = random.Random(0)
        for _ in range(200):
            truth = [[draw.choice(tags) for _ in range(draw.randint(1, 12))] for _ in range(4)]
            guess = [[draw.choice(tags) if draw.random() < 0.3 else tag for tag in row] for row in truth]
            assert ours(truth, guess) == pytest.approx(float(seqeval.f1_score(truth, guess, zero_division=0)))
