"""Every router at its limits: one expert, no real token, equal logits, logits of 10^4: nothing is ever not a number."""

import pytest
import torch
from torch import Tensor

from pointsman import MoE, RoutingContext, list_routers, step_end
from pointsman.routing import Routing

DIM, EXPERTS = 8, 6
SPECS = [
    *list_routers(),
    *("smoe:gate=sigmoid", "smoe:nulls=4:kind=mixed", "loss-free:gate=sqrtsoftplus", "loss-free:update=quantile"),
    *("loss-free:biased=logits", "loss-free:gate=softmax:update=quantile", "loss-free:update=smebu"),
    *("xmoe:gate=sigmoid", "hash:gate=sqrtsoftplus", "recurrent:depth=average"),
    *("compete:rate=1:diversity=0.1", "sparsemixer:version=1", "smoe:weigh=input", "smoe+similarity"),
]


def routed(spec: str, hidden: Tensor, experts: int = EXPERTS, real: bool = True) -> tuple[MoE, Tensor, Routing]:
    """The layer after a step of training on `hidden`, its output and its routing; all of it must be finite."""
    torch.manual_seed(0)
    layer = MoE(DIM, 4, experts, router=spec, top_k=min(2, experts), vocab_size=32)
    layer.router.z_loss = 0.001
    hidden = hidden.clone().requires_grad_()
    batch, length = hidden.shape[:2]
    mask = None if real else torch.zeros(batch, length, dtype=torch.bool)
    below = {name: torch.zeros(batch, length, width) for name, width in layer.router.score.below.items()}
    context = RoutingContext(token_ids=torch.arange(batch * length).view(batch, length), padding_mask=mask, below=below)
    output, routing = layer(hidden, context, return_routing=True)
    output.sum().backward()
    step_end(layer)
    named = {"output": output, "weights": routing.weights, "gradient": hidden.grad, **routing.losses}
    named |= {f"gradient of {name}": one.grad for name, one in layer.named_parameters() if one.grad is not None}
    named |= {name: one for name, one in layer.router.named_buffers() if one.is_floating_point()}
    for name, tensor in named.items():
        assert tensor is not None
        assert bool(torch.isfinite(tensor).all()), name
    return layer, output, routing


@pytest.mark.filterwarnings("ignore:.*the router gets no gradient")
@pytest.mark.parametrize("spec", SPECS)
def test_one_expert_has_every_token_that_is_routed(spec: str) -> None:
    _, _, routing = routed(spec, torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0)), experts=1)
    assert set(routing.experts.flatten().tolist()) <= {0, -1}


@pytest.mark.parametrize("spec", SPECS)
def test_padding_alone_is_not_routed(spec: str) -> None:
    _, output, routing = routed(spec, torch.randn(2, 5, DIM), real=False)
    assert bool((routing.experts == -1).all())
    assert not output.any()
    of_parameters = ("dynmoe",)  # whose losses are of no token
    assert spec in of_parameters or not any(bool(loss) for loss in routing.losses.values())


@pytest.mark.parametrize("spec", SPECS)
def test_equal_tokens_of_zero_are_routed(spec: str) -> None:
    routed(spec, torch.zeros(2, 5, DIM))


@pytest.mark.parametrize("spec", SPECS)
def test_one_token_is_routed(spec: str) -> None:
    routed(spec, torch.randn(1, 1, DIM))


@pytest.mark.parametrize("spec", SPECS)
def test_large_logits_are_numbers(spec: str) -> None:
    hidden = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
    for size in (1e4, 1e6):
        routed(spec, size * hidden[:1, :1])
        routed(spec, size * hidden)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("spec", [*SPECS, "loss-free:update=quantile:bins=0", "smoe:balance=0.1:balance_scope=step"])
def test_a_step_that_a_loss_scaler_skipped_spoils_no_state(spec: str, value: str) -> None:
    torch.manual_seed(0)
    layer = MoE(DIM, 4, EXPERTS, router=spec, vocab_size=32)
    context = RoutingContext(token_ids=torch.arange(10).view(2, 5))
    for bad in (True, False, False):
        hidden = torch.full((2, 5, DIM), float(value)) if bad else torch.randn(2, 5, DIM)
        layer(hidden, context).sum().backward()
        layer.zero_grad()
        if not bad:
            step_end(layer)
    for name, buffer in layer.router.named_buffers():
        assert bool(buffer.isfinite().all()), name
