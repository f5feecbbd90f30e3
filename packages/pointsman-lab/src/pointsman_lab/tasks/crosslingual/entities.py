"""Micro-averaged F1 of entities in IOB2 tags, by the rules of conlleval.

An entity starts at a B- tag, at an I- tag after O or after another type, and ends where the next one starts or at O.
`f1_xtreme` applies the same function to bare tags, as XTREME's script for parts of speech does: the first letter is
then read as the position in a chunk and the rest as its type, so that runs of equal tags count as one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


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


class F1(NamedTuple):
    """Precision, recall and their harmonic mean; 0 where nothing was found or nothing was there."""

    precision: float
    recall: float
    f1: float


def entity_f1(truth: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> F1:
    """Micro F1 over all sentences: an entity counts if type and both borders are right."""
    right = there = claimed = 0
    for expected, given in zip(truth, predicted, strict=True):
        one, other = set(entities(expected)), set(entities(given))
        right, there, claimed = right + len(one & other), there + len(one), claimed + len(other)
    precision = right / claimed if claimed else 0.0
    recall = right / there if there else 0.0
    return F1(precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0)


def f1_xtreme(truth: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> F1:
    """XTREME's F1 of parts of speech: `entity_f1` of the tags, each read as a letter and a type.

    As in XTREME's script the sentences are one sequence with an O between them, which decides about tags of one letter.
    """

    def read(sentences: Iterable[Sequence[str]]) -> list[list[str]]:
        return [[word for tags in sentences for word in [*(f"{tag[0]}-{tag[1:]}" for tag in tags), "O"]]]

    return entity_f1(read(truth), read(predicted))
