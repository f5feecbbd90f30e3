"""An encoder with a head on every token: tags of words, or first and last piece of an answer.

Shapes: B texts, T tokens, C classes. Texts are padded on the right with negative ids.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pointsman_lab.models.config import ModelConfig, build_model
from pointsman_lab.models.initial import seed_for

NEVER = -1e4
"""The logit of a place in the padding: as good as minus infinity, without its nan in differences."""


class TokenHead(nn.Module):
    """Dropout and one linear map: [..., dim] -> [..., C]. Its initial weights follow from `seed` alone."""

    role = "head"

    def __init__(self, dim: int, num_classes: int, *, dropout: float, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(seed, "head"))
            self.classify = nn.Linear(dim, num_classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.dropout(hidden))
        return logits


class TokenClassifier(nn.Module):
    """A model of any family whose hidden states are classified one by one.

    Args:
        config: of the model; its weights are drawn with its seed until others are loaded into `backbone`.
        num_classes: C.
        spans: classify the places instead: logits of the first and of the last piece (C = 2).
        dropout: of the head (XTREME's scripts: 0.1).
        seed: of the head's initial weights.
    """

    def __init__(
        self, config: ModelConfig, num_classes: int, *, spans: bool = False, dropout: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.spans = spans
        self.backbone = build_model(config)
        self.head = TokenHead(config.dim, num_classes, dropout=dropout, seed=seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, C]; of spans [B, 2, T], over the places of a text."""
        mask = tokens >= 0
        hidden, _ = self.backbone.encode(tokens.clamp_min(0), padding_mask=mask)
        logits: Tensor = self.head(hidden)
        return logits.masked_fill(~mask[..., None], NEVER).transpose(1, 2) if self.spans else logits
