"""Routing of sequences and tasks against a float64 transcription, and decoding a token at a time."""

import pytest
import torch
from torch import Tensor

from pointsman import RoutingContext, build_router
from tests.library.routers.oracle import (
    DIM,
    EXPERTS,
    Expected,
    balance_loss,
    compare,
    inputs,
    ranked,
    router_for,
    softmax,
)


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("over", ["sequence", "task"])
def test_transcription(over: str, k: int) -> None:
    router = router_for(f"pooled:over={over}:balance=0.1", k)
    router.eval()  # at k = 1 training warns
    hidden, mask = inputs()
    mask[1, 0] = False  # the first real token of this sequence is its second
    hidden.requires_grad_()
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    probs, counted = [], []
    for rows, reals in zip(hidden, mask, strict=True):
        kept = [router.score.weight @ row + router.score.bias for row, real in zip(rows, reals, strict=True) if real]
        p = softmax(sum(kept) / len(kept) if over == "sequence" else kept[0])
        best = ranked(p, k)
        for real in reals.tolist():
            experts.append(best if real else [])
            weights.append([p[e] / sum(p[i] for i in best) for e in best] if real else [])
            probs += [p] * real
            counted += [best] * real
    expected = Expected(experts, weights, {"balance": 0.1 * balance_loss(probs, counted)})
    compare(router, hidden, mask, expected, router(hidden, RoutingContext(padding_mask=mask)))


def test_a_task_is_carried_past_padding_and_empty_segments() -> None:
    torch.manual_seed(0)
    router = build_router("pooled:over=task", dim=DIM, num_experts=EXPERTS).eval()
    hidden = torch.randn(2, 6, DIM)
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    whole = router(hidden, RoutingContext(padding_mask=mask)).probs.view(2, 6, -1)
    past = None
    for start, stop in ((0, 2), (2, 2), (2, 5), (5, 6)):
        part = router(hidden[:, start:stop], RoutingContext(padding_mask=mask[:, start:stop], past=past))
        real = mask[:, start:stop]
        torch.testing.assert_close(part.probs.view(2, stop - start, EXPERTS)[real], whole[:, start:stop][real])
        past = part.carry


def test_a_loop_of_segments_trains_each_with_its_own_graph() -> None:
    router, past = build_router("pooled:over=task", dim=DIM, num_experts=EXPERTS), None
    for _ in range(2):
        routing = router(torch.randn(2, 3, DIM), RoutingContext(past=past))
        past = routing.carry
        routing.weights.square().sum().backward()


def test_a_task_of_other_sequences_is_refused() -> None:
    router = build_router("pooled:over=task", dim=DIM, num_experts=EXPERTS)
    past = router(torch.randn(1, 3, DIM)).carry
    with pytest.raises(ValueError, match=r"RoutingContext.past is of 1 sequences, the input of 3"):
        router(torch.randn(3, 2, DIM), RoutingContext(past=past))
