"""Masked language modelling on multilingual text, judged by perplexity: X-MoE's pre-training."""

from __future__ import annotations

from typing import Any

from pointsman_lab.registry import Setting, TaskEntry
from pointsman_lab.tasks.masked_language_modelling.presets import PRESETS

SETTINGS = {
    "tokenizer": Setting(
        "", "a SentencePiece model in XLM-R's order, or a folder with one; empty: learned from the text"
    ),
    "start_from": Setting("", "folder of XLM-R in the form of transformers, whose weights the training starts from"),
    "pieces": Setting(8192, "how many pieces of words are learned from the text", least=1),
    "language_exponent": Setting(0.7, "a language with share q is drawn with probability ~ q^exponent", most=1),
    "mask_rate": Setting(0.15, "the share of the places that are predicted", most=1),
    "mask_token_share": Setting(0.8, "of these, the share that becomes <mask>", most=1),
    "random_share": Setting(0.1, "of these, the share that becomes a random piece", most=1),
}


class MaskedLanguageModelling(TaskEntry):
    name = "masked_language_modelling"
    families = ("encoder",)
    levels = ("piece",)
    presets = PRESETS
    settings = SETTINGS

    def config(self, family: str) -> Any:
        from pointsman_lab.models.encoder import EncoderConfig

        return EncoderConfig

    def open(self, config: Any, progress: Any = None, vocabulary: Any = None) -> Any:
        from pointsman_lab.tasks.masked_language_modelling.task import MaskedLanguageModelling as Task

        return Task.open(config, progress, vocabulary)

    def start(self, config: Any, folder: str, router: str | None) -> Any:
        from pointsman_lab.tasks.masked_language_modelling.start import start_config

        return start_config(config, folder, router)

    def vocabulary(self, text: str) -> Any:
        from pointsman_lab.data.pieces import Pieces

        return Pieces.from_json(text)

    def sentences(self, spec: str) -> Any:
        if spec.partition(":")[0] not in ("xtreme-text", "multilingual"):
            return None
        from pointsman_lab.data.catalog import data_folder
        from pointsman_lab.tasks.masked_language_modelling.text import read_text

        return read_text(spec, data_folder())

    def data_of(self, run: Any) -> str:
        return str(run.config["data"]).rpartition("/")[2].partition(":")[0]


TASK = MaskedLanguageModelling()
