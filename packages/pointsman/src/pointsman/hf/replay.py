"""Replay in a Hugging Face MoE: the class's own code runs, and its `topk` over the experts gives the replayed ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pointsman._errors import did_you_mean
from pointsman.hf.gates import Gate, no_gate, original_forward, survey
from pointsman.hf.given import Given, Running
from pointsman.hf.surgery.routed import ClassRule
from pointsman.ops.linear import in_backward
from pointsman.recording import KNOWN, uncompiled
from pointsman.replay import RouterPlace, check_experts
from pointsman.traces import MISSING, RoutingTrace
from pointsman.traces.trace import hash_of


class _Choice(TorchFunctionMode):
    """Inside, `topk` over E scores returns these experts [tokens, k], and their values; `MISSING` ones stay its own."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts, self.num_experts, self.used = experts, num_experts, False
        self.filled: Any = None  # scores before and after a class shuts groups out of them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is Tensor.masked_fill:
            self.filled = args[0], found
        if func not in (torch.topk, Tensor.topk):
            return found
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self.num_experts or scores[..., 0].numel() != len(self.experts):
            return found  # of groups, or of something else
        self.used = True
        experts = self.experts.to(scores.device).reshape(*scores.shape[:-1], -1)
        if (missing := experts == MISSING).any():  # the best experts that the token does not have, in order
            had = torch.zeros(*scores.shape[:-1], self.num_experts + 1, dtype=torch.bool, device=scores.device)
            had = had.scatter(-1, experts.masked_fill(missing, self.num_experts), True)[..., :-1]
            others = scores.masked_fill(had, -torch.inf).topk(experts.shape[-1]).indices
            experts = torch.where(missing, others.gather(-1, (missing.cumsum(-1) - 1).clamp_min(0)), experts)
        whole: Tensor = self.filled[0] if self.filled and self.filled[1] is scores else scores
        return torch.return_types.topk((whole.gather(-1, experts), experts))


