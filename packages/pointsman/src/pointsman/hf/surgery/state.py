"""The routing context of a mixer in a Hugging Face model: batch shape, padding mask, cache, earlier tokens.

The blocks flatten the hidden states before the gate. A pre-hook on the model records shape, mask and cache. The mixer's
state of earlier tokens is an attribute of the key-value cache, so that a copy of the cache has it, too.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pointsman.hf.given import CACHE, names_of, real_tokens
from pointsman.ops.kernels import exporting
from pointsman.ops.linear import in_backward
from pointsman.routing import RouterState, Routing, RoutingContext

CARRIES = "pointsman_carries"
"""The attribute of a cache: `ForwardState` -> id of the gate -> what its mixer carries on."""
REORDERED = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")


class ForwardState:
    """The current forward of one model (the innermost one that contains the gates), shared by its gates."""

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None
        self.tokens = 0  # with those in the cache
        self.padding: Tensor | None = None
        self.cache: Any = None
        self.fresh: dict[int, RouterState] = {}
        self.attention: dict[int, Any] = {}
        self.handles: list[RemovableHandle] = []
        self.traced: list[nn.Module] = []
        self.model: Any = None
        self.implementation: str | None = None
        self.pending, self.recomputed = 0, False

    def attach(self, model: nn.Module) -> None:
        """Registers the hooks on the model, once."""
        if self.model is None:
            self.model = model
            self.handles.append(model.register_forward_pre_hook(self.begin, with_kwargs=True))
            self.handles.append(model.register_forward_hook(self.end, with_kwargs=True))

    def detach(self) -> None:
        """Removes all hooks."""
        while self.handles:
            self.handles.pop().remove()
        while self.traced:
            self.traced.pop().__dict__.pop("pointsman_tracer", None)
        if self.implementation is not None:
            self.model.set_attn_implementation(self.implementation)
        self.model = self.implementation = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(names_of(model), args, strict=False)), **kwargs}
        hidden = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
        if hidden is None:
            raise ValueError("a mixing router needs input_ids or inputs_embeds, for the shape of the batch")
        self.shape, self.tokens = (hidden.shape[0], hidden.shape[1]), hidden.shape[1]
        self.cache = next((given[name] for name in CACHE if given.get(name) is not None), None)
        self.fresh = {}
        if self.cache is not None:
            self._check_cache()
        mask: Any = given.get("attention_mask")
        places: Any = given.get("position_ids")
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            raise ValueError("a mixing router needs an attention mask of two dimensions, [B, T]")
        may_pack = mask is None and self.cache is None and places is not None and not exporting()
        if may_pack and places.ndim == 2 and bool((places.diff() != 1).any()):
            raise ValueError("a mixing router would mix the texts of a packed row (position_ids begin anew): pad them")
        real = real_tokens(mask, hidden.shape[0] * hidden.shape[1])
        whole = real is None or (not exporting() and bool(real.all()))
        self.padding = None if whole else real
        checkpointed = model.training and torch.is_grad_enabled()
        checkpointed = checkpointed and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        self.pending = 0 if not checkpointed else 1 if self.recomputed else self.pending + 1
        self.recomputed = False

    def _check_cache(self) -> None:
        assert self.shape is not None
        kind = type(self.cache).__name__
        if kind != "DynamicCache":
            raise ValueError(f"a mixing router works with a DynamicCache; {kind} is not supported")
        length = int(self.cache.get_seq_length())
        self.tokens += length
        carries = self._carries()
        if length and not carries:
            raise ValueError("the cache was filled without this router, which has no state of those tokens")
        for carry in filter(None, carries.values()):  # a mixer may have no state
            batch, tokens = next(iter(carry.values())).shape[:2]
            if (batch, tokens) != (self.shape[0], length):
                raise ValueError(f"the cache holds {self.shape[0]} x {length} tokens, the mixing router {batch} x "
                                 f"{tokens}: cropped or reordered caches are not supported, nor is a mixer whose carry "
                                 "is not [B, S, ...] of S tokens")  # fmt: skip

    def _carries(self) -> dict[int, RouterState]:
        return getattr(self.cache, CARRIES, {}).get(self, {})  # type: ignore[no-any-return]

    def context(self, gate: Any, hidden: Tensor) -> tuple[Tensor, RoutingContext]:
        """The gate's input as [B, T, dim], and its router's context."""
        if in_backward():  # a checkpoint recomputes the forward inside backward
            self.recomputed = True
            if self.pending > 1:
                raise ValueError("gradient checkpointing with a mixing router needs a backward after each forward; "
                                 f"there were {self.pending} forwards before this backward")  # fmt: skip
        if self.shape is None or hidden.numel() != self.shape[0] * self.shape[1] * hidden.shape[-1]:
            raise ValueError(f"a mixing router expects {self.shape} sequences and tokens, its gate received "
                             f"{list(hidden.shape[:-1])}: call the model, not the block")  # fmt: skip
        past, attention = self._carries().get(id(gate)) or None, self.attention.get(id(gate))
        context = RoutingContext(padding_mask=self.padding, past=past, attention=attention)
        return hidden.reshape(*self.shape, hidden.shape[-1]), context

    def keep(self, gate: Any, routing: Routing) -> None:
        """Keeps the mixer's state of these tokens until the end of the forward."""
        self.fresh[id(gate)] = {name: value.detach() for name, value in (routing.carry or {}).items()}

    def end(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = self.cache
        if cache is None and not isinstance(output, tuple):
            cache = next((found for name in CACHE if (found := getattr(output, name, None)) is not None), None)
        if cache is not None and self.fresh:
            if not hasattr(cache, CARRIES):
                setattr(cache, CARRIES, WeakKeyDictionary())
                for name in (one for one in REORDERED if hasattr(cache, one)):
                    setattr(cache, name, partial(_refuse, name))
            getattr(cache, CARRIES)[self] = self.fresh
        self.fresh, self.cache, self.attention = {}, None, {}

    def __getstate__(self) -> dict[str, Any]:
        """The state without what a forward was given, for a copy of the model."""
        empty: dict[str, Any] = {"fresh": {}, "cache": None, "attention": {}, "padding": None, "shape": None}
        return {**self.__dict__, **empty}


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    """In the place of a method of a cache, which would not reorder the mixer's state."""
    raise ValueError(f"{name}: beam search and cropped caches are not supported with a mixing router")
