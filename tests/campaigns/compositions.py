"""Random legal specs, scores @ choice + mixer with options of each, through the contract and training steps.

The contract has every k, causality, batch invariance, padding, empty batches, bf16, checkpointing, saved state and
replay; here come large inputs and, for some specs, compilation. What is refused must be refused in one line.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin

import frame
import torch

from pointsman import MoE, RoutingContext, step_end
from pointsman.routers.frame.registry import COMMON, MIXERS, ROUTERS
from pointsman.testing import CHECKS, Case, layer, routing
from pointsman.testing.case import context_for
from pointsman_lab._values import written

NUMBERS = (0.1, 0.25, 0.5, 1, 1.5, 2, 3)
COMPILING = (routing.compiles, layer.compiles_in_training, layer.trains_the_same_parameters)
PREPARED = ("kind=balanced", "rare=")  # they are given counts first


class Compositions(frame.Campaign):
    name, unit, usual, limit = "compositions", "specs", 10, 240.0

    def draw(self, random: Random) -> frame.Program:
        while True:
            scores, choice = random.choice([*ROUTERS.values()]), random.choice([*ROUTERS.values()])
            after = {**COMMON.options, **choice.of_choice}
            spec = f"{_part(random, scores.name, scores.of_scores)}@{_part(random, choice.name, after)}"
            if random.random() < 0.3:
                mixer = random.choice([*MIXERS.values()])
                spec += f"+{_part(random, mixer.name, mixer.options)}"
            if any(one in spec for one in PREPARED):
                continue
            sizes = {"dim": random.choice([8, 12]), "num_experts": random.randint(2, 7)}
            sizes |= {"batch": random.randint(3, 4), "length": random.randint(9, 12)}
            try:
                Case(spec, **sizes).router()
            except ValueError as refusal:
                if "\n" in str(refusal):
                    return [{"spec": spec, "refused": str(refusal)}]
                continue
            return [{"spec": spec, **sizes, "compiled": random.random() < 0.05}]

    def check(self, program: frame.Program, folder: Path) -> Counter[str]:
        for step in program:
            if "refused" in step:
                raise frame.Wrong(f"{step['spec']}: refused in more than one line: {step['refused']}")
            sizes = {name: value for name, value in step.items() if name not in ("spec", "compiled")}
            case = Case(step["spec"], **sizes, must_show=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for check in CHECKS:
                    if step["compiled"] or check not in COMPILING:
                        try:
                            check(case)
                        except AssertionError as broken:
                            raise frame.Wrong(f"{step}: {check.__name__}: {broken}") from None
                _trains(case)
        return Counter(specs=len(program))

    def simpler(self, step: Any) -> Iterator[Any]:
        pieces = step["spec"].split(":")
        for place in range(1, len(pieces)):  # without one option
            _, mark, rest = pieces[place].partition("@") if "@" in pieces[place] else pieces[place].partition("+")
            yield {**step, "spec": ":".join(pieces[:place]) + mark + ":".join([rest, *pieces[place + 1 :]])}


def _trains(case: Case) -> None:
    """Steps on inputs up to 1e4 leave outputs and gradients of the experts finite."""
    model = case.layer(attach_losses=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for scale in (1.0, 100.0, 1e4, 1e-4):
        hidden = scale * case.hidden()
        output = _output(model, hidden, context_for(model.router, hidden))
        if not torch.isfinite(output).all():
            raise frame.Wrong(f"{case.spec}: an output is not finite at inputs of size {scale:g}")
        output.mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                raise frame.Wrong(f"{case.spec}: the gradient of {name} is not finite at inputs of size {scale:g}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step_end(model)


def _output(model: MoE, hidden: torch.Tensor, context: RoutingContext) -> torch.Tensor:
    output: torch.Tensor = model(hidden, context)
    return output


def _part(random: Random, name: str, options: Mapping[str, inspect.Parameter]) -> str:
    """The name with none to three of its options."""
    text = name
    for option in random.sample(sorted(options), min(len(options), random.choice([0, 0, 1, 1, 2, 3]))):
        if values := [value for value in _values(options[option].annotation) if value != options[option].default]:
            text += f":{option}={written(random.choice(values))}"
    return text


def _values(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is bool:
        return [True, False]
    if annotation in (int, float):
        return [annotation(one) for one in NUMBERS if annotation(one) == one]
    return [value for one in get_args(annotation) for value in _values(one)]
