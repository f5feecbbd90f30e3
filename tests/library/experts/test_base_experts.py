"""BASE-style experts: three residual sublayers as one expert, against the equations in float64."""

import pytest
import torch
from torch import Tensor

import pointsman
from pointsman import MoE, RoutingContext
from pointsman.experts.modules import BaseExperts

DIM, HIDDEN, EXPERTS, TOKENS = 6, 10, 4, 9


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def layer(top_k: int, router: str = "xmoe", **options: object) -> MoE:
    torch.manual_seed(0)
    built = MoE(DIM, HIDDEN, EXPERTS, router=router, top_k=top_k, experts="base", **options).double()
    with torch.no_grad():
        for index, parameter in enumerate(built.experts.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=index) / 2)
    return built


def one_expert(experts: BaseExperts, e: int, h: Tensor) -> Tensor:
    """x <- x + ff2(relu(ff1(LN(x)))), three times."""
    x = h
    for norm, sublayer in zip(experts.norms, experts.sublayers, strict=True):
        centred = x - x.mean()
        ln = centred / (centred.square().mean() + 1e-5).sqrt() * norm.weight[e] + norm.bias[e]
        x = x + sublayer.w_out[e] @ torch.relu(sublayer.w_in[e] @ ln + sublayer.b_in[e]) + sublayer.b_out[e]
    return x


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_equals_the_paper_forward_and_gradient(top_k: int) -> None:
    """h' = h + sum of g (E(h) - h) over the chosen experts."""
    moe = layer(top_k)
    hidden = draw(TOKENS, DIM).requires_grad_()
    output, routing = moe(hidden, return_routing=True)
    rows = []
    for t in range(TOKENS):
        h, change = hidden[t], 0
        for e, weight in zip(routing.experts[t].tolist(), routing.weights[t], strict=True):
            change = change + weight * (one_expert(moe.experts, e, h) - h)
        rows.append(h + change)
    expected = torch.stack(rows)
    torch.testing.assert_close(output, expected)
    leaves = [hidden, *moe.parameters()]
    upper = draw(TOKENS, DIM, seed=5)
    ours, theirs = (
        torch.autograd.grad(side, leaves, upper, retain_graph=True, materialize_grads=True)
        for side in (output, expected)
    )
    for got, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, reference)
    assert all(gradient.abs().sum() > 0 for gradient in ours[1:])


def test_starts_as_the_identity_and_trains() -> None:
    moe = MoE(DIM, HIDDEN, EXPERTS, router="xmoe", top_k=1, experts="base")
    hidden = torch.randn(2, 5, DIM)
    assert torch.equal(moe(hidden), hidden)
    optimizer = torch.optim.Adam(moe.parameters(), lr=0.01)
    pointsman.track_steps(moe, optimizer)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = pointsman.add_losses((moe(hidden) - hidden.flip(-1)).square().mean(), moe)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_padding_passes_through() -> None:
    moe = layer(2)
    hidden, mask = draw(2, 5, DIM), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2:] = False
    output = moe(hidden, RoutingContext(padding_mask=mask))
    assert torch.equal(output[~mask], hidden[~mask])
    assert (output[mask] != hidden[mask]).any()


def test_fast_path_is_the_float64_one() -> None:
    moe = layer(2)
    hidden = draw(300, DIM)
    expected = moe(hidden)
    torch.testing.assert_close(moe.float()(hidden.float()).double(), expected, atol=1e-4, rtol=1e-4)


def test_frozen_in_fine_tuning_the_balance_loss_still_reaches_the_hidden_states() -> None:
    moe = layer(1)
    pointsman.freeze(moe, "router", "experts")
    assert not any(parameter.requires_grad for parameter in moe.parameters())
    hidden = draw(2, 5, DIM).requires_grad_()
    pointsman.add_losses((moe(hidden) * 0).sum(), moe).backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_unknown_experts_get_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean 'base'"):
        MoE(DIM, HIDDEN, EXPERTS, experts="bases")
