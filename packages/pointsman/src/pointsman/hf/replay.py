"""Replay in a Hugging Face MoE: the class's own code runs, and its `topk` over the experts gives the replayed ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pointsman._errors import did_you_mean
from pointsman.hf.gates import Gate, no_gate, survey
from pointsman.hf.listen import Given
from pointsman.hf.surgery.routed import ClassRule
from pointsman.recording import KNOWN
from pointsman.replay import RouterPlace
from pointsman.traces import MISSING, RoutingTrace
from pointsman.traces.trace import hash_of


class _Choice(TorchFunctionMode):
    """Inside, `topk` over E scores returns these experts [tokens, k], and their values; `MISSING` ones stay its own."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts, self.num_experts, self.used = experts, num_experts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self.num_experts or scores[..., 0].numel() != len(self.experts):
            return found  # of groups, or of something else
        self.used = True
        experts = self.experts.to(scores.device).reshape(*scores.shape[:-1], -1)
        if (missing := experts == MISSING).any():
            experts = torch.where(missing, found.indices, experts)
        return torch.return_types.topk((scores.gather(-1, experts), experts))


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
        own = getattr(self.module.forward, "replaces", self.module.forward)
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
    """Layer -> where its choice is replaced.

    Raises:
        ValueError: the model has no gate, or one whose output is not known.
    """
    gates, reasons = survey(model)
    if reasons or not gates:
        raise ValueError(f"replay_routing: {reasons[0] if reasons else no_gate(model)}: {KNOWN}")
    found: dict[str, Any] = {}
    for gate in gates:
        router: Any = getattr(gate.module, "pointsman", None)
        own = router is not None and not isinstance(router.select, ClassRule)
        found[gate.layer] = RouterPlace(router) if own else GatePlace(gate)
    return found


@contextmanager
def replay(model: nn.Module, trace: RoutingTrace, *, missing: Literal["refuse", "own"] = "refuse") -> Iterator[None]:
    """Inside, every forward takes the experts that the trace has for its sequences; weights are computed as of now.

        with hf.replay(model, RoutingTrace.load("served.safetensors")):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss

    A sequence is found by the hash of its token ids without padding, where the trace has them; else the sequences of
    the forwards are those of the trace in order. Padding takes the first experts. Layers go by name, or, where no name
    is the same, in order.

    Args:
        missing: of tokens whose experts the trace does not have, as an engine's last one: refuse the trace, or let them
            choose their own.

    Raises:
        ValueError: layers that do not fit, choices that are missing, a class that cannot be replayed, or, in a forward,
            a sequence that the trace does not have.
    """
    if missing not in ("refuse", "own"):
        raise ValueError(f"replay: missing={missing!r}: {did_you_mean(missing, ('refuse', 'own'))}")
    of_model = places(model)
    own = missing == "own" and all(isinstance(place, GatePlace) for place in of_model.values())
    recorded = {name: one.long() for name, one in trace.experts.items()} if own else trace.for_replay()
    if not of_model.keys() & recorded.keys() and len(of_model) == len(recorded):
        recorded = dict(zip(of_model, recorded.values(), strict=True))
    if of_model.keys() != recorded.keys():
        raise ValueError(f"replay: the trace has {len(recorded)} layers, {', '.join(list(recorded)[:2])}, …; the model "
                         f"{len(of_model)}: {', '.join(list(of_model)[:2])}, …")  # fmt: skip
    for name, experts in recorded.items():
        known = experts[experts != MISSING]
        if known.numel() and not of_model[name].first <= int(known.min()) <= int(known.max()) <= of_model[name].last:
            raise ValueError(f"replay: layer {name!r}: allowed experts are 0 to {of_model[name].last}")
    ends = trace.lengths.cumsum(0).tolist()
    hashes = None if trace.hashes is None else {int(one): place for place, one in enumerate(trace.hashes)}
    given, read = Given(model), 0

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal read
        given(module, args, kwargs)
        ids, mask = given.values.get("input_ids"), given.values.get("attention_mask")
        if not isinstance(ids, Tensor):
            raise ValueError("replay: the forward has no input_ids")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        rows = []
        for row, kept in zip(ids.cpu(), real.cpu(), strict=True):
            place = read if hashes is None else hashes.get(hash_of(row[kept]))
            length = int(kept.sum())
            if place is None or place >= len(ends) or int(trace.lengths[place]) != length:
                raise ValueError(f"replay: sequence {read} of the forwards, {length} tokens, is not in the trace")
            at = torch.zeros(len(row), dtype=torch.int64)
            at[kept] = torch.arange(ends[place] - length, ends[place]) + 1
            rows.append(at)
            read += 1
        order = torch.cat(rows)
        for name, experts in recorded.items():
            first = torch.arange(experts.shape[1])[None]
            of_model[name].replay(torch.cat([first, experts])[order])

    for name, experts in recorded.items():  # those of each forward follow
        of_model[name].replay(experts)
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        for place in of_model.values():
            place.replay(None)
