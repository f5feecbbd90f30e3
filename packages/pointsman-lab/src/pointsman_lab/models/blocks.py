"""Blocks that models are assembled from: attention with memory, feed-forward sublayers, dense or sparse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pointsman.layer import MoE
from pointsman.ops.drawing import dropout
from pointsman.ops.feed_forward import ACTIVATIONS
from pointsman.ops.linear import linear
from pointsman.ranks import ALONE, Ranks
from pointsman.routing import AttentionTrace, RouterState, RoutingContext
from pointsman_lab.models.attention import Bias, Rotate


class NoView(torch.autograd.Function):
    """The identity, whose output has the same memory and is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def no_view(tensor: Tensor) -> Tensor:
    """The tensor as no view."""
    if not tensor.requires_grad or torch.compiler.is_compiling() or not tensor._is_view():
        return tensor
    owned: Tensor = NoView.apply(tensor)  # type: ignore[no-untyped-call]
    return owned


class Norm(nn.LayerNorm):
    """LayerNorm, with a role."""

    role = "norm"


class FeedForward(nn.Module):
    """W_out act(W_in x + b_in) + b_out, gated W_out (act(W_gate x) * (W_in x)), with dropout on the hidden units.

    Args:
        blocks: into how many experts' initial weights the inner width is divided: a dense baseline starts with the
            weights that the experts it stands for would have.
    """

    role = "feed-forward"
    starts_at_zero = False
    ranks: Ranks = ALONE

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str,
        dropout: float,
        blocks: int = 1,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation, self.dropout, self.blocks = activation, dropout, blocks
        self.w_in = nn.Parameter(torch.empty(hidden_dim, dim))
        self.b_in = nn.Parameter(torch.zeros(hidden_dim)) if bias else None
        self.w_gate = nn.Parameter(torch.empty(hidden_dim, dim)) if gated else None
        self.w_out = nn.Parameter(torch.empty(dim, hidden_dim))
        self.b_out = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        units = linear(hidden, self.w_in, self.b_in)
        if self.w_gate is None:
            units = ACTIVATIONS[self.activation](units)
        else:
            units = ACTIVATIONS[self.activation](linear(hidden, self.w_gate)) * units
        return linear(dropout(units, self.dropout, self.training, self.ranks), self.w_out, self.b_out)


class ResidualFeedForward(nn.Module):
    """A dense layer like base experts (`experts.modules.BaseExperts`): x + f(norm(x)) in turn, its input contained.

    As theirs, the last map of each sublayer starts at 0, so that the layer starts as the identity.
    """

    contains_input = True

    def __init__(self, dim: int, sublayers: Sequence[FeedForward]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(dim) for _ in sublayers)
        self.sublayers = nn.ModuleList(sublayers)
        self.dropout = sublayers[0].dropout
        for sublayer in sublayers:
            sublayer.starts_at_zero = True

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        for norm, sublayer in zip(self.norms, self.sublayers, strict=True):
            hidden = hidden + sublayer(norm(hidden))
        return hidden


MakeNorm = Callable[[int], nn.Module]
"""The width of what it is to normalise -> a norm."""

Sublayer = MoE | FeedForward | ResidualFeedForward | None


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What every layer of one forward needs besides its hidden states and memory.

    Attributes:
        key_mask: [B, S] bool, True for a real token; None where all are real. S = memory + T.
        padding_mask: the same of the T new tokens.
        token_ids: [B, T].
        causal: whether routers keep to earlier tokens.
        causal_attention: whether attention does.
        below: what the router of the sparse layer below handed on.
        remember: whether keys and values of these tokens are remembered.
        rotate, bias: positions, as `Attention` takes them.
    """

    key_mask: Tensor | None = None
    padding_mask: Tensor | None = None
    token_ids: Tensor | None = None
    causal: bool = True
    causal_attention: bool = True
    below: RouterState | None = None
    remember: bool = False
    rotate: Rotate | None = None
    bias: Bias | None = None


class RouterStates(NamedTuple):
    """What a layer's router hands on: `carry` to later tokens, `above` to the sparse layers above."""

    carry: RouterState | None
    above: RouterState | None


