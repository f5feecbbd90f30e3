"""XTREME's tasks from the Hugging Face hub (`google/xtreme`), written as the files that `xtreme.py` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pointsman._errors import RunError
from pointsman._files import scratch_folder, write_synced
from pointsman_lab.data.download import hub_rows, on_hub

REPOSITORY = "google/xtreme"
CODES = MappingProxyType(
    {
        "afrikans": "af", "arabic": "ar", "basque": "eu", "bengali": "bn", "bulgarian": "bg", "chinese": "zh",
        "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi", "french": "fr", "german": "de",
        "greek": "el", "hebrew": "he", "hindi": "hi", "hungarian": "hu", "indonesian": "id", "italian": "it",
        "japanese": "ja", "kazakh": "kk", "korean": "ko", "marathi": "mr", "persian": "fa", "portuguese": "pt",
        "russian": "ru", "spanish": "es", "swahili": "sw", "tagalog": "tl", "tamil": "ta", "telugu": "te",
        "thai": "th", "turkish": "tr", "urdu": "ur", "vietnamese": "vi", "yoruba": "yo",
    }
)  # fmt: skip
"""The hub's names of languages in lower case."""

Files = Iterator[tuple[str, str]]
"""Names and contents."""


def fetch_task(name: str, folder: Path) -> None:
    """Writes a task's files into `folder`, all of them or none.

    Args:
        name: one of `xtreme.XTREME`.
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


def _xnli(name: str) -> Files:
    found: dict[str, list[tuple[str, str, str]]] = {}
    for row in _rows(name, "XNLI", "validation"):
        found.setdefault(row["language"], []).append((row["sentence1"], row["sentence2"], row["gold_label"]))
    for language, pairs in found.items():
        yield f"dev-{language}.tsv", _table(pairs)


def _pawsx(name: str) -> Files:
    for language, config in _languages(name, "PAWS-X.").items():
        for split, part in (("validation", "dev"), ("test", "test")):
            pairs = ((row["sentence1"], row["sentence2"], row["label"]) for row in _rows(name, config, split))
            yield f"{part}-{language}.tsv", _table(pairs)


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
        if language == "en":
            yield "train-en.tsv", _tagged(name, config, "train", "tokens", "ner_tags")
        yield f"dev-{language}.tsv", _tagged(name, config, "validation", "tokens", "ner_tags")


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


def _xquad(name: str) -> Files:
    for language, config in _languages(name, "XQuAD.").items():
        yield f"xquad.{language}.json", _squad(_rows(name, config, "validation"))


def _mlqa(name: str) -> Files:
    for pair, config in _languages(name, "MLQA.").items():
        context, _, question = pair.partition(".")
        if context == question:
            yield f"dev-context-{context}-question-{question}.json", _squad(_rows(name, config, "validation"))


def _tydiqa(name: str) -> Files:
    """An id begins with the name of its language."""
    for split, part in (("train", "train"), ("validation", "dev")):
        found: dict[str, list[Mapping[str, Any]]] = {}
        for row in _rows(name, "tydiqa", split):
            found.setdefault(CODES[row["id"].partition("-")[0].lower()], []).append(row)
        for language, rows in found.items():
            yield f"tydiqa.goldp.{language}.{part}.json", _squad(rows)


_TASKS: Mapping[str, Callable[[str], Files]] = {
    "xnli": _xnli, "pawsx": _pawsx, "pawsx-test": _pawsx, "panx": _panx, "udpos": _udpos, "xquad": _xquad,
    "mlqa": _mlqa, "tydiqa": _tydiqa,
}  # fmt: skip
