"""A router inside what other libraries wrap modules in (PEFT, torch.compile, checkpoint wrappers) is one router."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import pointsman
from pointsman import MoE, Router, RoutingContext

IDS = torch.arange(6).view(1, 6) % 5
HIDDEN = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.moe = MoE(8, 16, 4, router="stable", vocab_size=5)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.moe(self.first(hidden), RoutingContext(token_ids=IDS))


def by_peft(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["first"], modules_to_save=["router"]))


def compiled(model: Any) -> Any:
    model.moe.router = torch.compile(model.moe.router, backend="eager")
    return model


def checkpointed(model: Any) -> Any:
    model.moe.router = checkpoint_wrapper(model.moe.router)
    return model


@pytest.mark.parametrize("wrapped", [by_peft, compiled, checkpointed])
def test_its_steps_count_once_and_it_has_one_name(wrapped: Any) -> None:
    model = wrapped(Model())
    (layer,) = (one for one in model.modules() if isinstance(one, MoE))
    for _ in range(3):
        pointsman.step_end(model)
    assert int(layer.router.score.steps) == 3
    ((_, router),) = pointsman.control.named_routers(model)
    assert isinstance(router, Router)
    pointsman.set_top_k(model, 1)
    assert {one.top_k for one in model.modules() if isinstance(one, Router)} == {1}


def test_a_replay_reaches_the_router_that_peft_trains() -> None:
    model = by_peft(Model()).eval()
    with pointsman.record_routing(model) as records:
        model(HIDDEN)
    ((name, before),) = records.items()
    other = (before.experts + 1) % 4
    with pointsman.replay_routing(model, {name: other}), pointsman.record_routing(model) as records:
        model(HIDDEN)
    assert torch.equal(records[name].experts, other)
