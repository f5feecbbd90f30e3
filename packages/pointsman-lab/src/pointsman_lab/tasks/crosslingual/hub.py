"""XTREME's tasks from the Hugging Face hub (`google/xtreme`), written as the files that `xtreme.py` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman._files import scratch_folder, write_synced
from pointsman_lab.data.download import hub_rows, on_hub
from pointsman_lab.tasks.crosslingual.xtreme import CODES, ENGLISH, XNLI_LABELS

REPOSITORY, MULTINLI = "google/xtreme", "nyu-mll/multi_nli"
Files = Iterator[tuple[str, str]]
"""Names and contents."""


def fetch_task(name: str, folder: Path) -> None:
    """Writes the published parts of a folder of tasks into `folder`, all of them or none.

    Args:
        name: the folder's (`xtreme.Source.folder`).
        folder: not there yet.

    Raises:
        RunError: no network, no permission or space to write, `datasets` is not installed, other columns.
    """
    try:
        with scratch_folder(folder.parent) as scratch:
            made = scratch / folder.name
            made.mkdir()
            for file, content in _TASKS[name](name):
                write_synced(made / file, content.encode())
            if not any(made.iterdir()):
                raise RunError(f"{name}: the hub's {REPOSITORY} has no such part")
            made.rename(folder)
    except OSError as error:
        raise RunError(f"{name} cannot be written to {folder}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{name}: the hub's {REPOSITORY} has another form than expected ({error})") from None


def _languages(name: str, prefix: str) -> dict[str, str]:
    """language -> configuration `PREFIX.LANGUAGE`."""
    found = [
        one for one in on_hub(name, lambda hub: hub.get_dataset_config_names(REPOSITORY)) if one.startswith(prefix)
    ]
    return {config.removeprefix(prefix): config for config in found}


def _rows(name: str, config: str, split: str) -> Any:
    return hub_rows(name, REPOSITORY, config, split)


def _plain(text: str) -> str:
    """On one line, without tabs."""
    return " ".join(text.split())


def _table(rows: Iterable[Iterable[str]]) -> str:
    return "".join("\t".join(map(_plain, row)) + "\n" for row in rows)


def _pairs(rows: Iterable[Mapping[str, Any]], label: str) -> dict[str, list[tuple[str, str, str]]]:
    """language -> rows."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for row in rows:
        pair = (row["sentence1"], row["sentence2"], row[label])
        found.setdefault(row.get("language", ENGLISH), []).append(pair)
    return found


def _xnli(name: str) -> Files:
    """MultiNLI's training set, XNLI's development and test sets."""
    order = ("entailment", "neutral", "contradiction")
    rows = hub_rows(name, MULTINLI, None, "train")
    assert set(order) == set(XNLI_LABELS), "the hub's numbers of classes"
    yield "train-en.tsv", _table((row["premise"], row["hypothesis"], order[row["label"]]) for row in rows)
    for split, part in (("validation", "dev"), ("test", "test")):
        for language, pairs in _pairs(_rows(name, "XNLI", split), "gold_label").items():
            yield f"{part}-{language}.tsv", _table(pairs)


def _pawsx(name: str) -> Files:
    for language, config in _languages(name, "PAWS-X.").items():
        for split, part in (("train", "train"), ("validation", "dev"), ("test", "test")):
            if part != "train" or language == ENGLISH:
                yield f"{part}-{language}.tsv", _table(_pairs(_rows(name, config, split), "label")[ENGLISH])


def _tagged(name: str, config: str, split: str, words: str, tags: str) -> str:
    rows = _rows(name, config, split)
    names = rows.features[tags].feature.names
    sentences = (zip(row[words], row[tags], strict=True) for row in rows)
    lines = (
        "".join(f"{_plain(word)}\t{names[tag]}\n" for word, tag in sentence if word.strip()) for sentence in sentences
    )
    return "".join(f"{sentence}\n" for sentence in lines)


def _panx(name: str) -> Files:
    for language, config in _languages(name, "PAN-X.").items():
        if language == ENGLISH:
            yield "train-en.tsv", _tagged(name, config, "train", "tokens", "ner_tags")
        for split, part in (("validation", "dev"), ("test", "test")):
            yield f"{part}-{language}.tsv", _tagged(name, config, split, "tokens", "ner_tags")


def _udpos(name: str) -> Files:
    for language, config in _languages(name, "udpos.").items():
        code = CODES[language.lower()]
        if code == "en":
            yield "train-en.tsv", _tagged(name, config, "train", "tokens", "pos_tags")
        yield f"test-{code}.tsv", _tagged(name, config, "test", "tokens", "pos_tags")


def _squad(rows: Iterable[Mapping[str, Any]]) -> str:
    """SQuAD's form, a paragraph for each question."""
    data = []
    for row in rows:
        given = row["answers"]
        answers = [{"text": text, "answer_start": start}
                   for text, start in zip(given["text"], given["answer_start"], strict=True)]  # fmt: skip
        question = {"id": row["id"], "question": row["question"], "answers": answers}
        data.append({"paragraphs": [{"context": row["context"], "qas": [question]}]})
    return json.dumps({"data": data}, ensure_ascii=False)


def _squad11(name: str) -> Files:
    yield "train-v1.1.json", _squad(_rows(name, "SQuAD", "train"))


def _xquad(name: str) -> Files:
    for language, config in _languages(name, "XQuAD.").items():
        yield f"xquad.{language}.json", _squad(_rows(name, config, "validation"))


def _mlqa(name: str) -> Files:
    for pair, config in _languages(name, "MLQA.").items():
        context, _, question = pair.partition(".")
        if context == question:
            for split, part in (("validation", "dev"), ("test", "test")):
                yield f"{part}-context-{context}-question-{question}.json", _squad(_rows(name, config, split))


def _tydiqa(name: str) -> Files:
    """An id begins with the name of its language."""
    for split, part in (("train", "train"), ("validation", "dev")):
        found: dict[str, list[Mapping[str, Any]]] = {}
        for row in _rows(name, "tydiqa", split):
            found.setdefault(CODES[row["id"].partition("-")[0].lower()], []).append(row)
        for language, rows in found.items():
            yield f"tydiqa.goldp.{language}.{part}.json", _squad(rows)


_TASKS: Mapping[str, Callable[[str], Files]] = {
    "xnli": _xnli, "pawsx": _pawsx, "panx": _panx, "ud": _udpos, "squad": _squad11, "xquad": _xquad, "mlqa": _mlqa,
    "tydiqa": _tydiqa,
}  # fmt: skip
