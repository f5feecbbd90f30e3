"""HyperRouter (Do et al., EMNLP 2023): a fixed random hypernetwork generates the router from a trained embedding."""

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from pointsman.ops.linear import transformed
from pointsman.routers.frame.entries import BelowOne, Count, LayerSpec, NotNegative, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Stage
from pointsman.routers.frame.stages import GATES, Scorer, Stages, linear
from pointsman.routers.papers.topk import INIT_STD
from pointsman.routing import RoutingContext


class FrozenLinear(Stage):
    """A linear map whose weight and bias never train: buffers, so that nothing can thaw them.

    The weight is drawn from N(0, std^2), 0.02 by default; `std` may be a column, [width_out, 1].
    """

    def __init__(self, width_in: int, width_out: int, std: float | Tensor = INIT_STD) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(width_out, width_in) * std)
        self.bias = nn.Buffer(torch.zeros(width_out))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


def build_hypernetwork(
    embed_dim: int, hyper_dim: int, dim: int, outputs: int, init: str, each: bool, bias: bool = True
) -> nn.Module:
    """H(e) = W2 relu(W1 e + b1) + b2 for `outputs` experts; see `hyperrouter` for `init`."""
    first: float = INIT_STD
    second: float | Tensor = INIT_STD
    if init == "hyperfan":
        units = hyper_dim * (2 if each else 1)  # E[relu^2] is the mean square of what enters: 1, or 2 for e + a_i
        each_row = torch.full((outputs, dim + 1, 1), ((2 if bias else 1) * dim * units) ** -0.5)
        each_row[:, -1] = (2 * units) ** -0.5
        first, second = (2 / embed_dim) ** 0.5, each_row.view(-1, 1)
    layers = FrozenLinear(embed_dim, hyper_dim, first), nn.ReLU(), FrozenLinear(hyper_dim, outputs * (dim + 1), second)
    return nn.Sequential(*layers)


class HyperScorer(Scorer):
    """[W | b] = H(e) as [E, dim + 1], z = W h + b (Eq. 2); H(e) = W2 relu(W1 e + b1) + b2 is fixed, only e trains.

    H's weights are N(0, 0.02^2), its biases 0, e ~ N(0, 1). With zero biases H(c e) = c H(e) for c > 0, so training e
    moves the router's direction and its temperature. W and b are generated once a forward; without gradients they are
    kept on a CPU until e changes, a training forward or a loaded state.

    Args:
        hypernetwork: H, from e to E (dim + 1) numbers; with `each` to dim + 1.
        each: H generates one expert's weight and bias, from e + a_i with a fixed a_i ~ N(0, 1).
        embed_dropout: in training one mask a forward drops this share of e and scales the rest by 1 / (1 - share).
    """

    accepts_half = True
    has_bias = True
    embed_dropout = 0.0
    places: Tensor | None

    def __init__(
        self, dim: int, num_experts: int, embed_dim: int, hypernetwork: nn.Module, *, bias: bool = True,
        each: bool = False, embed_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.has_bias = bias
        self.shape = (num_experts, dim + 1)
        self.embedding = nn.Parameter(torch.randn(embed_dim))
        self.hypernetwork = hypernetwork
        self.register_buffer("places", torch.randn(num_experts, embed_dim) if each else None)
        self.embed_dropout = embed_dropout
        self.training_stochastic = embed_dropout > 0
        self._cache: tuple[Tensor, object, Tensor, Tensor | None] | None = None  # e, version of H, W, b

    def generate(self, dropout: float = 0.0) -> tuple[Tensor, Tensor | None]:
        """W [E, dim] and b [E] (None without a bias), generated from e, of which a share `dropout` is dropped."""
        first: FrozenLinear = self.hypernetwork[0]  # type: ignore[index]
        embedding = self.embedding.to(first.weight.dtype)
        embedding = nn.functional.dropout(embedding, dropout) if dropout else embedding
        generated = self.hypernetwork(embedding if self.places is None else embedding + self.places).view(self.shape)
        weight = generated[:, :-1]
        if weight.device.type != "cpu":  # where rows of products are to be whole 16 bytes
            weight = weight.contiguous()
        return weight, generated[:, -1] if self.has_bias else None

    def penalty(self, given: LossInput) -> Tensor:
        """|e|^2."""
        return given.ranks.once(self.embedding.square().sum())

    def plain_linear(self) -> tuple[Tensor, Tensor | None]:
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
            self._cache = None
            return self.generate()
        embedding = self.embedding
        if embedding.device.type != "cpu":  # to compare there would wait for the device
            return self.generate()
        # e by value: neither `.data` nor a fused optimizer counts a version
        version = [(id(one), 0 if one.is_inference() else one._version) for one in self.hypernetwork.buffers()]
        old = self._cache
        if not old or old[1] != version or old[0].dtype != embedding.dtype or not torch.equal(old[0], embedding):
            weight, bias = self.generate()
            bias = None if bias is None else bias.contiguous()
            self._cache = old = (embedding.detach().clone(), version, weight.contiguous(), bias)
        return old[2:]

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        if self.training and self.embed_dropout:
            return linear(hidden, *self.generate(self.embed_dropout))
        return linear(hidden, *HyperScorer.plain_linear(self))  # also where a choice has extended it

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._cache = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._cache = None
        super()._load_from_state_dict(*args, **kwargs)


@register_router("hyperrouter", paper="Do et al. 2023, EMNLP; HyperRouter")
def hyperrouter(
    layer: LayerSpec, *, hyper_dim: Count = 256, embed_dim: Count | None = None, share: bool = False, bias: bool = True,
    l2: NotNegative = 0.0, embed_dropout: BelowOne = 0.0, init: Literal["normal", "hyperfan"] = "normal",
    generate: Literal["whole", "expert"] = "whole", gate: Literal["softmax", "sigmoid"] = "softmax",
) -> Stages:  # fmt: skip
    """HyperRouter: a fixed random hypernetwork generates the linear router's weight and bias from a trained embedding.

    hyper_dim: hidden units of the hypernetwork.
    embed_dim: length of the embedding (none = dim).
    share: one hypernetwork for all layers, each with its own embedding (the paper's parameter table suggests one).
    bias: whether logits have one: the last column of what the hypernetwork generates.
    l2: weight of the loss |e|^2 of the embedding.
    embed_dropout: share of the embedding that is dropped in training, the same for all tokens of a forward.
    init: of the hypernetwork: N(0, 0.02^2), or hyperfan, after which logits of unit inputs have variance 1.
    generate: the router as a whole, or each expert's row by one smaller hypernetwork from e + a_i, a_i fixed.
    gate: softmax over all experts, or a sigmoid for each.
    """
    embed_dim = layer.dim if embed_dim is None else embed_dim
    each = generate == "expert"
    sizes = embed_dim, hyper_dim, layer.dim, 1 if each else layer.columns
    key = f"hypernetwork-{sizes}-{bias}-{init}-{generate}"
    kept = layer.shared if share else {}
    hypernetwork = kept[key] if key in kept else kept.setdefault(key, build_hypernetwork(*sizes, init, each, bias))
    score = HyperScorer(
        layer.dim, layer.columns, embed_dim, hypernetwork, bias=bias, each=each, embed_dropout=embed_dropout
    )
    return Stages(score, GATES[gate](), losses={"l2": Loss(score.penalty, l2)} if l2 else {})
