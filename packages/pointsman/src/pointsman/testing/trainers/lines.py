"""The invariances of a router in training: one function a line, each with its figure in float64 and a verdict."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pointsman.testing.trainers import coefficient
from pointsman.testing.trainers.case import (
    BIAS_RATE,
    Batch,
    NotApplicable,
    Setting,
    Trainer,
    batch,
    gradients,
    hidden_states,
    rows,
    stepped,
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One line of a check.

    Attributes:
        line: the invariance.
        holds: None if the trainer has no such thing.
        told: what was found, in a few words.
    """

    line: str
    holds: bool | None
    told: str


def _moved(trainer: Trainer, batches: Sequence[Batch], setting: Setting, evaluated: bool) -> tuple[Tensor, Tensor]:
    """How far one step, perhaps after an evaluation, moves the last layer's bias, and how far it should."""
    asked = replace(setting, bias=True)
    model = trainer.model(asked)
    before = trainer.biases(model)[-1].detach().double().clone()
    if evaluated:
        trainer.evaluate(model, [batch(rows(8, 7, equal=False))], asked)
    trainer.train(model, [batches], asked)
    after = trainer.biases(model)[-1].detach().double()
    count = _counts(trainer, batches, asked, -1).double()  # the bias is 0 before the first step
    return after - before, BIAS_RATE * torch.sign(count.mean() - count)


