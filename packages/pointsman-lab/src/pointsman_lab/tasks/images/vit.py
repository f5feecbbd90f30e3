"""A vision transformer (Dosovitskiy et al. 2021) with sparse layers: V-MoE (Riquelme et al. 2021).

With router "plain", pooling "token" and copied weights it gives the hidden states of transformers' `ViTModel`.

Shapes: B images, S their side, P the side of a patch, G = S / P patches a row, C classes, T tokens: G^2, and the class
token before them with pooling "token".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pointsman.ops.drawing import dropout
from pointsman.ops.linear import linear
from pointsman_lab.models.blocks import LayerContext, Norm
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.models.initial import initialize, seeded
from pointsman_lab.models.stack import Stack

POSITION_STD = 0.02  # of V-MoE's code


@dataclass(frozen=True, kw_only=True)
class VisionTransformerConfig(ModelConfig):
    """The settings of a vision transformer; the others are in `ModelConfig`. The defaults are V-MoE's S/32, "Last 2".

    Attributes:
        image_size: S.
        patch: P, a divisor of S.
        num_classes: C.
        pooling: what is classified: the class "token", or the "mean" over all patches, without a class token.
        representation: width of a tanh layer before the classes; 0: none.
        loss: "softmax", one class an image, or "sigmoid", each class on its own (V-MoE's pre-training).
        equal_experts: all experts of a layer start with the same weights (V-MoE's code).
    """

    family: ClassVar[str] = "vit"
    causal: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    of_the_data: ClassVar[Mapping[str, str]] = {
        "num_classes": "it is the number of classes of the data",
        "image_size": "it is that of the images: --data NAME:size=N resizes them",
    }

    num_layers: int = 8
    dim: int = 512
    num_heads: int = 8
    head_dim: int = 64
    hidden_dim: int = 2048
    num_experts: int = 8
    router: str = "vmoe"
    moe_layers: str = "last:2:2"
    activation: Literal["relu", "gelu", "silu"] = "gelu"
    dropout: float = 0.0
    image_size: int = 224
    patch: int = 32
    num_classes: int = 1000
    pooling: Literal["token", "mean"] = "token"
    representation: int = 0
    loss: Literal["softmax", "sigmoid"] = "softmax"
    equal_experts: bool = False

    def build(self) -> VisionTransformer:
        return VisionTransformer(self)

    @property
    def grid(self) -> int:
        """G, patches a row.

        Raises:
            ValueError: the side of a patch does not divide that of the images.
        """
        if self.image_size % self.patch:
            raise ValueError(f"patch={self.patch}: allowed are divisors of the images' side, {self.image_size}")
        return self.image_size // self.patch

    @property
    def tokens(self) -> int:
        """T, tokens an image."""
        return self.grid**2 + (self.pooling == "token")


class VisionTransformer(Stack[VisionTransformerConfig]):
    """Patches -> linear map + positions -> pre-norm layers -> norm -> pooling -> classes."""

    def __init__(self, config: VisionTransformerConfig) -> None:
        super().__init__(config)
        dim = config.dim
        with seeded(config.seed, "model"):
            self.embedding = PatchEmbedding(config)

            self.build_layers(causal=False)
            self.final_norm = Norm(dim)
            self.head = ImageHead(dim, config.representation, config.num_classes)
        initialize(self, config.seed, config.init_std)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """What V-MoE's code starts with: class token and classes at 0, log-odds 1 : C, and equal experts if asked."""
        embedding, classify = self.embedding, self.head.classify
        embedding.position.mul_(POSITION_STD / self.config.init_std)
        if embedding.token is not None:
            embedding.token.zero_()
        classify.weight.zero_()
        if self.config.loss == "sigmoid":
            classify.bias.fill_(-math.log(self.config.num_classes))
        if self.config.equal_experts:
            for module in self.modules():
                if getattr(module, "role", "") == "experts":
                    for parameter in module.parameters():
                        parameter.copy_(parameter[:1].expand_as(parameter))

    def encode(self, images: Tensor) -> tuple[Tensor, None]:
        """images [B, 3, S, S] in [-1, 1] -> the last hidden states [B, T, dim]; there is no memory."""
        hidden = dropout(self.embedding(images), self.config.dropout, self.training, self.ranks)
        hidden, _ = self.run_layers(hidden, LayerContext(causal=False, causal_attention=False), None, 0)
        return self.final_norm(hidden), None

    def forward(self, images: Tensor) -> Tensor:
        """images [B, 3, S, S] in [-1, 1] -> logits [B, C]."""
        hidden, _ = self.encode(images)
        logits: Tensor = self.head(hidden[:, 0] if self.config.pooling == "token" else hidden.mean(1))
        return logits


class PatchEmbedding(nn.Module):
    """W patch + b + position, after the class token (0 at first) if there is one; a convolution of stride P."""

    role = "embedding"

    def __init__(self, config: VisionTransformerConfig) -> None:
        super().__init__()
        self.side, self.patch, self.grid = config.image_size, config.patch, config.grid
        self.project = nn.Linear(3 * config.patch**2, config.dim)
        self.token = nn.Parameter(torch.empty(1, config.dim)) if config.pooling == "token" else None
        self.position = nn.Parameter(torch.empty(config.tokens, config.dim))

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, T, dim]."""
        if images.dim() != 4 or images.shape[1:] != (3, self.side, self.side):
            raise ValueError(f"images must be [B, 3, {self.side}, {self.side}], got {list(images.shape)}")
        patches = images.reshape(len(images), 3, self.grid, self.patch, self.grid, self.patch)
        rows = patches.permute(0, 2, 4, 1, 3, 5).reshape(len(images), self.grid**2, -1)
        hidden = linear(rows, self.project.weight, self.project.bias)
        if self.token is not None:
            hidden = torch.cat([self.token.to(hidden.dtype).expand(len(hidden), 1, -1), hidden], 1)
        return hidden + self.position


class ImageHead(nn.Module):
    """Linear and tanh of width `representation` (0: neither), then a linear map to the classes."""

    role = "head"

    def __init__(self, dim: int, representation: int, num_classes: int) -> None:
        super().__init__()
        self.represent = nn.Linear(dim, representation) if representation else None
        self.classify = nn.Linear(representation or dim, num_classes)

    def forward(self, pooled: Tensor) -> Tensor:
        """[B, dim] -> [B, C]."""
        if self.represent is not None:
            pooled = torch.tanh(linear(pooled, self.represent.weight, self.represent.bias))
        return linear(pooled, self.classify.weight, self.classify.bias)
