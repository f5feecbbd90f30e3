"""A compiled layer and a schedule of k: one graph for each k, whatever torch's own limit is."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pointsman import MoE, add_losses, set_top_k, step_end

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it where a graph ends
@pytest.mark.parametrize("router", ["smoe:balance=0.5:z_loss=0.1", "loss-free"])
def test_a_compiled_layer_in_a_checkpoint_is_eager(router: str) -> None:
    """As "Your own training loop" says; around an eager layer torch compiles no checkpoint."""
    hidden, found = torch.randn(2, 5, 8), []
    for compiles in (False, True):
        torch.manual_seed(0)
        layer = MoE(8, 8, 4, router=router)
        if compiles:
            layer.compile(backend="aot_eager")
        for _ in range(2):
            output = checkpoint(layer, hidden, use_reentrant=False)
            add_losses(output.square().mean(), layer).backward()
            step_end(layer)
        found.append([*layer.state_dict().values(), *(one.grad for one in layer.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    traced = torch.compile(lambda: checkpoint(layer, hidden, use_reentrant=False), backend="eager", fullgraph=True)
    if router != "loss-free":
        with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
            traced()
