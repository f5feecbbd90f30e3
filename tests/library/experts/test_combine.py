"""Weights on inputs, against loops over pairs."""

import pytest
import torch

from pointsman import MoE
from pointsman.experts.reference import expert, experts


@pytest.mark.parametrize("router", ["smoe:weigh=input:gate=sigmoid:renormalize=false", "expert-choice:weigh=input"])
def test_weights_on_inputs(router: str) -> None:
    torch.manual_seed(0)
    layer = MoE(5, 4, 6, router=router, activation="gelu", shared_experts=1).double()
    hidden = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    output, routing = layer(hidden, return_routing=True)
    each = experts(layer.experts.expert_parameters)
    rows = []
    for h, chosen, weights in zip(hidden.flatten(0, 1), routing.experts, routing.weights, strict=True):
        y = layer.shared(h[None])[0]
        for e, w in zip(chosen.tolist(), weights, strict=True):
            if e >= 0:
                y = y + expert(w * h, each[e], "gelu")
        rows.append(y)
    wanted = torch.stack(rows).view_as(hidden)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    tensors = [hidden, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(output.square().sum(), tensors, retain_graph=True),
        torch.autograd.grad(wanted.square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_base_experts_weigh_outputs_only() -> None:
    with pytest.raises(ValueError, match="experts='base'"):
        MoE(8, 8, 2, router="smoe:weigh=input", experts="base")
