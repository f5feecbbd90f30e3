"""ReMoE against a float64 transcription, its worked example, and the path of its penalty."""

import pytest
import torch
from torch import Tensor

from pointsman import MoE, Router, step_end
from tests.library.routers.oracle import EXPERTS, Expected, compare, inputs, ranked, route, router_for


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, balanced: bool) -> Expected:
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    gates = []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        r = torch.clamp(router.score.weight @ h, min=0)
        chosen = [e for e in ranked(r, k) if r[e] > 0] if real else []
        experts.append(chosen)
        weights.append([r[e] for e in chosen])
        if real:
            gates.append(r)
    penalty = torch.zeros((), dtype=torch.float64)
    for e in range(EXPERTS):
        active = sum(float(r[e].detach()) > 0 for r in gates)
        f = EXPERTS / (2 * len(gates)) * active if balanced else 1.0
        penalty = penalty + f * sum(r[e] for r in gates) / len(gates)
    return Expected(experts, weights, {"sparsity": float(router.select.penalty) * penalty})


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_transcription(k: int, balanced: bool) -> None:
    router = router_for(f"relu:balanced={str(balanced).lower()}", k=2)
    router.top_k = k
    router.select.penalty.fill_(0.3)
    hidden, mask = inputs()
    hidden.requires_grad_()
    compare(router, hidden, mask, transcription(router, hidden, mask, k, balanced), route(router, hidden, mask))


def example(balanced: str) -> Router:
    """R = [[.5 0 .2 0] [0 .4 0 0] [.3 0 0 0]] for the unit vectors."""
    router = router_for(f"relu:balanced={balanced}", k=1, experts=4)
    with torch.no_grad():
        router.score.weight.zero_()
        router.score.weight[:, :3] = torch.tensor([[0.5, 0, 0.3], [0, 0.4, 0], [0.2, 0, 0], [-1, 0, 0]])
    router.select.penalty.fill_(1.0)
    return router


@pytest.mark.parametrize(("balanced", "value"), [("true", 0.9777777777777777), ("false", 1.4 / 3)])
def test_worked_example(balanced: str, value: float) -> None:
    routing = route(example(balanced), torch.eye(3, 5, dtype=torch.float64)[None])
    assert float(routing.losses["sparsity"].detach()) == pytest.approx(value)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_penalty_grows_while_too_many_experts_are_active(parts: int) -> None:
    layer = MoE(5, 4, 4, router="relu", top_k=1, attach_losses=True).double()
    layer.router.score.load_state_dict(example("true").score.state_dict())
    hidden = torch.eye(3, 5, dtype=torch.float64)[None]
    before = float(layer.router.select.penalty)
    for part in hidden.chunk(parts, 1):
        layer(part).sum().backward()
    step_end(layer)  # 4 active gates of 12: S = 0.667 < 0.75
    assert float(layer.router.select.penalty) == pytest.approx(1.2 * before)
    with torch.no_grad():
        layer.router.score.weight.neg_()
    step_end(layer)
    layer(hidden).sum().backward()
    step_end(layer)  # one active gate: S = 0.917
    assert float(layer.router.select.penalty) == pytest.approx(before)
    layer.eval()
    layer(hidden)
    step_end(layer)
    assert float(layer.router.select.penalty) == pytest.approx(before), "evaluation changes nothing"


def test_a_penalty_that_has_shrunk_to_nothing_grows_again() -> None:
    router = router_for("relu", k=3).float()
    for active, least, most in ((1, 0, 1e-37), (9, 1e-30, 1)):
        for _ in range(600 if active == 1 else 120):
            router.select.sums = {"active": torch.tensor(active), "tokens": torch.tensor(1)}
            router.select.step_end()
        assert least < float(router.select.penalty) < most


def test_a_token_may_have_no_expert() -> None:
    layer = MoE(5, 4, 4, router="relu", bias=False, attach_losses=True)
    with torch.no_grad():
        layer.router.score.weight.fill_(-1)
    assert not layer(torch.ones(1, 3, 5)).any()


def test_under_a_mixer_the_penalty_follows_the_gates_that_it_moves() -> None:
    router = router_for("relu+similarity")
    routing = route(router, inputs()[0])
    counted = routing.statistics["select.active"]
    assert counted == (routing.unmixed > 0).sum() < (routing.probs > 0).sum()
