"""Observing the routing layers of a model: `record_routing`, and the hooks that monitors and diagnostics use."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pointsman.control import is_huggingface, routers_by_layer
from pointsman.ops.linear import in_backward
from pointsman.routing import Routing, RoutingContext
from pointsman.traces.trace import TraceWriter

Callback = Callable[[str, Routing, RoutingContext | None], None]
Observer = Callable[[str, Routing, RoutingContext | None, Tensor], object]
KNOWN = (
    "known are MoE and Router of pointsman, and of transformers the classes with a gate beside their experts "
    "(Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS, …; docs/huggingface-compatibility.md names all)"
)


class Listened(NamedTuple):
    """What is known of a layer before it runs: E, its router, whether a bias enters its choice, its virtual experts."""

    num_experts: int
    router: str
    biased: bool
    virtual: int = 0


class _OwnListener:
    """Observes the routers of this library; `layers`: name -> what is known of the layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: dict[str, Listened] = {}
        for name, router in routers_by_layer(model).items():
            biased = isinstance(getattr(router.select, "bias", None), Tensor)
            self.layers[name] = Listened(router.num_experts, router.spec, biased, len(router.virtual))

    def hooks(self, observe: Observer) -> list[RemovableHandle]:
        """Calls observe(layer, routing, context, hidden [tokens, dim]), all detached, at every forward of a layer."""

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
                # (kwargs, routing); without kwargs where another thread takes its own hooks away at this moment
                routing: Routing = rest[-1]
                given = rest[0] if len(rest) > 1 else {}
                context = args[1] if len(args) > 1 else given.get("context")
                hidden = (args[0] if args else given["hidden"]).detach()
                with torch.no_grad():
                    observe(name, routing.detach(), context, hidden.reshape(-1, hidden.shape[-1]))

            return hook

        routers = routers_by_layer(self.model).items()
        return [router.register_forward_hook(hook_of(name), with_kwargs=True) for name, router in routers]


def listener(model: nn.Module, asked: str) -> Any:
    """What observes the routers of a model, or the gates of a Hugging Face MoE: `_OwnListener`, or the same of gates.

    ValueError, which begins with `asked`, if the model has neither, or if its layers share a router.
    """
    if is_huggingface(model):
        from pointsman.hf.listen import GateListener  # transformers is imported only for its own models

        return GateListener(model, asked)
    own = _OwnListener(model)
    if not own.layers:
        raise ValueError(f"{asked}: {type(model).__name__} has no MoE layer, no router and no gate: {KNOWN}")
    return own


@contextmanager
def observe_routing(model: nn.Module, observe: Observer, asked: str = "observe_routing") -> Iterator[None]:
    """Calls observe(layer, routing, context, hidden [tokens, dim]), all detached, at every forward of a layer inside.

    What activation checkpointing repeats in a backward is left out. What `torch.compile` has compiled runs uncompiled
    inside: code from before these hooks would not call them.

    Raises:
        ValueError: as of `listener`.
    """
    handles = listener(model, asked).hooks(lambda *seen: in_backward() or observe(*seen))
    with ExitStack() as inside:
        for handle in handles:
            inside.enter_context(handle)
        inside.enter_context(uncompiled())
        yield


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, what `torch.compile` has compiled runs uncompiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class Records(dict[str, Routing]):
    """What `record_routing` keeps: layer name -> the Routing of its last forward, detached."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model, self.virtual = model, dict[str, int]()
        self.contexts: dict[str, RoutingContext | None] = {}

    def save(self, path: str | Path, token_ids: Tensor | None = None, *, logits: bool = False) -> Path:
        """Writes the last forward as a routing trace (`pointsman.traces`); padding is left out.

        Args:
            token_ids: [B, T], what the model was given, where the routers were not; without it and without a padding
                mask the tokens count as one sequence.
            logits: whether the logits are kept, too.

        Raises:
            ValueError: nothing was recorded.
        """
        with TraceWriter(Path(path), logits=logits) as writer:
            writer.model, writer.virtual = self.model, self.virtual
            for name, routing in self.items():
                writer.forward(name, routing, self.contexts.get(name), token_ids)
        return Path(path)


class record_routing:  # noqa: N801 - used like a function
    """`with record_routing(model) as records:` records[layer name] = that layer's last Routing, detached.

        with record_routing(model) as records:
            model(tokens)
        records.save("last.safetensors")                          # this forward, as a routing trace
        with record_routing(model).save("trace.safetensors"):     # every forward inside, in bounded memory
            ...

    With a callback, each forward's (name, routing, context) is handed to it, and nothing is kept. The model is one with
    MoE layers or routers of this library, or a mixture of experts of transformers whose gates `pointsman.hf` knows.

    Raises:
        ValueError: the model has no router.
    """

    def __init__(self, model: nn.Module, callback: Callback | None = None) -> None:
        known = listener(model, "record_routing").layers  # refuses a model without a router now
        self._model, self._callback, self._inside = model, callback, ExitStack()
        self.records = Records(type(model).__name__)
        self.records.virtual = {name: one.virtual for name, one in known.items() if one.virtual}

    def __enter__(self) -> Records:
        self._inside.enter_context(observe_routing(self._model, self._take, "record_routing"))
        return self.records

    def _take(self, name: str, routing: Routing, context: RoutingContext | None, hidden: Tensor) -> None:
        if self._callback is None:
            self.records[name] = routing
            kept = context and RoutingContext(padding_mask=context.padding_mask, token_ids=context.token_ids)
            self.records.contexts[name] = kept  # without the model's graph
        else:
            self._callback(name, routing, context)

    def __exit__(self, *error: object) -> None:
        self._inside.close()

    @contextmanager
    def save(self, path: str | Path, *, weights: bool = True, logits: bool = False) -> Iterator[TraceWriter]:
        """`with record_routing(model).save(path):` writes all forwards inside as one routing trace.

        Sequences are the rows of the token ids that the model is given, without padding; each forward adds its rows,
        so that with a key-value cache each step is one of its own. Forwards of several threads come after one another.
        """
        given: dict[int, Tensor | None] = {}  # by thread
        forwards = defaultdict[int, dict[str, Any]](dict)  # by thread: the layers of one that runs
        lock = Lock()

        def look(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = (*args, *(kwargs.get(name) for name in ("input_ids", "tokens")))
            tensors = (one for one in values if isinstance(one, Tensor) and one.dtype != torch.bool)
            whole = [one for one in tensors if one.dim() == 2 and not one.is_floating_point()]
            given[get_ident()] = whole[0].detach() if whole else None

        with TraceWriter(Path(path), weights=weights, logits=logits) as writer:
            writer.model, writer.virtual = self.records.model, self.records.virtual

            def write(forward: dict[str, Any]) -> None:
                for name, seen in forward.items():
                    writer.forward(name, *seen)
                forward.clear()

            def take(name: str, routing: Routing, context: RoutingContext | None, hidden: Tensor) -> None:
                ids, forward = given.get(get_ident()), forwards[get_ident()]
                ids = ids if ids is not None and ids.numel() == len(routing.experts) else None
                kept = context and RoutingContext(padding_mask=context.padding_mask, token_ids=context.token_ids)
                with lock:
                    if name in forward:  # the next forward has begun
                        write(forward)
                    forward[name] = routing, kept, ids

            with (
                self._model.register_forward_pre_hook(look, with_kwargs=True),
                self._model.register_forward_hook(lambda *_: given.update({get_ident(): None}), always_call=True),
                observe_routing(self._model, take, "record_routing"),
            ):
                yield writer
            for forward in forwards.values():
                write(forward)
