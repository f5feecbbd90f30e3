"""noisy-topk against a float64 transcription by loops: noisy choice, weights, both losses, gradients."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import Router, build_router, materialize, set_top_k
from pointsman.routers.frame.stage_values import LossInput
from pointsman.routers.papers.noisy_topk import load_loss, squared_variation
from pointsman.routing import RoutingContext
from tests.library.routers.oracle import EXPERTS, Expected, compare, inputs, ranked, route, router_for, softmax


def phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def variation(values: list[Tensor]) -> Tensor:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, noise: Tensor | None) -> Expected:
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    zero = hidden.new_zeros(())
    importance, load = [zero] * EXPERTS, [zero] * EXPERTS
    score = router.score
    for token, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.reshape(-1), strict=True)):
        if not real:
            experts.append([])
            weights.append([])
            continue
        z = torch.stack([(row * h).sum() for row in score.weight])
        r = torch.stack([torch.log(1 + torch.exp((row * h).sum())) for row in score.noise_weight]) + score.epsilon
        noisy = z if noise is None else z + r * noise.reshape(-1, EXPERTS)[token]
        best = ranked(noisy, k)
        experts.append(best)
        weights.append(list(softmax(torch.stack([noisy[i] for i in best]))))
        for i, weight in zip(best, weights[-1], strict=True):
            importance[i] = importance[i] + weight
        for i in range(EXPERTS) if k < EXPERTS else ():
            others = [j for j in ranked(noisy, EXPERTS) if j != i]
            load[i] = load[i] + phi((z[i] - noisy[others[k - 1]]) / r[i])
    losses = {"importance": 0.1 * variation(importance), "load": 0.2 * variation(load) if k < EXPERTS else zero}
    return Expected(experts, weights, losses)


@pytest.mark.filterwarnings("ignore:.*the router gets no gradient")
@pytest.mark.parametrize("k", [1, 2, 4, EXPERTS])
@pytest.mark.parametrize("training", [True, False])
def test_the_transcription(training: bool, k: int) -> None:
    for seed in range(3):
        router = router_for("noisy-topk:load=0.2:epsilon=0.01", k, seed).train(training)
        hidden, mask = inputs(seed)
        hidden.requires_grad_()
        routing = route(router, hidden, mask)
        torch.manual_seed(3)
        noise = torch.randn(*hidden.shape[:2], EXPERTS, dtype=torch.float64) if training else None
        compare(router, hidden, mask, transcription(router, hidden, mask, k, noise), routing)


def test_gradients_are_finite_where_the_noise_has_vanished() -> None:
    router = build_router("noisy-topk:init=normal", dim=8, num_experts=6)
    routing = router(1e4 * torch.randn(3, 9, 8))
    for gradient in torch.autograd.grad(routing.losses["load"], router.score.parameters()):
        assert torch.isfinite(gradient).all()


def test_the_load_by_hand() -> None:
    """k = 1, z = (1 .5 0), noisy (1.2 .3 .4), r = .5: theta = .4 inside, 1.2 outside: Phi(1.2), Phi(-1.4), Phi(-2.4).

    V-MoE's load has the threshold 1.2 for expert 0, too: Phi(-.4) = .344578.
    """
    noisy = torch.tensor([[1.2, 0.3, 0.4]], dtype=torch.float64)
    extra = {"clean": torch.tensor([[[1.0, 0.5, 0.0]]]).double(), "std": torch.full((1, 1, 3), 0.5).double()}
    given = LossInput(
        logits=noisy, unmixed=noisy, probs=noisy, choice=noisy, experts=torch.tensor([[0]]), weights=torch.ones(1, 1),
        extra=extra, mask=None, batch=1, length=1, context=RoutingContext(),
    )  # fmt: skip
    expected = torch.tensor([0.884930, 0.080757, 0.008198], dtype=torch.float64)
    torch.testing.assert_close(load_loss(given), squared_variation(expected), rtol=1e-5, atol=0)
    assert squared_variation(torch.tensor([1.0, 3.0])).item() == 0.25


def test_the_gradient_of_the_load_is_that_of_its_values() -> None:
    """Finite differences: the threshold is another expert's noisy logit, and moves with it."""
    router, (hidden, _) = router_for("noisy-topk:importance=0:load=1"), inputs()
    weight = router.score.weight
    (gradient,) = torch.autograd.grad(route(router, hidden).losses["load"], weight)
    for i, j in ((0, 0), (3, 2), (5, 4)):
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[i, j] += step
                values.append(route(router, hidden).losses["load"].item())
                weight[i, j] -= step
        assert gradient[i, j].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-6)


def test_it_starts_uniform_in_training() -> None:
    """W = W_n = 0: 3,000 tokens go to each of 6 experts equally often (chi-square, 5 degrees of freedom, 0.1 %)."""
    router = build_router("noisy-topk", dim=4, num_experts=6, top_k=2)
    assert not router.score.weight.any()
    assert not router.score.noise_weight.any()
    counts = torch.bincount(route(router, torch.randn(1, 3000, 4)).experts.reshape(-1), minlength=6)
    assert float(((counts - 1000.0) ** 2 / 1000).sum()) < 20.5
    assert build_router("noisy-topk:init=normal", dim=4, num_experts=6).score.weight.std() > 0.01


def test_in_evaluation_it_is_a_linear_router() -> None:
    router, (hidden, mask) = router_for("noisy-topk").eval(), inputs()
    set_top_k(router, 3)
    before = route(router, hidden, mask)
    materialize(router)
    assert router.spec == "smoe:bias=false"
    after = route(router, hidden, mask)
    assert torch.equal(before.experts, after.experts)
    torch.testing.assert_close(after.weights, before.weights, rtol=1e-12, atol=0.0)  # another layout, another last bit
    assert not after.losses


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1)])
@pytest.mark.parametrize("scale", [0.0, 1e6])
def test_few_tokens_and_extreme_logits_have_finite_losses(shape: tuple[int, int], scale: float) -> None:
    router = build_router("noisy-topk:init=normal", dim=5, num_experts=4)
    with torch.no_grad():
        router.score.weight.mul_(scale)
        router.score.noise_weight.mul_(scale)
    routing = route(router, torch.randn(*shape, 5))
    assert all(torch.isfinite(loss) for loss in routing.losses.values())
    sum(routing.losses.values()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in router.parameters())
