"""A fine-tuned encoder on the test parts of every language, with the same weights, at any k.

What it reads are `Features`: the rows of the items of a task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.data.pieces import END, START, UNKNOWN, Pieces
from pointsman_lab.data.streams import IGNORE
from pointsman_lab.data.task_streams import Encoded, drawn_within
from pointsman_lab.tasks.crosslingual.formats import Pair, Question, Tagged
from pointsman_lab.tasks.crosslingual.scores import Prediction, Score, mean_error

LONGEST_QUESTION, OVERLAP = 64, 128  # pieces, at length 384; XTREME's windows start every 128
BEST, LONGEST_ANSWER = 20, 30

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Features:
    """Rows for a model, and what leads from them back to the items.

    Attributes:
        encoded: rows; labels are [n] classes (pairs), [n, T] tags with -100 (tags), or [n, 2] first and last piece
            of the answer, both 0 in a window without it (questions).
        items: [n], the item of each row.
        words: of tags, for each row the places of the words' first pieces.
        offsets: of questions, for each row where its pieces stand in the passage, [T, 2], -1 outside.
    """

    encoded: Encoded
    items: NDArray[np.int64]
    words: Sequence[Ids] = field(default_factory=tuple)
    offsets: Sequence[Ids] = field(default_factory=tuple)

    def within(self, tokens: int) -> NDArray[np.int64]:
        """The items whose rows have at most about `tokens` pieces together, drawn with a fixed seed."""
        return drawn_within(np.bincount(self.items, [len(row) for row in self.encoded.rows]), tokens)


def features(items: Sequence[Any], pieces: Pieces, length: int, classes: Mapping[str, int]) -> Features:
    """Items of one kind as rows of at most `length` pieces."""
    if length < 16:
        raise RunError(f"length {length}: at least 16 pieces are needed")
    if isinstance(items[0], Pair):
        return _pairs(items, pieces, length, classes)
    return _tags(items, pieces, length, classes) if isinstance(items[0], Tagged) else _questions(items, pieces, length)


def _unknown(rows: Sequence[Ids]) -> int:
    return sum(int((row == UNKNOWN).sum()) for row in rows)


def _pairs(items: Sequence[Pair], pieces: Pieces, length: int, classes: Mapping[str, int]) -> Features:
    """`<s> A </s> </s> B </s>`; the longer sentence is cut until both fit."""
    rows, cut = [], 0
    for item in items:
        one, other = pieces.encode(item.first), pieces.encode(item.second)
        room = length - 4
        if len(one) + len(other) > room:
            cut += 1
            kept = min(len(one), max(room - len(other), (room + 1) // 2))
            one, other = one[:kept], other[: room - kept]
        rows.append(np.array([START, *one, END, END, *other, END], dtype=np.int64))
    labels = np.array([classes[item.label] for item in items], dtype=np.int64)
    return Features(Encoded(tuple(rows), labels, cut, _unknown(rows)), np.arange(len(rows)))


def _tags(items: Sequence[Tagged], pieces: Pieces, length: int, classes: Mapping[str, int]) -> Features:
    """A word's first piece has its tag; a sentence that is too long goes on in a next row, at a word's border."""
    rows, tags, words = list[Ids](), list[Ids](), list[Ids]()
    owners: list[int] = []
    cut = 0
    for owner, item in enumerate(items):
        parts: list[list[tuple[list[int], int]]] = [[]]  # of each row: a word's pieces and its tag
        room = length - 2
        for word, tag in zip(item.words, item.tags, strict=True):
            own = pieces.encode(word).tolist() or [UNKNOWN]
            cut += len(own) > length - 2
            own = own[: length - 2]
            if len(own) > room:
                parts.append([])
                room = length - 2
            parts[-1].append((own, classes.get(tag, IGNORE)))
            room -= len(own)
        for part in parts:
            rows.append(np.array([START, *(piece for own, _ in part for piece in own), END], dtype=np.int64))
            words.append(np.cumsum([1, *(len(own) for own, _ in part)])[:-1])
            tags.append(np.full(length, IGNORE, dtype=np.int64))
            tags[-1][words[-1]] = [tag for _, tag in part]
            owners.append(owner)
    labels = np.stack(tags)[:, : max(map(len, rows))]
    return Features(Encoded(tuple(rows), labels, cut, _unknown(rows)), np.array(owners), words)


def _questions(items: Sequence[Question], pieces: Pieces, length: int) -> Features:
    """`<s> question </s> </s> window </s>`, windows of a passage overlap; at smaller lengths all in proportion."""
    rows, offsets = list[Ids](), list[Ids]()
    spans: list[tuple[int, int]] = []
    owners: list[int] = []
    cut = 0
    contexts: dict[str, tuple[Ids, Ids]] = {}
    for owner, item in enumerate(items):
        asked = pieces.encode(item.question)[: min(LONGEST_QUESTION, length // 4)]
        if item.context not in contexts:
            contexts[item.context] = pieces.encode_with_offsets(item.context)
        ids, places = contexts[item.context]
        text, start = item.answers[0]
        inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < start + len(text)))
        room = length - len(asked) - 4
        step = room - min(OVERLAP, room // 2)
        head = len(asked) + 3
        begins = range(0, max(1, len(ids) - room + step), step)
        cut += len(begins) > 1
        for begin in begins:
            window = ids[begin : begin + room]
            rows.append(np.array([START, *asked, END, END, *window, END], dtype=np.int64))
            at = np.full((len(rows[-1]), 2), -1, dtype=np.int64)
            at[head : head + len(window)] = places[begin : begin + room]
            offsets.append(at)
            owners.append(owner)
            whole = inside.size and begin <= inside[0] and inside[-1] < begin + len(window)
            spans.append((head + inside[0] - begin, head + inside[-1] - begin) if whole else (0, 0))
    labels = np.array(spans, dtype=np.int64)
    return Features(Encoded(tuple(rows), labels, cut, _unknown(rows)), np.array(owners), (), offsets)


def answer(item: Question, windows: Sequence[tuple[NDArray[np.float64], Ids]]) -> str:
    """The best answer to a question; "" where no window has one.

    A score is the sum of the logits of the first and the last piece. Of each window the 20 best first and last pieces
    count, in the passage, at most 30 pieces apart. The text is that of the passage, from the first piece's start to the
    last one's end.

    Args:
        windows: of each window the logits [2, T] and the pieces' offsets [T, 2].
    """
    best, text = -np.inf, ""
    for logits, places in windows:
        inside = np.flatnonzero(places[:, 0] >= 0)
        firsts, lasts = (inside[np.argsort(-logits[side][inside], kind="stable")[:BEST]] for side in (0, 1))
        for first in firsts:
            for last in lasts:
                score = float(logits[0][first]) + float(logits[1][last])
                if first <= last < first + LONGEST_ANSWER and score > best:
                    best, text = score, item.context[places[first, 0] : places[last, 1]].strip()
    return text


@dataclass(frozen=True)
class TestPart:
    """What is scored of one language: its items, their rows and groups, and its best floor with its name."""

    items: Sequence[Any]
    rows: Features
    groups: Sequence[str]
    floor: tuple[str, float] | None = None


def nats_of(logits: Tensor, labels: Tensor, kind: str) -> tuple[float, int]:
    """The nats of a batch's targets together, and how many they are."""
    labels = labels[:, : logits.shape[1]] if kind == "tags" else labels
    logits, labels = logits.double().reshape(-1, logits.shape[-1]), labels.reshape(-1)
    nats = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    return float(nats), int((labels != IGNORE).sum())


