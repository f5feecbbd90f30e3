"""Files of the cross-lingual tasks: pairs of sentences, tagged words, questions with answers; plain or .gz.

Every mistake names the file, and the line or the question's id.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import parse_json
from pointsman_lab.data.reading import open_unpacked, read_lines, reading

MOST_JSON = 2**28  # bytes of a file of questions


@dataclass(frozen=True)
class Pair:
    """Two sentences and their class.

    Attributes:
        row: its place in the file; None where rows of one place are no translations of each other.
    """

    first: str
    second: str
    label: str
    row: int | None = field(default=None, repr=False, compare=False)

    @property
    def texts(self) -> tuple[str, str]:
        return self.first, self.second


@dataclass(frozen=True)
class Tagged:
    """The words of a sentence and a tag for each."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question on a passage.

    Attributes:
        answers: (text, where it starts in `context`), the first one is trained on; all count in evaluation.
    """

    id: str
    context: str
    question: str
    answers: tuple[tuple[str, int], ...]


_COLUMNS = {"premise": 0, "sentence1": 0, "hypo": 1, "hypothesis": 1, "sentence2": 1, "label": 2, "gold_label": 2,
            "language": 3}  # fmt: skip
"""Names in the publishers' headers -> sentence, sentence, label, language."""
_LABELS = {"contradictory": "contradiction"}


def read_pairs(file: Path, labels: Sequence[str] | None, language: str = "en") -> dict[str, list[Pair]]:
    """language -> rows of XNLI, MultiNLI or PAWS-X.

    Without a header: `sentence<TAB>sentence<TAB>label` (XTREME's files). Quotes are text, as XTREME's own reader takes
    them: PAWS-X keeps those that its script's CSV writer added. With a header (the publishers' files) it names the
    columns. Rows without a gold label ("-" of MultiNLI) are passed over.

    Args:
        labels: None: labels are not needed.
        language: of a file that does not name languages.
    """
    found: dict[str, list[Pair]] = {}
    places: dict[int, int] = {}
    for number, line in read_lines(file):
        row = line.split("\t")
        if number == 1:
            places = {_COLUMNS[name]: at for at, name in enumerate(row) if name in _COLUMNS}
            if {0, 1, 2} <= places.keys():
                continue
            places = {}
        own = language
        if places:
            if len(row) <= (last := max(places.values())):
                raise RunError(f"{file}: line {number} has {len(row)} columns; more than {last} expected")
            own = row[places[3]] if 3 in places else language
            row = [row[places[0]], row[places[1]], _LABELS.get(row[places[2]], row[places[2]])]
            if row[2] == "-":
                continue
        if labels is None and len(row) == 2:
            row = [*row, ""]
        if len(row) == 2:
            raise RunError(
                f"{file}: line {number} has no label: an unlabelled part cannot be evaluated; XTREME's download takes "
                "the labels of its tests out, the publishers' files have them"
            )
        if len(row) != 3:
            raise RunError(f"{file}: line {number} has {len(row)} columns; sentence, sentence, label are expected")
        if labels is not None and row[2] not in labels:
            raise RunError(f"{file}: line {number}: unknown label {row[2]!r}: {did_you_mean(row[2], labels)}")
        rows = found.setdefault(own, [])
        rows.append(Pair(row[0], row[1], row[2], len(rows)))
    if not found:
        raise RunError(f"{file} has no row")
    return found


def read_tagged(file: Path, tags: Sequence[str] | None, language: str = "") -> list[Tagged]:
    """Sentences of `word<TAB>tag` lines with an empty line after each (WikiAnn), or of CoNLL-U (`.conllu`).

    A prefix `LANG:` of WikiAnn's raw release is taken off. CoNLL-U: FORM and UPOS; multi-word tokens, empty nodes and
    comments are passed over.
    """
    conllu = ".conllu" in file.name
    sentences: list[Tagged] = []
    words: list[str] = []
    found: list[str] = []
    for number, line in chain(read_lines(file), [(0, "")]):  # the last sentence ends with the file
        if not line.strip():
            if words:
                sentences.append(Tagged(tuple(words), tuple(found)))
                words, found = [], []
            continue
        if conllu and line.startswith("#"):
            continue
        row = line.split("\t")
        if tags is None and len(row) == 1:
            row = [*row, "_"]
        if len(row) == 1 and not conllu:
            raise RunError(
                f"{file}: line {number} has 1 columns; 2 are expected: XTREME's download takes the tags of its tests "
                "out, the publishers' files have them"
            )
        if len(row) != (10 if conllu else 2):
            raise RunError(f"{file}: line {number} has {len(row)} columns; {10 if conllu else 2} are expected")
        if conllu and not row[0].isdecimal():
            continue
        word, tag = (row[1], row[3]) if conllu else row
        prefix, colon, rest = word.partition(":")
        if not conllu and colon and rest and prefix == language:
            word = rest
        if tags is not None and tag not in tags:
            raise RunError(f"{file}: line {number}: unknown tag {tag!r}: {did_you_mean(tag, tags)}")
        words.append(word)
        found.append(tag)
    return sentences


def read_questions(file: Path, *, answered: bool = True) -> list[Question]:
    """Questions in SQuAD's form (SQuAD, XQuAD, MLQA, TyDiQA-GoldP)."""
    with reading(file), open_unpacked(file) as opened:
        raw = opened.read(MOST_JSON + 1)
    if len(raw) > MOST_JSON:
        raise RunError(f"{file}: more than {MOST_JSON:,} bytes")
    try:
        data = parse_json(raw.decode("utf-8-sig"))
        questions = [
            _question(file, paragraph["context"], item, answered)
            for article in data["data"]
            for paragraph in article["paragraphs"]
            for item in paragraph["qas"]
        ]
    except RunError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file}: not in SQuAD's form ({_reason(error)})") from None
    if not questions:
        raise RunError(f"{file} has no question")
    for name, times in Counter(question.id for question in questions).items():
        if times > 1:
            raise RunError(f"{file}: {times} questions have the id {name!r}: predictions are told apart by their ids")
    return questions


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _question(file: Path, context: str, item: Mapping[str, Any], answered: bool) -> Question:
    name = item["id"]
    try:
        question = str(item["question"])
        given = item["answers"] if answered else ()
        answers = tuple((str(answer["text"]), int(answer["answer_start"])) for answer in given)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RunError(f"{file}: question {name!r} is not in SQuAD's form ({_reason(error)})") from None
    for text, start in answers:
        if not text:
            raise RunError(
                f"{file}: question {name!r} has an empty answer: it cannot be evaluated (XTREME's download "
                "blanks the answers of its tests, the publishers' files have them)"
            )
        if start < 0 or context[start : start + len(text)] != text:
            raise RunError(f"{file}: the answer of question {name!r} does not stand at character {start}")
    if answered and not answers:
        raise RunError(f"{file}: question {name!r} has no answer")
    return Question(str(name), context, question, answers)
