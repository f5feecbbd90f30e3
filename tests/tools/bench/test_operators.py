"""The operators and bytes of a GPU's training step, counted: they must not creep back."""

from __future__ import annotations

import pytest
import torch

from pointsman.experts.modules import Experts
from pointsman.routing import Routing
from pointsman_lab.recipes import preset
from tools.bench.operators import Counts, as_on_a_gpu, count_step


def test_a_step_of_the_small_model() -> None:
    """One layer of four at its full shape, 22 x 512 tokens after a memory of 512."""
    config = preset("small", router="hyperrouter", data="enwik8").with_vocabulary(205)
    config = config.with_overrides({"model.num_layers": 1})
    found = count_step(config, (2, 9))
    assert max(counts.operators.total() for counts in found.values()) <= 325
    assert found[2].bytes.total() < 7.0e9
    assert found[9].bytes.total() < 9.0e9


@pytest.mark.parametrize(
    ("gated", "bias", "dropout", "operators", "passes"),
    [(False, False, 0.0, 39, 25), (False, True, 0.1, 57, 30), (True, False, 0.0, 48, 46), (True, True, 0.1, 70, 58)],
)
def test_a_layer(gated: bool, bias: bool, dropout: float, operators: int, passes: float) -> None:
    """`passes`: all bytes, weights included, in those of the hidden units of all assignments."""
    tokens, k, dim, hidden = 4096, 4, 256, 512
    layer = Experts(dim, hidden, 16, gated=gated, activation="silu" if gated else "relu", bias=bias, dropout=dropout)
    layer.to("meta", torch.bfloat16)
    given = torch.empty(tokens, dim, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.empty(tokens, k, device="meta", requires_grad=True)
    probs = torch.empty(tokens, 16, device="meta")
    routing = Routing(torch.empty(tokens, k, dtype=torch.int64, device="meta"), weights, probs, probs)
    with as_on_a_gpu(), Counts() as counts:
        output = layer(given, routing)
        output.backward(torch.empty_like(output))
    assert counts.operators.total() <= operators
    assert counts.bytes.total() / (tokens * k * hidden * 2) <= passes