def bias_once(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """A balancing bias moves once in an optimizer step, by what all its micro-batches chose."""
    batches = [batch(part) for part in rows(4, 3, equal=False).chunk(4)]
    moved, wanted = _moved(trainer, batches, setting, evaluated=False)
    if not bool(moved.any()):
        raise NotApplicable("its bias never moves")
    apart = moved - wanted
    far = float((apart - apart.mean()).abs().max())  # a common shift changes no choice; some engines take it away
    steps = float(moved.abs().max()) / BIAS_RATE
    return far < BIAS_RATE / 100, f"by {steps:.3g} rates in a step of {len(batches)} micro-batches" + (
        "" if far < BIAS_RATE / 100 else ", not by the sign of what they chose together"
    )


def bias_in_evaluation(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """Evaluation neither moves a balancing bias nor is counted for its next move."""
    batches = [batch(rows(2, 3, equal=False))]
    moved, _ = _moved(trainer, batches, setting, evaluated=False)
    if not bool(moved.any()):
        raise NotApplicable("its bias never moves")
    after, _ = _moved(trainer, batches, setting, evaluated=True)
    far = float((after - moved).abs().max()) / BIAS_RATE
    return far < 0.01, "the same move" if far < 0.01 else f"another move, by {far:.3g} rates"


def clipping(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """The norm that gradients are clipped to counts every parameter once, experts included."""
    batches = [batch(rows(2, 3, equal=False))]
    whole = stepped(trainer, [batches], setting)
    norm = math.sqrt(sum(float(one.square().sum()) for one in whole.values()))
    clipped = stepped(trainer, [batches], replace(setting, max_norm=norm / 4))
    found = math.sqrt(sum(float(one.square().sum()) for one in clipped.values()))
    bent = max(float((clipped[name] * norm / found - one).norm()) for name, one in whole.items()) / norm
    said = f"norm {norm:.4g}, clipped to {norm / 4:.4g}: {found:.4g}"
    straight = bent < coefficient.FACTOR
    holds = straight and abs(found / norm * 4 - 1) < coefficient.FACTOR
    return holds, said if straight else f"{said}, in another direction"


def experts_train(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """After a step every expert that got tokens has changed."""
    batches = [batch(rows(2, 3, equal=False))]
    asked = replace(setting, experts=8)
    model = trainer.model(asked)
    before = [one.detach().clone() for one in trainer.experts(model)]
    counts = _counts(trainer, batches, asked, 0)
    trainer.train(model, [batches, batches], asked)
    moved = torch.stack(
        [(new.detach() - old).flatten(1).norm(dim=1) for new, old in zip(trainer.experts(model), before, strict=True)]
    )
    changed = {place for place, far in enumerate(moved.amin(0).tolist()) if far > 0}
    used = {place for place, count in enumerate(counts.tolist()) if count > 0}
    missing = sorted(used - changed)
    norms = moved.square().sum(0).sqrt()[sorted(used)]
    return not missing, (
        f"{len(used)} experts got tokens; norms of their changes {float(norms.min()):.2g} to {float(norms.max()):.2g}"
        if not missing
        else f"{len(missing)} of {len(used)} experts with tokens did not change: {', '.join(map(str, missing))}"
    )


def _counts(trainer: Trainer, batches: Sequence[Batch], setting: Setting, layer: int) -> Tensor:
    """Tokens of each expert of a layer in a plain forward."""
    model = trainer.model(setting)
    weight = trainer.gates(model)[layer][1].detach().double()
    hidden = torch.cat([one[layer] for one in hidden_states(trainer, model, batches)]).double()
    weight = weight.reshape(-1, hidden.shape[-1])
    return torch.bincount((hidden @ weight.T).topk(setting.k, -1).indices.reshape(-1), minlength=len(weight))


def resuming(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """A run that was saved and goes on is the run that was not interrupted, bias and statistics of routers included."""
    steps = [[batch(rows(2, seed, equal=False))] for seed in (3, 4)]
    try:
        asked = replace(setting, bias=True)
        trainer.biases(trainer.model(asked))
    except NotApplicable:
        asked = setting
    whole, again = trainer.resumed(steps, asked)
    other = again.state_dict()
    far = {
        name: float((value.double() - other[name].double()).abs().max())
        for name, value in whole.state_dict().items()
        if isinstance(value, Tensor) and value.numel()
    }
    biases = zip(trainer.biases(whole), trainer.biases(again), strict=True) if asked.bias else ()
    for place, (left, right) in enumerate(biases):
        far[f"bias of layer {place}"] = float((left - right).abs().max())
    worst = max(far, key=far.__getitem__)
    return far[worst] == 0, "bit for bit" if far[worst] == 0 else f"{worst} differs by {far[worst]:.2g}"


def replay(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """A recorded routing is routed again in the trainer's step, its second forward under checkpointing included."""
    from pointsman.recording import record_routing
    from pointsman.replay import replay_routing

    batches, asked = [batch(rows(2, 3, equal=False))], replace(setting, checkpointing=True)
    plain = trainer.model(asked)
    try:
        with record_routing(plain) as records, torch.no_grad():
            plain(**batches[0])
        with replay_routing(plain, records):
            pass
    except ValueError as error:
        raise NotApplicable(f"its routing cannot be replayed: {str(error).split(': ')[1]}") from None
    found = {}
    for shift in (0, 1):
        model = trainer.model(asked)
        given = {name: (routing.experts + shift) % asked.experts for name, routing in records.items()}
        with replay_routing(model, given), gradients(model) as kept:
            trainer.train(model, [batches], asked)
        found[shift] = kept
    whole = stepped(trainer, [batches], asked)
    norm = math.sqrt(sum(float(one.square().sum()) for one in whole.values()))
    same, other = (
        math.sqrt(sum(float((kept[name] - one).square().sum()) for name, one in whole.items())) / norm
        for kept in (found[0], found[1])
    )
    return same < 1e-5 < other, f"the same routing again: gradient off by {same:.1g}; other experts: by {other:.2g}"


def precision(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """In mixed precision the router computes in float32."""
    batches, asked = [batch(rows(8, 3, equal=False))], replace(setting, bf16=True)
    model = trainer.model(asked)
    gate, weight = trainer.gates(model)[-1]
    weight = weight.detach().double().clone()
    seen: list[tuple[Tensor, list[Tensor]]] = []

    def keep(_: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        seen.append((hidden.detach(), [one.detach() for one in _tensors(output)]))

    with gate.register_forward_hook(keep, with_kwargs=True):
        trainer.train(model, [batches], asked)
    if not seen:
        raise NotApplicable("its gate is not called as a module")
    hidden, outputs = seen[0]
    hidden = hidden.double().reshape(-1, hidden.shape[-1])
    logits = hidden @ weight.reshape(-1, hidden.shape[-1]).T
    forms = [logits, torch.softmax(logits, -1), torch.sigmoid(logits)]
    forms += [form.topk(asked.k, -1).values for form in forms]
    forms += [form / form.sum(-1, keepdim=True) for form in forms[4:]]
    forms.append(torch.softmax(forms[3], -1))
    off = []
    for one in (output.double() for output in outputs if output.is_floating_point()):
        for form in [form for form in forms if form.numel() == one.numel()]:
            shaped = one.reshape(form.shape)
            chosen = torch.where(shaped == 0, 0.0, form)  # a dense form of the choice has zeros elsewhere
            for wanted in (chosen, chosen / chosen.sum(-1, keepdim=True)):
                off.append(float((shaped - wanted).abs().max() / wanted.abs().max()))
    if not off:
        raise NotApplicable("its gate returns neither logits nor probabilities")
    return min(off) < 1e-5, f"the gate's output is off by {min(off):.1g} of its largest value"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in _tensors(one)]
    return [tensor for tensor in (getattr(value, name, None) for name in ("logits", "probs")) if tensor is not None]


LINES: dict[str, Callable[[Trainer, Setting], tuple[bool, str]]] = {
    "accumulation": coefficient.accumulation,
    "ranks": coefficient.ranks,
    "padding": coefficient.padding,
    "packing": coefficient.packing,
    "checkpointing": coefficient.checkpointing,
    "compiled": coefficient.compiled,
    "top-k": coefficient.top_k,
    "per layer": coefficient.per_layer,
    "bias once a step": bias_once,
    "bias in evaluation": bias_in_evaluation,
    "clip norm": clipping,
    "experts train": experts_train,
    "resume": resuming,
    "replay": replay,
    "router in float32": precision,
}
"""The lines by name, in the order in which they are shown."""


def promise(line: str) -> str:
    """What a line makes sure of."""
    return (inspect.getdoc(LINES[line]) or line).splitlines()[0].rstrip(".")


def judged(line: str, trainer: Trainer, setting: Setting) -> Verdict:
    """The verdict of one line; what a trainer does not have is no failure."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            holds, told = LINES[line](trainer, setting)
        except NotApplicable as error:
            return Verdict(line, None, str(error))
        except Exception as error:
            said = " ".join(str(error).split())
            return Verdict(line, False, f"{type(error).__name__}: {said[:200]}")
    return Verdict(line, holds, told)
