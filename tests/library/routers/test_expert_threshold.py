"""Expert Threshold against a float64 transcription over steps, its worked example, and the mean number of experts."""

import pytest
import torch

from pointsman import MoE, RoutingContext, build_router, set_top_k, step_end
from tests.library.routers.oracle import EXPERTS, Expected, compare, inputs, ranked, route, router_for

BINS = 50


def threshold(histogram: list[float], share: float) -> float:
    """Where a share of the histogram's mass over (0, 1) lies above, uniform inside a bin."""
    above = 0.0
    for place in reversed(range(len(histogram))):
        if above + histogram[place] > share + 1e-12:
            return (place + 1 - (share - above) / histogram[place]) / len(histogram)
        above += histogram[place]
    return 0.0


@pytest.mark.parametrize("parts", [1, 3])
def test_transcription_over_steps(parts: int) -> None:
    layer = MoE(5, 4, EXPERTS, router=router_for(f"expert-threshold:bins={BINS}:decay=0.7")).double()
    other = MoE(5, 4, EXPERTS, router=f"expert-threshold:bins={BINS}:decay=0.7").double()
    histogram = [[0.0] * BINS for _ in range(EXPERTS)]
    for step in range(4):
        hidden, mask = inputs(step)
        hidden.requires_grad_()
        scores = [1 / (1 + torch.exp(-(layer.router.score.weight @ h))) for h in hidden.flatten(0, 1)]
        for k in (1, 2, 5, 6):
            border = [threshold(row, k / EXPERTS) for row in histogram]
            experts = []
            for s, real in zip(scores, mask.flatten(), strict=True):
                chosen = (
                    sorted(ranked(s, k))
                    if not step
                    else [e for e in range(EXPERTS) if float(s[e].detach()) > border[e]]
                )
                experts.append((list(range(EXPERTS)) if k == EXPERTS else chosen) if real else [])
            weights = [[s[e] for e in row] for s, row in zip(scores, experts, strict=True)]
            with set_top_k(layer, k):
                routing = route(layer.router, hidden, mask)
            compare(layer.router, hidden, mask, Expected(experts, weights), routing)
            scores = [1 / (1 + torch.exp(-(layer.router.score.weight @ h))) for h in hidden.flatten(0, 1)]
        for part, real in zip(hidden.detach().chunk(parts), mask.chunk(parts), strict=True):
            layer(part, RoutingContext(padding_mask=real)).sum().backward()
            layer.eval()(part)  # evaluation changes nothing
            layer.train()
        there = [s for s, real in zip(scores, mask.flatten(), strict=True) if real]
        for e in range(EXPERTS):
            counts = [0.0] * BINS
            for s in there:
                counts[int(float(s[e].detach()) * BINS)] += 1 / len(there)
            rate = 0.3 if step else 1.0
            histogram[e] = [(1 - rate) * old + rate * new for old, new in zip(histogram[e], counts, strict=True)]
        if step == 3:
            other.load_state_dict(layer.state_dict())
            for part, real in zip(hidden.detach().chunk(parts), mask.chunk(parts), strict=True):
                other(part, RoutingContext(padding_mask=real)).sum().backward()
            step_end(other)
        step_end(layer)
        found = torch.tensor(histogram, dtype=torch.float64)
        torch.testing.assert_close(layer.router.select.histogram, found, rtol=0, atol=1e-12)
    assert torch.equal(layer.router.select.histogram, other.router.select.histogram)


def test_the_worked_example() -> None:
    """Columns (.9 .8 .3 .2) and (.1 .4 .7 .6), k 1: the third largest are .3 and .4, so that two tokens pass."""
    router = build_router("expert-threshold", dim=2, num_experts=2, top_k=1).double()
    columns = torch.tensor([[0.9, 0.8, 0.3, 0.2], [0.1, 0.4, 0.7, 0.6]], dtype=torch.float64)
    layer = MoE(2, 2, 2, router=router).double()
    router.score.forward = lambda *_: torch.logit(columns.T)[None].requires_grad_()  # type: ignore[method-assign]
    hidden = torch.zeros(1, 4, 2, dtype=torch.float64)
    layer(hidden).sum().backward()
    step_end(layer)
    assert router.select.thresholds(1).tolist() == pytest.approx([0.3, 0.4], abs=2e-3)
    assert router(hidden).experts.tolist() == [[0, -1], [0, -1], [-1, 1], [-1, 1]]


def test_a_stationary_stream_has_k_experts_on_average() -> None:
    torch.manual_seed(0)
    layer = MoE(16, 4, 8, router="expert-threshold:decay=0.9", top_k=2)
    for _ in range(20):
        layer(torch.randn(1, 500, 16, requires_grad=True)).sum().backward()
        step_end(layer)
    layer.eval()
    for k in (1, 2, 5):
        set_top_k(layer, k)
        loads = (layer.router(torch.randn(1, 4000, 16)).experts >= 0).float().mean(0)
        # a share p of 4,000 tokens, and thresholds that come from about 5,000: five standard errors
        error = 5 * (k / 8 * (1 - k / 8) * (1 / 4000 + 1 / 5000)) ** 0.5
        assert (loads - k / 8).abs().max() < error
    set_top_k(layer, 8)
    assert (layer.router(torch.randn(1, 9, 16)).experts >= 0).all()


def test_extreme_logits_padding_alone_and_no_tokens() -> None:
    layer = MoE(5, 4, EXPERTS, router="expert-threshold")
    with torch.no_grad():
        layer.router.score.weight.mul_(1e6)
    for shape, mask in (((2, 4, 5), None), ((2, 4, 5), torch.zeros(2, 4, dtype=torch.bool)), ((2, 0, 5), None)):
        layer(torch.randn(shape, requires_grad=True), RoutingContext(padding_mask=mask)).sum().backward()
        step_end(layer)
        assert torch.isfinite(layer.router.select.histogram).all()
    assert int(layer.router.select.steps) == 1, "a step without tokens moves nothing"
    assert layer.bfloat16().router.select.histogram.dtype == torch.float32
