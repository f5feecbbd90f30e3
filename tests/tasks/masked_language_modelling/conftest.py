"""A small text in two languages, and pieces trained on it."""

import random

import pytest

pytest.importorskip("sentencepiece")

from pointsman_lab.data.pieces import Pieces, train_pieces
from pointsman_lab.tasks.masked_language_modelling.text import MultilingualText


def sentences(seed: int, count: int) -> tuple[str, ...]:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmno", k=draw.randint(2, 7))) for _ in range(80)]
    return tuple(" ".join(draw.choices(words, k=draw.randint(3, 12))) + "." for _ in range(count))


@pytest.fixture(scope="session")
def text() -> MultilingualText:
    return MultilingualText("two", {"aa": sentences(1, 1600), "bb": sentences(2, 800)}, {})


@pytest.fixture(scope="session")
def pieces(text: MultilingualText) -> Pieces:
    return train_pieces([*text.train["aa"][:400], *text.train["bb"][:400]], 150)
