"""Options at an end of their range make one router another: both then choose the same experts with the same weights."""

import pytest
import torch

from pointsman import RoutingContext
from pointsman.routing import Routing
from tests.library.routers.oracle import EXPERTS, inputs, router_for

IDS = torch.arange(21).view(3, 7)
SIGMOID = "smoe:gate=sigmoid:bias=false"
PAIRS = [
    ("sigma:dropout=0", f"{SIGMOID}:renormalize=false", 2),
    ("loss-free:rate=0", SIGMOID, 2),
    ("loss-free:update=none", SIGMOID, 2),
    ("loss-free:nulls=0", "loss-free", 2),
    ("smoe:nulls=0", "smoe", 2),
    ("loss-free:gate=softmax", "smoe:bias=false", 2),
    ("loss-free:groups=3:kept=3", "loss-free", 2),
    ("loss-free:groups=1", "loss-free", 2),
    ("top-p:tau=1", "smoe:bias=false:renormalize=false", EXPERTS),
    ("top-p:tau=0.000001", "switch:bias=false", 1),
    ("expert-choice", "smoe:bias=false:renormalize=false", EXPERTS),
    ("noisy-topk", "smoe:bias=false", 2),
    ("gshard:second=all", "smoe:bias=false", 2),
    ("vmoe:noise=0", "smoe:bias=false:renormalize=false", 2),
    ("smoe+similarity:strength=0", "smoe", 2),
]


def weights_by_expert(spec: str, k: int, training: bool, matrix: torch.Tensor) -> torch.Tensor:
    router = router_for(spec, k).train(training)
    with torch.no_grad():
        for name, parameter in router.named_parameters():
            if name == "score.weight":
                parameter.copy_(matrix)
            elif name == "score.bias":
                parameter.zero_()
    hidden, mask = inputs()
    routing: Routing = router(hidden, RoutingContext(token_ids=IDS, padding_mask=mask))
    found = torch.zeros(len(routing.experts), EXPERTS + 1, dtype=torch.float64)
    return found.scatter(1, routing.experts.remainder(EXPERTS + 1), routing.weights.detach())[:, :EXPERTS]


@pytest.mark.filterwarnings("ignore:.*the router gets no gradient")
@pytest.mark.parametrize(("spec", "other", "k"), PAIRS)
def test_the_two_are_one(spec: str, other: str, k: int) -> None:
    matrix = torch.randn(EXPERTS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for training in (False, True):
        if training and spec == "noisy-topk":
            continue
        left, right = (weights_by_expert(one, k, training, matrix) for one in (spec, other))
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-12)
