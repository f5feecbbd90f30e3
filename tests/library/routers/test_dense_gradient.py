"""dense_gradient: the router's gradient of DenseMixer, against the sum over all experts written out."""

import pytest
import torch
from torch import Tensor

from pointsman import MoE, RoutingContext

DIM, EXPERTS = 5, 6


def written_out(layer: MoE, hidden: Tensor, mask: Tensor, renormalize: bool, scale: float) -> Tensor:
    """Forward: chosen experts alone. Backward: p of all experts, and experts of the tokens that chose them."""
    rows = []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten().tolist(), strict=True):
        z = layer.router.score.weight @ h + layer.router.score.bias
        p = torch.exp(z) / torch.exp(z).sum()
        best = p.detach().topk(2).indices.tolist()
        total = sum(p[e] for e in best) if renormalize else torch.ones(())
        row = torch.zeros(DIM, dtype=torch.float64)
        for e in range(EXPERTS):
            units = torch.relu(layer.experts.w_in[e] @ h + layer.experts.b_in[e])
            output = layer.experts.w_out[e] @ units + layer.experts.b_out[e]
            weight = scale * p[e] / total
            if e not in best:
                weight = scale * p[e] / total.detach()
                weight, output = weight - weight.detach(), output.detach()
            row = row + weight * output
        rows.append(row if real else torch.zeros_like(row))
    return torch.stack(rows).view(hidden.shape)


@pytest.mark.parametrize(("options", "renormalize", "scale"), [("", True, 1), (":renormalize=false:scale=2", False, 2)])
def test_transcription(options: str, renormalize: bool, scale: float) -> None:
    torch.manual_seed(0)
    layer = MoE(DIM, 4, EXPERTS, router=f"smoe:dense_gradient=true{options}").double()
    with torch.no_grad():
        layer.router.score.weight.normal_()
    hidden = torch.randn(2, 4, DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 3] = False
    leaves = [hidden, *layer.parameters()]
    output = layer(hidden, RoutingContext(padding_mask=mask))
    wanted = written_out(layer, hidden, mask, renormalize, scale)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    factors = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    ours = torch.autograd.grad((output * factors).sum(), leaves)
    theirs = torch.autograd.grad((wanted * factors).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    plain = MoE(DIM, 4, EXPERTS, router=f"smoe{options}").double()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain(hidden, RoutingContext(padding_mask=mask)), output)


@pytest.mark.parametrize(
    "spec", ["loss-free:groups=2:kept=1", "hyperrouter@expert-choice", "smoe:capacity=1.0+similarity"]
)
def test_every_router_of_a_choice_gets_a_gradient_of_all_experts(spec: str) -> None:
    """At k = 1 and renormalised weights the output has no gradient for the router; with this option it has one."""
    head, _, mixer = spec.partition("+")
    spec = f"{head}:dense_gradient=true" + (f"+{mixer}" if mixer else "")
    layer = MoE(DIM, 4, EXPERTS, router=spec, top_k=2)
    hidden = torch.randn(2, 8, DIM)
    layer(hidden).square().sum().backward()
    (first, *_) = (parameter.grad for parameter in layer.router.score.parameters())
    assert first is not None
    assert bool(first.any())
