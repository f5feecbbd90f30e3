"""A compiled layer and a schedule of k: one graph for each k, whatever torch's own limit is."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pointsman import MoE, set_top_k

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile meets its own


@pytest.fixture(autouse=True)
def _torchs_own_limits() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield


def captured(graphs: list[Any]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return backend


@pytest.mark.slow
def test_one_graph_for_each_k() -> None:
    # at its limit torch would run without graphs, a break would make more of them (fullgraph: test_compiled.py)
    model = nn.Sequential(nn.Linear(16, 16), MoE(16, 24, 16, top_k=2), MoE(16, 24, 16, top_k=2))
    graphs: list[Any] = []
    compiled = torch.compile(model, backend=captured(graphs))
    hidden = torch.randn(2, 5, 16)
    for schedule in (range(2, 17), range(16, 1, -1)):  # the second time every graph is there
        for k in schedule:
            set_top_k(model, k)
            torch.testing.assert_close(compiled(hidden), model(hidden), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 15


def test_a_limit_of_the_users_own_stays() -> None:
    layer = MoE(8, 8, 4, top_k=1)
    graphs: list[Any] = []
    compiled = torch.compile(layer, backend=captured(graphs), recompile_limit=2)
    for k in (2, 3, 4):
        set_top_k(layer, k)
        compiled(torch.randn(1, 5, 8))
    assert len(graphs) == 2
    assert torch._dynamo.config.recompile_limit == 8
