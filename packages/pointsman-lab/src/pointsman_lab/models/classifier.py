"""A text classifier: a model with a head on its hidden states.

Shapes: B texts, T tokens, C classes. Texts are padded on the right with negative ids: a causal model's real tokens
never see what comes after them, and attention, routing, losses and statistics leave padding out.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from pointsman_lab.models.config import ModelConfig, build_model
from pointsman_lab.models.initial import seeded

Pooling = Literal["last", "first", "mean"]


class ClassificationHead(nn.Module):
    """Linear, tanh, dropout, linear: [..., dim] -> [..., C] (SMoE-Dropout's released fine-tuning code).

    Its initial weights follow from `seed` alone, so that they agree between routers.

    Args:
        project: False leaves out the first linear map and tanh.
    """

    role = "head"

    def __init__(self, dim: int, num_classes: int, *, project: bool, dropout: float, seed: int) -> None:
        super().__init__()
        with seeded(seed, "head"):
            self.project = nn.Linear(dim, dim) if project else None
            self.classify = nn.Linear(dim, num_classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.project is None else torch.tanh(self.project(hidden))
        logits: Tensor = self.classify(self.dropout(hidden))
        return logits


class Classifier(nn.Module):
    """A model of any family whose hidden states are pooled and classified.

    Args:
        config: of the model; its weights are drawn with its seed until others are loaded into `backbone`.
        num_classes: C.
        pooling: "last", the hidden state of each text's last token, "first", or "mean" over its tokens.
        project, dropout, seed: of the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_classes: int,
        *,
        pooling: Pooling = "last",
        project: bool = True,
        dropout: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.pooling = pooling
        self.backbone = build_model(config)
        self.head = ClassificationHead(config.dim, num_classes, project=project, dropout=dropout, seed=seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] int64, negative where padded (on the right) -> logits [B, C]."""
        mask = tokens >= 0
        hidden, _ = self.backbone.encode(tokens.clamp_min(0), padding_mask=mask)
        lengths = mask.sum(1).clamp_min(1)  # of an empty text its first padding
        if self.pooling == "mean":
            return self.head((hidden * mask[..., None]).sum(1) / lengths[:, None])  # type: ignore[no-any-return]
        if self.pooling == "first":
            return self.head(hidden[:, 0])  # type: ignore[no-any-return]
        return self.head(hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1])  # type: ignore[no-any-return]
