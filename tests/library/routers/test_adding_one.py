"""A router of one's own: the example of docs/routers/index.md, as it stands, and what a scorer is given."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from pointsman import MoE, RoutingContext, build_router
from pointsman.routers.frame import registry
from pointsman.routers.papers.topk import LinearScorer


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routers" / "index.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    try:
        exec(found[1], {})
        layer = MoE(8, 8, 4, router="mine:sharpness=2")
        assert layer(torch.randn(2, 3, 8)).shape == (2, 3, 8)
        assert layer.router.score.sharpness == 2.0
        assert registry.entry("mine").summary.startswith("One line that")
    finally:
        registry.ROUTERS.pop("mine", None)


def test_a_scorer_with_a_forward_of_its_own_gets_raised_hidden_states() -> None:
    class Halved(LinearScorer):
        def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
            assert hidden.dtype == torch.float32
            return nn.functional.linear(hidden, self.weight.to(hidden.dtype)) / 2

    class Renamed(LinearScorer):
        """Keeps the forward, and with it what that says."""

    assert (LinearScorer.accepts_half, Renamed.accepts_half, Halved.accepts_half) == (True, True, False)
    router = build_router("smoe", dim=8, num_experts=4, top_k=2).bfloat16()
    for scorer in (Halved(8, 4).bfloat16(), NoPromises()):
        router.score = scorer
        assert router(torch.randn(5, 8).bfloat16()).logits.dtype == torch.float32


class NoPromises(nn.Module):
    """A stage that is no Scorer."""

    causal = batch_invariant = True

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        assert hidden.dtype == torch.float32
        return hidden[..., :4]
