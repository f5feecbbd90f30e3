"""HyperRouter (Do et al., EMNLP 2023): a fixed random hypernetwork generates the router from a trained embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pointsman._values import check_whole
from pointsman.ops.scoring import linear
from pointsman.routers.registry import LayerSpec, register_router
from pointsman.routers.stages import Scorer, Stage, Stages
from pointsman.routers.topk import INIT_STD
from pointsman.routing import RoutingContext


class FrozenLinear(Stage):
    """A linear map whose weight and bias never train: buffers, so that nothing can thaw them."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", torch.randn(width_out, width_in) * INIT_STD)
        self.register_buffer("bias", torch.zeros(width_out))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


class HyperScorer(Scorer):
    """[W | b] = H(e) as [E, dim + 1], z = W h + b (Eq. 2); H(e) = W2 relu(W1 e + b1) + b2 is fixed, only e trains.

    H's weights are N(0, 0.02^2), its biases 0, e ~ N(0, 1). With zero biases H(c e) = c H(e) for c > 0, so training e
    moves the router's direction and its temperature. W and b are generated once a forward; without gradients they are
    kept on a CPU until e changes, a training forward, `train`, `eval`, `step_end` or a loaded state.
    """

    accepts_half = True
    has_bias = True

    def __init__(
        self, dim: int, num_experts: int, embed_dim: int, hypernetwork: nn.Module, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.has_bias = bias
        self.shape = (num_experts, dim + 1)
        self.embedding = nn.Parameter(torch.randn(embed_dim))
        self.hypernetwork = hypernetwork
        self._cache: tuple[Tensor, Tensor, Tensor | None] | None = None  # e, W, b

    def generate(self) -> tuple[Tensor, Tensor | None]:
        """W [E, dim] and b [E] (None without a bias), generated from e."""
        first: FrozenLinear = self.hypernetwork[0]  # type: ignore[index]
        generated = self.hypernetwork(self.embedding.to(first.weight.dtype)).view(self.shape)
        return generated[:, :-1], generated[:, -1] if self.has_bias else None

    def plain_linear(self) -> tuple[Tensor, Tensor | None]:
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._cache = None
            return self.generate()
        embedding = self.embedding
        if embedding.device.type != "cpu":  # to compare there would wait for the device
            return self.generate()
        # by value: neither `.data` nor a fused optimizer counts a version
        if self._cache is None or self._cache[0].dtype != embedding.dtype or not torch.equal(self._cache[0], embedding):
            weight, bias = self.generate()
            bias = None if bias is None else bias.contiguous()
            self._cache = (embedding.detach().clone(), weight.contiguous(), bias)
        return self._cache[1:]

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        weight, bias = self.plain_linear()
        return linear(hidden, weight, bias)

    def train(self, mode: bool = True) -> HyperScorer:
        self._cache = None
        super().train(mode)
        return self

    def step_end(self) -> None:
        self._cache = None

    def _apply(self, fn: Any, recurse: bool = True) -> HyperScorer:
        self._cache = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._cache = None
        super()._load_from_state_dict(*args, **kwargs)


@register_router("hyperrouter", paper="Do et al. 2023, EMNLP; HyperRouter")
def hyperrouter(
    layer: LayerSpec, *, hyper_dim: int = 256, embed_dim: int | None = None, share: bool = False, bias: bool = True
) -> Stages:
    """HyperRouter: a fixed random hypernetwork generates the linear router's weight and bias from a trained embedding.

    hyper_dim: hidden units of the hypernetwork.
    embed_dim: length of the embedding (none = dim).
    share: one hypernetwork for all layers, each with its own embedding (the paper's parameter table suggests one).
    bias: whether the logits have the generated bias (false: the gates of Hugging Face models have none).
    """
    embed_dim = layer.dim if embed_dim is None else embed_dim
    for name, value in (("hyper_dim", hyper_dim), ("embed_dim", embed_dim)):
        check_whole(f"hyperrouter: option {name}", value)

    def build() -> nn.Module:
        outputs = layer.num_experts * (layer.dim + 1)
        return nn.Sequential(FrozenLinear(embed_dim, hyper_dim), nn.ReLU(), FrozenLinear(hyper_dim, outputs))

    if share:
        key = f"hypernetwork-{embed_dim}-{hyper_dim}-{layer.num_experts}-{layer.dim}"
        hypernetwork = layer.shared[key] if key in layer.shared else layer.shared.setdefault(key, build())
    else:
        hypernetwork = build()
    return Stages(HyperScorer(layer.dim, layer.num_experts, embed_dim, hypernetwork, bias=bias))
