"""Language modelling: predicting the next token of a corpus, judged by bits per character or perplexity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman_lab.registry import Setting, TaskEntry
from pointsman_lab.tasks.language_modelling.presets import PRESETS

SETTINGS = {
    "tokenizer": Setting("", "pieces:V, or the path of a tokenizer; empty: the corpus's bytes, characters, words"),
    "start_from": Setting("", "folder of a model of transformers whose weights the training starts from"),
}


class LanguageModelling(TaskEntry):
    name = "language_modelling"
    families = ("transformer-xl", "decoder")
    levels = ("byte", "char", "word", "subword")
    presets = PRESETS
    settings = SETTINGS

    def config(self, family: str) -> Any:
        if family == "decoder":
            from pointsman_lab.models.decoder import DecoderConfig

            return DecoderConfig
        from pointsman_lab.models.transformer_xl import TransformerXLConfig

        return TransformerXLConfig

    def open(self, config: Any, progress: Any = None, vocabulary: Any = None) -> Any:
        from pointsman_lab.tasks.language_modelling.task import LanguageModelling as Task

        return Task.open(config, progress, vocabulary)

    def vocabulary(self, text: str) -> Any:
        from pointsman_lab.data.subwords import read_vocabulary

        return read_vocabulary(text)

    def start(self, config: Any, folder: str, router: str | None) -> Any:
        from pointsman_lab.tasks.language_modelling.start import start_config

        return start_config(config, folder, router)

    def export(self, run: Any, top_k: int) -> Any:
        if run.config.model.family != "decoder":
            return super().export(run, top_k)
        from pointsman_lab.models.huggingface import to_transformers

        return to_transformers(run.model, top_k=top_k, length=run.context)

    def add_flags(self, command: str, flags: Any) -> None:
        if command == "train":
            told = "subwords: V pieces learned on the data, or a Hugging Face tokenizer (default: the data's own unit)"
            flags.add_argument("--tokenizer", metavar="pieces:V|PATH", help=told)
        elif command == "generate":
            from pointsman_lab.tasks.language_modelling.generate import add_flags

            add_flags(flags)

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        if command != "generate":
            return None
        from pointsman_lab.tasks.language_modelling.generate import generate

        return generate(flags, values, device)

    def recipes(self) -> Mapping[str, Any]:
        from pointsman_lab.tasks.language_modelling.recipes import RECIPES

        return RECIPES


TASK = LanguageModelling()
