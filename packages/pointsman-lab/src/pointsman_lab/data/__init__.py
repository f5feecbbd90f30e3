"""Corpora, vocabularies and streams of segments.

The names load their modules when first used: listing the corpora needs neither numpy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pointsman_lab.data.catalog import SPLITS, DataSpec, list_corpora, parse_data

if TYPE_CHECKING:
    from pointsman_lab.data.corpus import Corpus, load_corpus, open_corpus
    from pointsman_lab.data.streams import IGNORE, BatchStream, EvalStream
    from pointsman_lab.data.vocabulary import Vocabulary

_HOMES = {
    **dict.fromkeys(("Corpus", "load_corpus", "open_corpus"), "corpus"),
    **dict.fromkeys(("IGNORE", "BatchStream", "EvalStream"), "streams"),
    "Vocabulary": "vocabulary",
}

__all__ = [
    "IGNORE",
    "SPLITS",
    "BatchStream",
    "Corpus",
    "DataSpec",
    "EvalStream",
    "Vocabulary",
    "list_corpora",
    "load_corpus",
    "open_corpus",
    "parse_data",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
