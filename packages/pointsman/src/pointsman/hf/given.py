"""What the transformers models in a model are given while they run: token ids, and which tokens are padding."""

import inspect
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from pointsman.routing import RoutingContext

logger = logging.getLogger("pointsman.hf")
CACHE = ("cache", "past_key_values")
"""The cache's name in calls and outputs, from transformers 5.24 on and before."""


def names_of(model: nn.Module) -> tuple[str, ...]:
    """The names of what the forward of a model's class takes."""
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


@cache
def say_once(what: str) -> None:
    """Logs that padding is counted, once for every reason."""
    logger.warning("%s: every token counts", what)


def real_tokens(mask: Any, tokens: int, past: int | None = None) -> Tensor | None:
    """[B, T] bool, False for padding, of an attention mask; None where there is none.

    Of a mask [B, S] the last T columns are the tokens of the forward. In a mask [B, H, T, S], of truth values or added
    to the scores, a token is padding if no token of the forward attends to it; the first one has the column `past`.
    ValueError if the mask does not say it, as of a gate that reads a part of the tokens (None of `past`: not known).
    """
    if isinstance(mask, Mapping):  # of its kinds of layers
        mask = next((one for one in (mask.get("full_attention"), *mask.values()) if one is not None), None)
    if mask is None:
        return None
    shape = mask.shape if isinstance(mask, Tensor) else ()
    length = shape[2] if len(shape) == 4 else tokens // max(1, len(mask)) if len(shape) == 2 else 0
    rows, columns = tokens // max(1, length), shape[-1] if shape else 0
    if len(shape) == 2 and past is not None and columns != length + past:
        length = 0
    if not 0 < length <= columns or rows * length != tokens or (rows != len(mask) and (length == 1 or len(mask) > 1)):
        kind = f"of {len(shape)} dimensions" if isinstance(mask, Tensor) else f"of the type {type(mask).__name__}"
        raise ValueError(f"an attention_mask {kind} does not say which of the tokens are padding")
    first = columns - length if past is None or len(shape) == 2 else min(past, columns - length)
    own: Tensor = mask[..., first : first + length]
    if len(shape) == 2:
        return own.bool()
    attended = own > -1e3 if own.is_floating_point() else own.bool()  # less is added to scores of what is shut out
    return attended.flatten(1, 2).any(1).expand(rows, -1)


def _next_node() -> int:
    """The sequence number of the next node that autograd makes."""
    return -1 if torch.compiler.is_compiling() else int(torch._C._autograd._get_sequence_nr())


@dataclass(eq=False)
class Running:
    """One forward of a model, while it runs and after.

    Attributes:
        given: what it was given, by name; empty afterwards.
        past: the number of tokens in the key-value cache before it; None: it has a cache that does not tell.
        learns: whether gradients were on.
        decodes: whether it has a decoder of its own tokens.
        first, last: between these are the sequence numbers of the nodes of autograd that it made.
    """

    model: nn.Module
    given: dict[str, Any]
    past: int | None
    learns: bool
    first: int
    decodes: bool = False
    last: int = -1


class Given:
    """The forwards that run now, the outermost first: of a model, and of each transformers model in it."""

    def __init__(self, model: nn.Module) -> None:
        self.models = [one for one in model.modules() if one is model or isinstance(one, PreTrainedModel)]
        self.threads = defaultdict[int, list[Running]](list)

    @property
    def running(self) -> list[Running]:
        """Those of this thread."""
        return self.threads[0 if torch.compiler.is_compiling() else get_ident()]

    def hooks(self) -> list[RemovableHandle]:
        begins = [(one, partial(self._begin, names_of(one))) for one in self.models]  # a replica calls them, too
        handles = [one.register_forward_pre_hook(begin, with_kwargs=True) for one, begin in begins]
        return handles + [one.register_forward_hook(self._end, always_call=True) for one in self.models]

    def _begin(self, names: tuple[str, ...], model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        decodes = "decoder_input_ids" in names
        cached: Any = next((given[name] for name in CACHE if given.get(name) is not None), None)
        try:
            past = 0 if cached is None else int(cached.get_seq_length())
        except (AttributeError, ValueError):  # one of linear attention alone
            past = None
        self.running.append(Running(model, given, past, torch.is_grad_enabled(), _next_node(), decodes))

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.running and self.running[-1].model is model:
            ended = self.running.pop()
            failed = output is None and sys.exc_info()[0] is not None
            ended.given, ended.last = {}, ended.first if failed else _next_node()

    def _told(self, gate: str, name: str) -> Iterator[tuple[Running, Any]]:
        """What the forwards around a gate were given under this name, or that of the decoder; the innermost first."""
        for one in reversed(self.running):
            apart = one.decodes and "decoder" in gate.split(".")
            if (value := one.given.get(f"decoder_{name}" if apart else name)) is not None:
                yield one, value

    def ids(self, gate: str, tokens: int) -> tuple[Running, Tensor] | None:
        """The ids [B, T] of the tokens that a gate reads, and the forward that was given them."""
        told = self._told(gate, "input_ids")
        return next(((one, ids) for one, ids in told if isinstance(ids, Tensor) and ids.numel() == tokens), None)

    def real(self, gate: str, tokens: int) -> Tensor | None:
        """`real_tokens` of a gate's input, by the plainest mask that says it."""
        told = sorted(self._told(gate, "attention_mask"), key=lambda told: getattr(told[1], "ndim", 5))
        for place, (one, mask) in enumerate(told, 1):
            try:
                return real_tokens(mask, tokens, one.past)
            except ValueError:
                if place == len(told):
                    raise
        return None

    def context(self, gate: str, tokens: int) -> RoutingContext | None:
        """Padding and token ids of a gate's input; None where neither was given for these tokens."""
        ids, mask = self.ids(gate, tokens), None
        try:
            mask = self.real(gate, tokens)
        except ValueError as error:
            say_once(str(error))
        return None if ids is None and mask is None else RoutingContext(padding_mask=mask, token_ids=ids and ids[1])
