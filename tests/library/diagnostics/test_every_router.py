"""Every router's routing goes through every diagnostic that reads routings, and all figures are finite."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pointsman import list_routers
from pointsman.diagnostics import Diagnostics, load_summary
from pointsman.testing.case import Case, route

KINDS = ("entropy", "margin", "load", "co_activation", "collapse", "specialisation")


def numbers(found: Any) -> Iterator[float]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list | tuple):
        for one in found:
            yield from numbers(one)
    elif isinstance(found, float):
        yield found


@pytest.mark.parametrize("spec", [*list_routers(), "smoe:nulls=4:kind=mixed", "smoe+similarity", "smoe+attention"])
def test_all_figures_are_finite(spec: str) -> None:
    case = Case(spec)
    routing = route(case.router().eval(), case.hidden())
    tokens = case.batch * case.length
    mask = torch.arange(tokens) % 5 > 0
    diagnostics = Diagnostics(*KINDS)
    hidden = case.hidden().flatten(0, 1)
    diagnostics.update("layer", routing, mask, hidden=hidden, token_ids=torch.arange(tokens) % 7)
    found = diagnostics.result()["layer"]
    assert set(KINDS) <= set(found)
    assert all(math.isfinite(number) for number in numbers(found))
    assert 0 <= found["entropy"]["mean"] <= math.log(routing.probs.shape[-1]) + 1e-6
    assert sum(found["load"]["share"]) == pytest.approx(1)


def test_docstrings_name_every_figure() -> None:
    diagnostics, case = Diagnostics(), Case("smoe+similarity")
    layer = case.layer().eval()
    with diagnostics.observe(layer, token_ids=torch.arange(case.batch * case.length) % 7):
        layer(case.hidden())
    found = diagnostics.layers[""]
    assert len(found) == 8
    for one in found.values():
        text = f"{inspect.getdoc(type(one))} {inspect.getdoc(load_summary)}"
        assert {name for name in one.result() if f"`{name}`" not in text} <= {"tokens", "assignments"}, type(one)
