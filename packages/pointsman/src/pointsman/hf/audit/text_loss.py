"""The loss of a language model on text tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn

from pointsman.hf.text import PADDING, TEXT, TextBatch


@dataclass
class TextLoss:
    """The sum of the loss (nats) over predicted text tokens."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float | None:
        """Nats per text token; None if the model does not return logits [B, T, vocabulary]."""
        return self.nats / self.tokens if self.tokens else None

    def read(self, model: nn.Module, batch: TextBatch) -> None:
        """Runs the model on a batch and adds the loss of its text tokens, row by row."""
        device = next(model.parameters()).device
        ids = batch.ids.to(device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": batch.mask.long().to(device)}
        config = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            inputs["use_cache"] = False
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        logits = getattr(model(**inputs), "logits", None)
        if logits is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
            return
        counted = (batch.kinds[:, 1:] == TEXT) & (batch.kinds[:, :-1] != PADDING)
        for row in range(ids.shape[0]):
            chosen = counted[row].to(device)
            scores = logits[row, :-1][chosen].float()
            if not len(scores) or scores.shape[-1] <= int(ids[row].max()):
                continue
            self.nats += float(F.cross_entropy(scores, ids[row, 1:][chosen], reduction="sum"))
            self.tokens += len(scores)
