"""Masked language modelling (Devlin et al. 2019) on multilingual text, judged by perplexity: X-MoE's pre-training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.diagnostics.diagnose import Batch
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.pieces import Pieces, open_pieces, shares
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.models.config import build_model
from pointsman_lab.models.encoder import Encoder, EncoderConfig
from pointsman_lab.models.memory import Memory
from pointsman_lab.tasks.masked_language_modelling.blocks import MaskedStream, Masking, PackedText
from pointsman_lab.tasks.masked_language_modelling.evaluation import SCORED, evaluate_masked, masked_batches
from pointsman_lab.tasks.masked_language_modelling.text import open_blocks
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.objectives import Objective, Outcome, logits_alone, objective_of
from pointsman_lab.training.task import Batches, Observed, Task


class MaskedLanguageModelling(Task):
    """Predicts masked pieces of multilingual text.

    Its reported part is the validation part: it chooses nothing, because the last step is evaluated.
    """

    def __init__(self, text: PackedText) -> None:
        self.text = text
        self.vocabulary = text.pieces
        self.name = text.name
        self.fingerprint = text.fingerprint

    @classmethod
    def open(
        cls, config: RunConfig, progress: DataProgress | None = None, vocabulary: Pieces | None = None
    ) -> MaskedLanguageModelling:
        """The task of `config.data`, in the pieces of a trained run if it is one.

        Otherwise in those that the settings name, those of the model that training starts from, or learned ones.
        """
        check(config)
        if vocabulary is None and (source := config.own["tokenizer"] or config.own["start_from"]):
            vocabulary = open_pieces(Path(source).expanduser())
        return cls(
            open_blocks(
                config.data, length=config.segment_length, size=config.own["pieces"],
                exponent=config.own["language_exponent"],
                pieces=vocabulary, progress=progress,
            )
        )  # fmt: skip

    def check(self, config: RunConfig) -> None:
        check(config)

    def prepared(self, config: RunConfig) -> RunConfig:
        if not config.own["start_from"]:
            return super().prepared(config)
        model: Any = config.model
        if self.vocabulary.size != model.vocab_size:
            raise RunError(
                f"the pieces do not fit: they are {self.vocabulary.size:,}, and the model in "
                f"{config.own['start_from']} has {model.vocab_size:,}"
            )
        return config

    def build_model(self, config: RunConfig) -> Any:
        if not config.own["start_from"]:
            return build_model(config.model)
        from pointsman_lab.tasks.masked_language_modelling.start import started

        model, note = started(config)
        self.notes = (note,)
        return model

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        exponent = config.own["language_exponent"]
        return MaskedStream(
            self.text, config.batch_size, masking=masking(config), exponent=exponent, seed=config.seed, device=device
        )

    def objective(self, model: Any, config: RunConfig) -> Objective:
        return objective_of(
            model, masked_loss, logits_alone, label_smoothing=config.label_smoothing, weighted_by_targets=True
        )

    def reported_split(self, config: RunConfig) -> str:
        return "valid"

    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        self._check_split(split)
        return evaluate_masked(
            model,
            self.text,
            shares(self.text.sizes, config.own["language_exponent"]),
            top_k=top_k,
            batch_size=config.eval_batch_size,
            tokens=config.eval_tokens if context.final else config.valid_tokens,
            split=split,
            how=context,
        )

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        return {
            "batch_size": config.eval_batch_size,
            "block_length": config.segment_length,
            "tokens": config.eval_tokens,
            "masked": [SCORED.rate, SCORED.mask_share, SCORED.random_share],
            "shares": shares(self.text.sizes, config.own["language_exponent"]),
            "checkpoint_rule": "the last step",
            "vocabulary": self.text.pieces.digest,
        }

    def observed(self, config: RunConfig, split: str, tokens: int | None, device: torch.device) -> Observed:
        """The validation blocks with their fixed masks; groups are languages."""
        self._check_split(split)
        found = masked_batches(self.text, config.eval_batch_size, device, tokens)
        names = tuple(self.text.valid)
        batches = [
            Batch(one.inputs, one.targets, one.inputs >= 0, names.index(one.language)) for one in found
        ]  # fmt: skip

        def read(model: nn.Module, batch: Batch) -> Tensor:
            with autocast(config, device):
                total: Tensor = model(batch.inputs, batch.targets).sum()
            return total

        read_tokens = sum(int((one.inputs >= 0).sum()) for one in found)
        protocol = {
            "data": self.text.description, "split": split, "tokens": read_tokens, "block_length": config.segment_length
        }  # fmt: skip
        return Observed(batches, len(batches), lambda: read, protocol, names)

    def stretch(self, config: RunConfig, tokens: int) -> list[NDArray[np.int64]]:
        """Validation blocks without masks, of each language alike."""
        count = max(1, tokens // (config.segment_length * len(self.text.valid)))
        rows = [row for blocks in self.text.valid.values() for row in blocks[:count]]
        return [row[row >= 0].astype(np.int64) for row in rows]

    def _check_split(self, split: str) -> None:
        if split != "valid":
            raise RunError(f"masked language modelling has no {split} part: allowed is valid")

    def description(self) -> dict[str, Any]:
        words = f"{self.text.description}; perplexities compare only with the same pieces"
        return {"data": words, "truncated_sentences": self.text.cut}


def masking(config: RunConfig) -> Masking:
    """What training masks."""
    return Masking(*(config.own[name] for name in ("mask_rate", "mask_token_share", "random_share")))


def check(config: RunConfig) -> None:
    """Refuses settings that no text can be read with."""
    masking(config)
    if not config.own["mask_rate"]:
        raise RunError("mask_rate=0: nothing would be learned; allowed are numbers above 0 to 1")
    model = config.model
    if isinstance(model, EncoderConfig) and model.positions == "learned" and config.segment_length > model.max_length:
        raise RunError(f"segment_length={config.segment_length}: model.max_length is {model.max_length}")


def masked_loss(model: Encoder, inputs: Tensor, targets: Tensor, memory: Memory | None, length: int) -> Outcome:
    """Mean nats of the masked positions; 0 where nothing is masked."""
    nats = model(inputs, targets)
    loss = nats.sum() / max(1, len(nats))
    return Outcome(loss, loss.detach(), None)