def predicted(kind: str, classes: Sequence[str], part: TestPart, outputs: Sequence[Any]) -> list[Prediction]:
    """Of each item its class, its words' tags, or the best answer to its question.

    Args:
        outputs: of each row the largest class, that of each place, or the logits [2, T].
    """
    if kind == "pairs":
        return [classes[int(output)] for output in outputs]
    found, count = part.rows, len(part.rows.items)
    rows = np.split(np.arange(count), np.flatnonzero(np.diff(found.items)) + 1)  # of each item: they lie in order
    if kind == "questions":
        pairs = zip(part.items, rows, strict=True)
        return [answer(item, [(outputs[row], found.offsets[row]) for row in own]) for item, own in pairs]
    return [[classes[int(tag)] for row in own for tag in outputs[row][found.words[row]]] for own in rows]


def table(scores: Mapping[str, Score], parts: Mapping[str, TestPart]) -> dict[str, Any]:
    """What a record has of all languages.

    Returns:
        {"value": the mean over languages, "error": its standard error, "transfer": the mean without English, "gap":
        English minus it, "exact_match" of questions and "f1_xtreme" of udpos (means over languages), "languages":
        {language: {"value", "error", "items", "unknown", "floor", "floor_name", further figures}}}.
    """
    languages: dict[str, dict[str, Any]] = {}
    for language, each in scores.items():
        part = parts[language]
        encoded = part.rows.encoded
        pieces = sum(map(len, encoded.rows))
        languages[language] = {"value": each.value, "error": each.error, "items": len(part.items),
                               "unknown": encoded.unknown / max(1, pieces), **each.others}  # fmt: skip
        if part.floor:
            languages[language] |= {"floor_name": part.floor[0], "floor": part.floor[1]}
    others = [each.value for language, each in scores.items() if language != "en"]
    transfer = float(np.mean(others)) if others else None
    english = scores["en"].value if "en" in scores else None
    first = next(iter(scores.values())).others
    shown = {"exact": "exact_match", "f1_xtreme": "f1_xtreme"}
    return {
        **{shown[key]: float(np.mean([each.others[key] for each in scores.values()])) for key in first if key in shown},
        "value": float(np.mean([each.value for each in scores.values()])),
        "error": mean_error(list(scores.values())),
        "transfer": transfer,
        "gap": english - transfer if english is not None and transfer is not None else None,
        "languages": languages,
    }
