"""Every router in a layer on a CUDA device: the numbers of a CPU, training in bfloat16, and the way back."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman import RoutingContext, add_losses, set_top_k, step_end
from pointsman.layer import MoE
from pointsman.ops.kernels import Kernels, using
from pointsman.testing import Case
from pointsman.testing.case import context_for, expect_close
from tests.library.contract.test_routers import SPECS

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WAYS = ("torch", "triton")


def moved(value: Any) -> Any:
    """A tensor, or a dataclass with tensors, on the device."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, dict):
        return {name: moved(one) for name, one in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{field.name: moved(getattr(value, field.name)) for field in fields(value)})
    return value


def context(layer: MoE, hidden: Tensor) -> RoutingContext:
    """What the router needs, where the hidden states are."""
    found = context_for(layer.router, hidden.detach().cpu().float())
    if found.responses is not None:
        found = replace(found, responses=context_for(layer.router, hidden).responses)
    return moved(found) if hidden.is_cuda else found


def figures(layer: MoE, hidden: Tensor) -> dict[str, Tensor]:
    """Output, losses and gradients of a layer, on a CPU."""
    hidden = hidden.detach().requires_grad_()
    output, routing = layer(hidden, context(layer, hidden), return_routing=True)
    add_losses(output.square().mean(), layer).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    found = {"output": output, "probs": routing.probs, "logits": routing.logits, "input": hidden.grad}
    found |= {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
    return {name: one.detach().float().cpu() for name, one in (found | dict(routing.losses)).items()}


def layers(spec: str) -> tuple[MoE, MoE, Tensor]:
    """The same layer on a CPU and on the device, and hidden states for it."""
    case = Case(spec, dim=24, num_experts=6, length=37)
    pair = case.layer(), case.layer().to(DEVICE)
    for layer in pair:
        layer.router.objective_known = True
    return *pair, case.hidden()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "thor"])  # which draws, each device its own
def test_the_numbers_are_those_of_a_cpu(spec: str, way: str) -> None:
    here, there, hidden = layers(spec)
    expected = figures(here.eval(), hidden)
    with using(Kernels(gpu=way)):
        found = figures(there.eval(), hidden.to(DEVICE))
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        scale = float(one.abs().max()) if one.numel() else 1.0
        expect_close(found[name], one, name, rtol=1e-3, atol=1e-4 * scale + 1e-7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_trains_in_bfloat16_and_comes_back(spec: str, way: str) -> None:
    _, layer, hidden = layers(spec)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    with using(Kernels(gpu=way)):
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                states = hidden.to(DEVICE).requires_grad_()
                output = layer(states, context(layer, states))
            add_losses(output.float().square().mean(), layer).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step_end(layer)
            optimizer.zero_grad()
    assert all(bool(torch.isfinite(one).all()) for one in layer.state_dict().values())
    if not layer.router.fixed_k:
        set_top_k(layer, 3)
    here = Case(spec, dim=24, num_experts=6).layer()
    here.load_state_dict({name: one.cpu() for name, one in layer.state_dict().items()})
    layer.cpu()(hidden, context(layer, hidden))