class GatePlace:
    """One gate whose class's choice can be replaced."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.first, self.last = gate, 0, gate.num_experts - 1
        chooses = gate.layout is None or gate.layout.write is not None
        self.module: Any = gate.module if chooses else gate.block  # DBRX's block chooses
        self.experts: Any = None
        self._before = list[dict[str, Any]]()  # accelerate's, with its hooks, or that of a replay around this one

    def replay(self, experts: Tensor | None) -> None:
        self.experts = experts
        if experts is None:
            vars(self.module).pop("forward", None)
            vars(self.module).update(self._before.pop())
        if experts is None or self._before:
            return
        self._before.append({name: own for name, own in vars(self.module).items() if name == "forward"})
        own = original_forward(self.module)
        where, kind = f"replay_routing: layer {self.gate.layer!r}", type(self.gate.module).__name__

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            experts, tokens = self.experts, hidden.numel() // hidden.shape[-1]
            if tokens != len(experts):
                raise ValueError(f"{where}: the replayed routing is of {len(experts)} tokens, the input of {tokens}")
            with _Choice(experts, self.gate.num_experts) as choice:
                output = own(*args, **kwargs)
            if not choice.used or (self.module is self.gate.module and not self._took(output, experts)):
                raise ValueError(f"{where}: {kind} does not choose by topk over its experts: it cannot be replayed")
            return output

        forward.replaces = own  # type: ignore[attr-defined]
        self.module.forward = forward

    def _took(self, output: Any, experts: Tensor) -> bool:
        known = (experts != MISSING).all(-1)
        found = self.gate.routed(output)[2].reshape(len(experts), -1).to(experts)
        return torch.equal(found[known].sort(-1).values, experts[known].sort(-1).values)


def places(model: nn.Module) -> dict[str, Any]:
    """Layer -> where its choice is replaced; ValueError without gates, or with one whose output is not known."""
    gates, reasons = survey(model)
    if reasons or not gates:
        raise ValueError(f"replay_routing: {reasons[0] if reasons else no_gate(model)}: {KNOWN}")
    found: dict[str, Any] = {}
    for gate in gates:
        router: Any = getattr(gate.module, "pointsman", None)
        own = router is not None and not isinstance(router.select, ClassRule)
        found[gate.layer] = RouterPlace(router) if own else GatePlace(gate)
    return found


class _Rows:
    """Which row of a trace each token of a forward takes, plus 1; 0 for padding. Also where backward does it again."""

    def __init__(self, model: nn.Module, trace: RoutingTrace) -> None:
        self.given, self.read = Given(model), 0
        self.lengths, self.ends = trace.lengths.tolist(), trace.lengths.cumsum(0).tolist()
        self.places = None if trace.hashes is None else {int(one): place for place, one in enumerate(trace.hashes)}
        self.rows: dict[Running, Tensor] = {}
        self.waiting: set[Running] = set()
        """The forwards that activation checkpointing will do again."""

    def of(self, layer: str, tokens: int) -> Tensor:
        """The rows of the tokens that a layer reads."""
        if in_backward():  # a node that the forward made asks for it
            number = torch._C._current_autograd_node()._sequence_nr()
            forward = next((one for one in self.rows if one.first <= number < one.last), None)
            if forward is None:
                raise ValueError("replay: a backward does a forward again that did not run inside the `with`, or whose "
                                 "checkpointing is none of transformers or FSDP")  # fmt: skip
            self.waiting.discard(forward)
            return self.rows[forward]
        told = self.given.ids(layer, tokens)
        if told is None:
            raise ValueError(f"replay: the forward has no input_ids for the {tokens} tokens of layer {layer!r}")
        forward, ids = told
        if forward not in self.rows:
            self.rows = {one: rows for one, rows in self.rows.items() if one.last < 0 or one in self.waiting}
            self.rows[forward] = self._read(forward, ids, self.given.real(layer, tokens))
            if forward.learns and any(map(_does_again, forward.model.modules())):
                self.waiting.add(forward)
        return self.rows[forward]

    def _read(self, forward: Running, ids: Tensor, real: Tensor | None) -> Tensor:
        if forward.past:
            raise ValueError("replay: a forward goes on from a key-value cache, as in generate: replay whole texts")
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        rows = torch.zeros(ids.shape, dtype=torch.int64)
        for row, text, kept in zip(rows, ids.cpu(), real.cpu(), strict=True):
            place = self.read if self.places is None else self.places.get(hash_of(text[kept]))
            length = int(kept.sum())
            if place is None or place >= len(self.ends) or self.lengths[place] != length:
                raise ValueError(f"replay: sequence {self.read} of the forwards, {length} tokens, is not in the trace")
            row[kept] = torch.arange(self.ends[place] - length, self.ends[place]) + 1
            self.read += 1
        return rows.flatten()


def _does_again(part: Any) -> bool:
    """Whether activation checkpointing does the forward of a module again in backward."""
    kind = type(part).__name__
    return kind == "CheckpointWrapper" or (part.training and getattr(part, "gradient_checkpointing", False))


@contextmanager
def replay(model: nn.Module, trace: RoutingTrace, *, missing: Literal["refuse", "own"] = "refuse") -> Iterator[None]:
    """Inside, every forward takes the experts that the trace has for its sequences; weights are computed as of now.

        with hf.replay(model, RoutingTrace.load("served.safetensors")):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss

    A sequence is found by the hash of its token ids without padding, where the trace has them; else the sequences of
    the forwards are those of the trace in order. Padding takes the first experts. Layers go by name, or, where no name
    is the same, in order. With activation checkpointing, backward must lie inside, too: each forward that it does
    again takes its own experts, whatever the order.

    Args:
        missing: of tokens whose experts the trace does not have, as an engine's last one: refuse the trace, or let them
            choose their own.

    Raises:
        ValueError: layers that do not fit, choices that are missing, a class that cannot be replayed, or, in a forward,
            a sequence that the trace does not have; at the end, a forward that checkpointing has yet to do again.
    """
    if missing not in ("refuse", "own"):
        raise ValueError(f"replay: missing={missing!r}: {did_you_mean(missing, ('refuse', 'own'))}")
    of_model = places(model)
    own = all(isinstance(place, GatePlace) for place in of_model.values())
    try:
        lenient = own and missing == "own"
        recorded = {name: one.long() for name, one in trace.experts.items()} if lenient else trace.for_replay()
    except ValueError as error:
        raise ValueError(f"replay: {error}" + ("; with missing='own' they choose their own" if own else "")) from None
    if not of_model.keys() & recorded.keys() and len(of_model) == len(recorded):
        recorded = dict(zip(of_model, recorded.values(), strict=True))
    if of_model.keys() != recorded.keys():
        raise ValueError(f"replay: the trace has {len(recorded)} layers, {', '.join(list(recorded)[:2])}, …; the model "
                         f"{len(of_model)}: {', '.join(list(of_model)[:2])}, …")  # fmt: skip
    for name, experts in recorded.items():
        check_experts(f"replay: layer {name!r}", of_model[name], experts, experts[experts != MISSING])
        recorded[name] = torch.cat([torch.arange(experts.shape[1])[None], experts])
    rows = _Rows(model, trace)

    def take(layer: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(module, "_is_replica", False):
            raise ValueError("replay: nn.DataParallel copies the gates; use DistributedDataParallel")
        hidden: Tensor = next(iter((*args, *kwargs.values())))
        of_model[layer].replay(recorded[layer][rows.of(layer, hidden.numel() // hidden.shape[-1])])

    with ExitStack() as inside:
        inside.enter_context(uncompiled())
        for name, place in of_model.items():
            place.replay(recorded[name][:0])  # those of each forward follow
            inside.callback(place.replay, None)
            inside.enter_context(place.module.register_forward_pre_hook(partial(take, name), with_kwargs=True))
        for handle in rows.given.hooks():
            inside.enter_context(handle)
        yield
        if any(one.last > one.first for one in rows.waiting):
            raise ValueError("replay: with activation checkpointing, backward must lie inside the `with`, too "
                             "(a forward without a backward under torch.no_grad())")  # fmt: skip
