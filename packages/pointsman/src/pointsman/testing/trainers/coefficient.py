"""The lines on the coefficient of the balance loss: what one optimizer step adds to the gate's gradient for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pointsman.testing.trainers.case import Batch, Setting, Trainer, batch, effect, oracle, packed, ratio, rows, world

FACTOR, COSINE = 2e-3, 0.9999
"""How far a factor may be from the one expected, and how near the directions must be."""


def _factor(trainer: Trainer, batches: Sequence[Batch], setting: Setting) -> tuple[float, float]:
    return ratio(effect(trainer, batches, setting), oracle(trainer, batches, setting))


def _equal(name: str, plain: tuple[float, float], found: dict[Any, tuple[float, float]]) -> tuple[bool, str]:
    """Whether each setting has the coefficient and the direction of the plain one."""
    factors = {key: one[0] / plain[0] for key, one in found.items()}
    straight = all(abs(one[1]) >= COSINE for one in found.values())
    said = ", ".join(f"x {factor:.4g} {name}{key}" for key, factor in factors.items())
    bent = min(found.values(), key=lambda one: abs(one[1]))[1]
    return all(abs(factor - 1) < FACTOR for factor in factors.values()) and straight, (
        said if straight else f"{said}; cosine with the loss's gradient {bent:.4f}"
    )


def _plain(trainer: Trainer, setting: Setting) -> tuple[float, float]:
    found = _factor(trainer, [batch(rows(4 // world()))], setting)
    if not found[0]:
        raise AssertionError("the balance loss that was asked for reaches no gate")
    return found


def accumulation(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """The coefficient is the same for every number of micro-batches in a step."""
    ids, plain = rows(4), _plain(trainer, setting)
    found = {count: _factor(trainer, [batch(part) for part in ids.chunk(count)], setting) for count in (2, 4)}
    return _equal("at ", plain, found)


def ranks(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """The coefficient is the same on two processes that share the batch."""
    factor, cosine = _plain(trainer, setting)
    return abs(cosine) >= COSINE, f"{factor!r}"  # `run` compares one process with two


def padding(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """Padding does not count."""
    found = _factor(trainer, [batch(rows(4), padding=5)], setting)
    return _equal("", _plain(trainer, setting), {"with padding": found})


def packing(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """Sequences in one row count as they do in rows of their own."""
    return _equal("", _plain(trainer, setting), {"packed": _factor(trainer, [packed(rows(4))], setting)})


def checkpointing(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """Activation checkpointing does not change the coefficient."""
    found = _factor(trainer, [batch(rows(4))], replace(setting, checkpointing=True))
    return _equal("", _plain(trainer, setting), {"checkpointed": found})


def compiled(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """Compilation does not change the coefficient."""
    torch.compiler.reset()  # after some graphs of one function torch compiles no more of them, without an error
    found = _factor(trainer, [batch(rows(4))], replace(setting, compiled=True))
    return _equal("", _plain(trainer, setting), {"compiled": found})


def top_k(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """One coefficient means the same at every k: E sum f P, which is 1 at perfect balance."""
    _plain(trainer, setting)
    found = {k: _factor(trainer, [batch(rows(4))], replace(setting, k=k)) for k in (1, 2, 3)}
    return all(abs(factor - 1) < FACTOR and cosine >= COSINE for factor, cosine in found.values()), ", ".join(
        f"x {factor:.4g} at k = {k}" + ("" if cosine >= COSINE else f" (cosine {cosine:.4f})")
        for k, (factor, cosine) in found.items()
    )


def per_layer(trainer: Trainer, setting: Setting) -> tuple[bool, str]:
    """Each layer is balanced by its own load, not by the load of all layers together."""
    _plain(trainer, setting)
    _, cosine = _factor(trainer, [batch(rows(4))], replace(setting, layers=4))
    return cosine >= COSINE, f"cosine with the gradient of the last of 4 layers' own loss {cosine:.4f}"
