"""F1 of entities, held against seqeval."""

from __future__ import annotations

import random
import warnings

import pytest

from pointsman_lab.tasks.crosslingual.entities import Entity, entities, entity_f1, f1_xtreme
from pointsman_lab.tasks.crosslingual.xtreme import PANX_TAGS, UPOS

DRAW = random.Random(0)


def test_by_hand() -> None:
    assert entities(["B-PER", "I-PER", "O", "I-LOC", "I-ORG", "B-ORG"]) == [
        Entity("PER", 0, 2),
        Entity("LOC", 3, 4),
        Entity("ORG", 4, 5),
        Entity("ORG", 5, 6),
    ]
    score = entity_f1([["B-PER", "I-PER", "O"]], [["B-PER", "O", "B-LOC"]])
    assert (score.precision, score.recall, score.f1) == (0.0, 0.0, 0.0)
    score = entity_f1([["B-PER", "O", "B-LOC"]], [["B-PER", "O", "O"]])
    assert (score.precision, score.recall, score.f1) == (1.0, 0.5, pytest.approx(2 / 3))


@pytest.mark.parametrize(("tags", "ours"), [(PANX_TAGS, entity_f1), (UPOS, f1_xtreme)], ids=["entities", "tags"])
def test_equal_to_seqeval(tags: tuple[str, ...], ours: object) -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    assert callable(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns that parts of speech are no entities
        for _ in range(200):
            truth = [[DRAW.choice(tags) for _ in range(DRAW.randint(1, 12))] for _ in range(4)]
            guess = [[DRAW.choice(tags) if DRAW.random() < 0.3 else tag for tag in row] for row in truth]
            assert ours(truth, guess).f1 == pytest.approx(float(seqeval.f1_score(truth, guess, zero_division=0)))