class FeedForwardLayer(nn.Module):
    """A feed-forward sublayer, sparse (`moe`), dense (`feed_forward`) or none, with residual and norm.

    Post-norm: x = norm(x + dropout(f(x))). Pre-norm: x = x + dropout(f(norm(x))). Experts whose output contains the
    input stand bare: x = f(x).
    """

    ranks: Ranks = ALONE
    entered_by: tuple[str, ...] = ("mix",)  # besides forward, of which it has none: for `parallelize`

    def __init__(self, dim: int, inner: Sublayer, *, dropout: float, pre_norm: bool, norm: MakeNorm = Norm) -> None:
        super().__init__()
        self.moe = inner if isinstance(inner, MoE) else None
        self.feed_forward = inner if isinstance(inner, FeedForward | ResidualFeedForward) else None
        bare = inner is None or bool(getattr(inner, "contains_input", False))
        self.feed_forward_norm = None if bare else norm(dim)
        # a dense baseline sets its own rate for the whole sublayer
        self.feed_forward_dropout = dropout if self.feed_forward is None else self.feed_forward.dropout
        self.pre_norm = pre_norm

    @property
    def needs_attention(self) -> bool:
        """Whether the router looks at the attention before it."""
        return self.moe is not None and "attention" in self.moe.router.needs

    def mix(
        self, hidden: Tensor, context: LayerContext, attention: AttentionTrace | None, past: RouterState | None
    ) -> tuple[Tensor, RouterStates | None]:
        """[B, T, dim] -> [B, T, dim], and what the router hands on."""
        handed: RouterStates | None = None
        if self.moe is None and self.feed_forward is None:
            return hidden, None
        norm = self.feed_forward_norm
        inner = norm(hidden) if self.pre_norm and norm is not None else hidden
        if self.moe is not None:
            looks_at = RoutingContext(
                causal=context.causal,
                padding_mask=context.padding_mask,
                token_ids=context.token_ids,
                attention=attention if self.needs_attention else None,
                past=past,
                below=context.below,
            )
            inner, routing = self.moe(inner, looks_at, return_routing=True)
            handed = RouterStates(routing.carry, routing.above)
        else:
            assert self.feed_forward is not None
            inner = self.feed_forward(inner)
        if norm is None:
            return no_view(inner), handed
        hidden = hidden + dropout(inner, self.feed_forward_dropout, self.training, self.ranks)
        return hidden if self.pre_norm else norm(hidden), handed


class TransformerLayer(FeedForwardLayer):
    """Attention, then the feed-forward sublayer. Its memory is keys and values."""

    entered_by: tuple[str, ...] = ()

    def __init__(
        self, dim: int, attention: nn.Module, inner: Sublayer, *, dropout: float, pre_norm: bool, norm: MakeNorm = Norm
    ) -> None:
        super().__init__(dim, inner, dropout=dropout, pre_norm=pre_norm, norm=norm)
        self.attention = attention
        self.attention_norm = norm(dim)
        self.dropout = dropout

    def attend(
        self, hidden: Tensor, memory: Tensor | None, context: Any, trace: bool
    ) -> tuple[Tensor, Tensor | None, AttentionTrace | None]:
        """hidden [B, T, dim], memory [B, M, width] -> the attention's output, what to remember, and the trace."""
        found: tuple[Tensor, Tensor | None, AttentionTrace | None] = self.attention(
            self.attention_norm(hidden) if self.pre_norm else hidden,
            memory=memory,
            key_mask=context.key_mask,
            causal=context.causal_attention,
            rotate=context.rotate,
            bias=context.bias,
            keep=context.remember,
            trace=trace,
        )
        return found

    def forward(
        self, hidden: Tensor, memory: Tensor | None, context: Any, past: RouterState | None, trace: bool
    ) -> tuple[Tensor, Tensor | None, RouterStates | None, AttentionTrace | None]:
        """[B, T, dim], memory [B, M, width] -> hidden, what to remember, what the router hands on, and the trace.

        The trace is made only if this layer's router needs it, or if `trace` says that a later one does.
        """
        mixed, kept, seen = self.attend(hidden, memory, context, trace or self.needs_attention)
        hidden = hidden + dropout(mixed, self.dropout, self.training, self.ranks)
        if not self.pre_norm:
            hidden = self.attention_norm(hidden)
        hidden, handed = self.mix(hidden, context, seen, past)
        return hidden, kept, handed, seen if trace else None
