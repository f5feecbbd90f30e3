"""The kernels for decoding against the float64 reference: outputs, which are all they have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.experts import reference
from pointsman.kernels import experts as on_gpu
from pointsman.kernels.triton import decode

pytestmark = pytest.mark.usefixtures("undefined_memory")

CASES: list[dict[str, Any]] = [
    {"tokens": 1, "dim": 33, "hidden_dim": 40, "num_experts": 5, "k": 2},
    {"tokens": 9, "dim": 24, "hidden_dim": 17, "num_experts": 3, "k": 3, "gated": True, "activation": "silu"},
    {"tokens": 35, "dim": 16, "hidden_dim": 24, "num_experts": 9, "k": 1, "favourite": 20.0, "bias": False},
    {"tokens": 6, "dim": 40, "hidden_dim": 70, "num_experts": 4, "k": 3, "gated": True, "activation": "gelu",
     "dropped": 0.3},
    {"tokens": 5, "dim": 16, "hidden_dim": 16, "num_experts": 2, "k": 2, "dropped": 1.0},
]  # fmt: skip


@torch.no_grad()
def run(case: Any) -> Tensor:
    return decode.decode(case.hidden, case.weights, case.routing.experts, *case.parameters, case.activation)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("programs", [1, 512])  # one part of each inner dimension, or several
def test_against_the_reference(
    problem: Callable[..., Any],
    case: dict[str, Any],
    dtype: torch.dtype,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    monkeypatch.setattr(decode, "BLOCKS", 1)
    given = problem(dtype=dtype, **case)
    assert given.routing.experts.numel() <= on_gpu.MOST_FEW
    with torch.no_grad():
        given.weights[given.routing.experts < 0] = torch.nan
    found = run(given)
    assert found.dtype == dtype
    exact = given.exact()
    with torch.no_grad():
        expected = reference.apply_experts(exact.hidden, exact.routing, exact.parameters, exact.activation)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    assert float((found.double() - expected).norm()) <= tolerance * (float(expected.norm()) + math.sqrt(found.numel()))
    assert torch.equal(run(given), found), "the same twice"


def test_an_expert_that_does_not_exist_is_none(problem: Callable[..., Any]) -> None:
    case = problem(tokens=6, num_experts=4, k=2)
    expected = run(case)
    case.routing.experts[3] = torch.tensor([4, -7])
    found = run(case)
    assert not found[3].any()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(found[others], expected[others])


def test_the_dispatch(problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few assignments without gradients and dropout, in weights that can be read where they lie."""
    monkeypatch.setattr(on_gpu, "with_triton", lambda *_: True)
    case, calls = problem(tokens=6, gated=True, activation="silu", bias=False), []
    plain = decode.decode
    monkeypatch.setattr(decode, "decode", lambda *given: calls.append(1) or plain(*given))
    p = case.parameters

    def taken(expert: Tensor = case.routing.experts, parameters: Any = p, dropout: float = 0.0) -> bool:
        calls.clear()
        weights = case.weights[: len(expert)] if len(expert) <= 6 else case.weights.new_ones(expert.shape)
        hidden = case.hidden[: len(expert)] if len(expert) <= 6 else case.hidden.new_ones(len(expert), 24)
        on_gpu.apply(hidden, weights, None, expert, parameters, "silu", dropout)
        return bool(calls)

    assert not taken(), "wants gradients"
    with torch.no_grad():
        assert taken()
        both = torch.cat([p.w_gate, p.w_in], 1)
        assert taken(parameters=p._replace(w_gate=both[:, :32], w_in=both[:, 32:])), "halves of one tensor"
        assert not taken(parameters=p._replace(w_out=p.w_out.mT.contiguous().mT))
        assert not taken(dropout=0.1)
        assert not taken(torch.zeros(33, 2, dtype=torch.int64)), "too many"


def test_no_tokens(problem: Callable[..., Any]) -> None:
    assert run(problem(tokens=0)).shape == (0, 24)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
def test_compiles_to_one_graph(problem: Callable[..., Any]) -> None:
    case = problem(tokens=3)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case), run(case), rtol=0, atol=0)
