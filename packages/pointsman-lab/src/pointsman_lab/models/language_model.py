"""What causal language models share: a forward with loss or logits.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pointsman.ops.drawing import dropout
from pointsman_lab.models.memory import Memory, Output
from pointsman_lab.models.stack import Config, Stack
from pointsman_lab.models.views import no_view


class LanguageModel(Stack[Config]):
    """A stack with an `embedding` whose `logits` and `loss` are those of the next token."""

    embedding: Any

    def encode(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        memory_length: int = 0,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """The last hidden states [B, T, dim] and the memory for the next segment; arguments as of `forward`."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        memory: Memory | None = None,
        *,
        memory_length: int = 0,
        padding_mask: Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
    ) -> Output:
        """Runs a segment.

        Args:
            tokens: [B, T] int64.
            targets: [B, T] int64, the token after each; negative ones, and those of padded positions, count nothing.
            memory: what the segment before returned.
            memory_length: how many positions the returned memory holds at most.
            padding_mask: [B, T] bool, True for a real token; None where all are real.
            reduction: "mean" over the targets that count, or "none": [B, T].
        """
        hidden, remembered = self.encode(tokens, memory, memory_length=memory_length, padding_mask=padding_mask)
        if targets is None:
            return Output(None, no_view(self.embedding.logits(self._drop(hidden))), hidden, remembered)
        return Output(self._loss(hidden, targets, padding_mask, reduction), None, hidden, remembered)

    def _loss(self, hidden: Tensor, targets: Tensor, padding_mask: Tensor | None, reduction: str) -> Tensor:
        counted = targets >= 0
        if padding_mask is not None:
            counted = counted & padding_mask
        flat = torch.where(counted, targets, 0).reshape(-1)
        losses = self.embedding.loss(self._drop(hidden).reshape(len(flat), -1), flat).view(targets.shape)
        losses = torch.where(counted, losses, 0)
        return losses if reduction == "none" else losses.sum() / counted.sum().clamp_min(1)

    def _drop(self, hidden: Tensor) -> Tensor:
        return dropout(hidden, self.config.dropout, self.training, self.ranks)
