"""gshard against a float64 transcription by loops: which seconds are kept, weights, the loss of first choices."""

import pytest
import torch
from torch import Tensor

from pointsman import Router, build_router, set_top_k
from tests.library.routers.oracle import (
    EXPERTS,
    Expected,
    balance_loss,
    compare,
    inputs,
    ranked,
    route,
    router_for,
    softmax,
)


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, rule: str) -> Expected:
    """Draws in the documented order: one number for each token and choice after the first."""
    torch.manual_seed(3)
    rows = hidden.flatten(0, 1)
    uniform = torch.rand(len(rows), k - 1, dtype=torch.float64).tolist() if rule in ("random", "threshold") else None
    gumbel = -torch.empty(len(rows), EXPERTS, dtype=torch.float64).exponential_().log() if rule == "sampled" else None
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    probs: list[Tensor] = []
    firsts: list[list[int]] = []
    for token, (h, real) in enumerate(zip(rows, mask.reshape(-1), strict=True)):
        if not real:
            experts.append([])
            weights.append([])
            continue
        p = softmax(torch.stack([(row * h).sum() for row in router.score.weight]))
        best = ranked(p, k)
        if gumbel is not None:
            noisy = p.detach().log() + gumbel[token]
            best = [best[0], *[i for i in ranked(noisy, EXPERTS) if i != best[0]][: k - 1]]
        g = [p[i] / (sum(p[j] for j in best)) for i in best]
        kept = [0]
        for j in range(1, k):
            chance = {"random": k, "threshold": 5.0}.get(rule, 0) * g[j].item()
            if uniform is None or chance > uniform[token][j - 1]:
                kept.append(j)
        experts.append([best[j] for j in kept])
        weights.append([g[j] for j in kept])
        probs.append(p)
        firsts.append(best[:1])
    return Expected(experts, weights, {"balance": 0.01 * balance_loss(probs, firsts)})


@pytest.mark.filterwarnings("ignore:.*the router gets no gradient")
@pytest.mark.parametrize("k", [1, 2, 3, EXPERTS])
@pytest.mark.parametrize("rule", ["random", "threshold", "sampled", "all"])
@pytest.mark.parametrize("training", [True, False])
def test_the_transcription(training: bool, rule: str, k: int) -> None:
    for seed in range(3):
        spec = f"gshard:second={rule}" if training else f"gshard:second_eval={rule}"
        router = router_for(spec, k, seed).train(training)
        hidden, mask = inputs(seed)
        hidden.requires_grad_()
        compare(router, hidden, mask, transcription(router, hidden, mask, k, rule), route(router, hidden, mask))


def with_probs(spec: str, probs: list[float]) -> Router:
    router = build_router(spec, dim=3, num_experts=len(probs)).double()
    logits = torch.tensor(probs, dtype=torch.float64).log()
    router.score.forward = lambda hidden, _: logits.expand(*hidden.shape[:2], -1)  # type: ignore[method-assign]
    return router


@pytest.mark.parametrize(("rule", "chance"), [("random", 0.75), ("threshold", 1.0)])
def test_how_often_the_second_is_kept(rule: str, chance: float) -> None:
    """p = (.5 .3 .2): g = (.625 .375): kept with probability .75 (2 g2 > U), with 1 by g2 / 0.2."""
    tokens = 20_000
    routing = route(with_probs(f"gshard:second={rule}", [0.5, 0.3, 0.2]), torch.zeros(1, tokens, 3))
    torch.testing.assert_close(routing.weights[0, 0].item(), 0.625, rtol=1e-8, atol=0)
    share = (routing.experts[:, 1] == 1).double().mean().item()
    assert abs(share - chance) <= 4 * (chance * (1 - chance) / tokens) ** 0.5
    kept = routing.weights[:, 1][routing.experts[:, 1] == 1]
    torch.testing.assert_close(kept, torch.full_like(kept, 0.375))
    # the output's expectation: w1 E1 + min(1, 2 g2) g2 E2
    mean = routing.weights[:, 1].mean().item()
    assert abs(mean - chance * 0.375) <= 1e-9 + 4 * 0.375 * (chance * (1 - chance) / tokens) ** 0.5


def test_the_second_is_drawn_by_its_probability() -> None:
    tokens = 20_000
    routing = route(with_probs("gshard:second=sampled", [0.5, 0.3, 0.2]), torch.zeros(1, tokens, 3))
    share = (routing.experts[:, 1] == 1).double().mean().item()
    assert abs(share - 0.6) <= 4 * (0.6 * 0.4 / tokens) ** 0.5


def test_a_drawn_one_is_another_also_where_probabilities_are_0() -> None:
    routing = route(with_probs("gshard:second=sampled", [1.0, 0.0, 0.0, 0.0]), torch.zeros(1, 200, 3))
    assert routing.probs[0].tolist() == [1, 0, 0, 0]
    assert routing.experts[:, 1].unique().tolist() == [1, 2, 3]


def test_a_drop_by_capacity_leaves_the_other_weight() -> None:
    """DeepSpeed would renormalise after it; the paper does not."""
    router = with_probs("gshard:second=all:capacity=0.75", [0.5, 0.3, 0.2])
    routing = route(router, torch.zeros(1, 4, 3))
    assert routing.experts.tolist() == [[0, 1], [0, 1], [-1, -1], [-1, -1]]
    torch.testing.assert_close(routing.weights[1].tolist(), [0.625, 0.375], rtol=1e-8, atol=0)


def test_every_expert_at_k_of_all_in_evaluation() -> None:
    router = router_for("gshard").eval()
    set_top_k(router, EXPERTS)
    assert (route(router, inputs()[0]).experts.sort(-1).values == torch.arange(EXPERTS)).all()
    assert (router.stochastic, router.training_stochastic, router.ragged) == (False, True, False)
    assert build_router("gshard:second_eval=random", dim=3, num_experts=4).ragged


@pytest.mark.parametrize("k", [2, 3])
def test_a_replayed_choice_has_the_weights_that_it_had(k: int) -> None:
    """Those that were dropped are the best of all that were not kept."""
    router, hidden = router_for("gshard", k), inputs()[0]
    routing = router(hidden)
    assert (routing.experts < 0).any()
    router.replayed = routing.experts
    torch.testing.assert_close(router(hidden).weights, routing.weights)
