"""The law of options: none is without effect. What would change nothing is refused when the router is built.

Every option of every router and of every mixer, at every other value of a choice and at some others of a number, is
either refused or changes something that can be seen: the initial state, a routing, an output, a loss, a gradient or the
state after some steps.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

from pointsman import MoE, build_routers, set_top_k, step_end
from pointsman._values import written
from pointsman.routers.frame.registry import COMMON, MIXERS, ROUTERS, Entry
from pointsman.testing.case import VOCABULARY, context_for

DIM, EXPERTS, BATCH, LENGTH = 8, 6, 3, 7
NUMBERS = (0.5, 3, 2, 0.25, 1, 5, 40)
NEEDS = {
    "balance_scope": "balance=0.1", "balance_on": "balance=0.1:gate=sigmoid", "nulls": "", "kind": "nulls=3",
    "columns": "gate=softmax", "diversity": "rate=1:version=2", "router": "rate=1", "version": "rate=1",
    "warmup": "rate=1", "groups": "kept=1", "kept": "groups=3", "group_score": "groups=3:kept=2",
    "relative": "sigma=2", "bins": "update=quantile", "stage_one": "", "codes": "", "light": "stage_one=1",
    "eta": "nulls=3:balance=0.1", "null_bias": "nulls=3:update=none", "real": "nulls=3:update=share",
}  # fmt: skip
"""What an option is given together with, as a user must: alone it is refused or unseen."""


def values_of(option: inspect.Parameter) -> list[Any]:
    """Values other than the default: all of a choice, some of a number."""
    kinds = [option.annotation]
    if get_origin(option.annotation) not in (None, Literal):
        kinds = list(get_args(option.annotation))
    found: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            found += get_args(kind)
        elif kind is bool:
            found += [True, False]
        elif kind in (int, float):
            found += [kind(one) for one in NUMBERS if kind(one) == one]
    return [one for one in found if one != option.default]


def observed(spec: str, steps: int = 4) -> dict[str, Tensor]:
    """All that can be seen of a router: its state, and routings, losses, outputs and gradients over some steps."""
    torch.manual_seed(1)
    layer = MoE(DIM, 4, EXPERTS, router=spec, vocab_size=VOCABULARY, attach_losses=True).double()
    router = layer.router
    if getattr(router.score, "needs_counts", False):
        router.score.calibrate(list(range(VOCABULARY)))
    two = build_routers(spec, layers=2, dim=DIM, num_experts=EXPERTS, vocab_size=VOCABULARY)
    shared = len({id(one) for router in two for one in router.modules()})
    numbers = (router.lr_scale, router.objective_weight, router.top_k, shared)
    seen = {"numbers": torch.tensor([float(one) for one in numbers])}
    seen |= {f"initial {name}": value.clone() for name, value in router.state_dict().items()}
    with torch.no_grad():  # so that experts fill, and probabilities tell tokens apart
        for parameter in router.score.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 5:] = False
    every = [1, 4, EXPERTS] if not router.fixed_k else [EXPERTS]
    draws = torch.Generator().manual_seed(2)
    for step in range(steps):
        layer.train(step < steps - 1)
        for k in every:
            set_top_k(layer, k)
            for part in range(2):
                hidden = torch.randn(BATCH, LENGTH, DIM, generator=draws, dtype=torch.float64).requires_grad_()
                context = replace(context_for(router, hidden.detach()), padding_mask=mask)
                torch.manual_seed(step)
                output, routing = layer(hidden, context, return_routing=True)
                output.square().sum().backward()
                place = f"step {step} k {k} part {part}"
                fields = {name: getattr(routing, name) for name in ("experts", "weights", "probs", "logits", "chosen")}
                seen |= {f"{place} {name}": value.detach() for name, value in fields.items()}
                seen |= {f"{place} loss {name}": value.detach() for name, value in routing.losses.items()}
                seen |= {f"{place} output": output.detach(), f"{place} gradient": hidden.grad}
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    seen[f"step {step} {name}"] = parameter.grad.clone()
                    parameter.sub_(0.01 * parameter.grad)
                    parameter.grad = None
        step_end(layer)
        seen |= {f"step {step} state {name}": value.clone() for name, value in router.state_dict().items()}
    return seen


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    if one.keys() != other.keys():
        return True
    pairs = ((one[name], other[name]) for name in one)
    return any(left.shape != right.shape or not torch.equal(left, right) for left, right in pairs)


def specs(entry: Entry, name: str, mixer: bool) -> Iterator[tuple[str, str]]:
    """(without the option, with it), one of each value."""
    option = (entry.options if name in entry.options else COMMON.options)[name]
    both = NEEDS.get(name, "capacity=0.5" if name.startswith("capacity_") else "")
    known = {**entry.options, **({} if mixer else COMMON.options)}
    given = [one for one in both.split(":") if one and one.partition("=")[0] in known]
    head = ":".join([f"smoe+{entry.name}" if mixer else entry.name, *given])
    for value in values_of(option):
        yield head, f"{head}:{name}={written(value)}"


EVERY = [
    *((entry, name, False) for entry in ROUTERS.values() for name in (*entry.options, *COMMON.options)),
    *((entry, name, True) for entry in MIXERS.values() for name in entry.options),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*with top_k=1 and renormalised")
@pytest.mark.parametrize("entry", [*ROUTERS.values(), *MIXERS.values()], ids=lambda one: one.name)
def test_no_option_is_without_effect(entry: Entry) -> None:
    known: dict[str, dict[str, Tensor] | None] = {}

    def of(spec: str) -> dict[str, Tensor] | None:
        if spec not in known:
            try:
                known[spec] = observed(spec)
            except ValueError as refusal:
                told, known[spec] = str(refusal), None
                if "\n" in told:
                    pytest.fail(f"{spec}: more than one line: {told}")
        return known[spec]

    silent = []
    for other, name, mixer in EVERY:
        if other is not entry:
            continue
        option = (entry.options if name in entry.options else COMMON.options)[name]
        # "none" is a rule that gives one of the other values; of numbers some are as good as others
        some = option.default is None or option.annotation in (int, float)
        effects, refused = [], False
        for without, given in specs(entry, name, mixer):
            base, seen = of(without), of(given)
            refused |= seen is None
            if seen is not None:
                effects.append((given, base is None or differs(base, seen)))
                if some and effects[-1][1]:
                    break  # one value of a number that does something
        # where all others are refused, the value that is left is what "none" means
        means_none = option.default is None and refused
        if effects and not means_none and not (any if some else all)(one for _, one in effects):
            silent += [spec for spec, one in effects if not one]
    assert not silent, f"accepted, and without any effect: {silent}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*with top_k=1 and renormalised")
@pytest.mark.parametrize("mixer", list(MIXERS))
def test_no_mixer_is_without_effect(mixer: str) -> None:
    silent = []
    for name in ROUTERS:
        bare = observed(name, 2)
        try:
            mixed = observed(f"{name}+{mixer}", 2)
        except ValueError as refusal:
            if "mix" not in str(refusal):
                raise
            continue
        shared = bare.keys() & mixed.keys()
        mixed = {one: mixed[one] for one in shared if "probs" not in one and "carry" not in one}
        if not differs({one: bare[one] for one in mixed}, mixed):
            silent.append(name)
    assert not silent, f"+{mixer} changes nothing of {silent}"
