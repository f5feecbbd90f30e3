"""loss-free against a float64 transcription by loops: choice, weights, losses, gradients, and the bias over steps."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from pointsman import MoE, Router, RoutingContext, build_router, freeze, set_top_k, step_end
from pointsman.routers.papers.loss_free import keep_groups
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


def scores_of(z: Tensor, gate: str) -> Tensor:
    if gate == "sigmoid":
        return 1 / (1 + torch.exp(-z))
    return softmax(z) if gate == "softmax" else torch.sqrt(torch.log(1 + torch.exp(z)))


def chosen(c: list[float], k: int, groups: int = 1, kept: int = 1, score: str = "top2") -> list[int]:
    """The k best of c in the best groups; more groups are kept where k experts need them."""
    width = len(c) // groups
    parts = [sorted(c[g * width : (g + 1) * width], reverse=True) for g in range(groups)]
    rank = [part[0] if score == "max" else sum(part[:2]) for part in parts]
    allowed = ranked(rank, max(kept, math.ceil(k / width)))
    return ranked([value if i // width in allowed else -math.inf for i, value in enumerate(c)], k)


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, gate: str, **options: object) -> Expected:
    scale, on_logits = float(options.pop("scale", 1.0)), options.pop("on_logits", False)
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    sequences: list[tuple[list[Tensor], list[list[int]]]] = []
    for rows, reals in zip(hidden, mask, strict=True):
        probs: list[Tensor] = []
        counted: list[list[int]] = []
        for row, real in zip(rows, reals, strict=True):
            z = torch.stack([(weight * row).sum() for weight in router.score.weight])
            s = scores_of(z, gate)
            ranks = z if on_logits else s
            c = [one + other for one, other in zip(ranks.tolist(), router.select.bias.tolist(), strict=True)]
            best = chosen(c, k, **options) if real else []
            total = sum(s[i] for i in best)
            experts.append(best)
            weights.append([s[i] / total * scale for i in best])
            if real:
                probs.append(s / s.sum())
                counted.append(ranked(s, k))  # without bias and groups
        sequences.append((probs, counted))
    losses = {}
    if router.balance:
        losses["balance"] = router.balance * sum(balance_loss(*one) for one in sequences) / len(sequences)
    return Expected(experts, weights, losses)


@pytest.mark.filterwarnings("ignore:.*the router gets no gradient")
@pytest.mark.parametrize("k", [1, 2, 4, EXPERTS])
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("gate=sigmoid:balance=0.1:balance_scope=sequence:balance_on=scores", {}),
        ("gate=softmax:scale=2.5", {"scale": 2.5}),
        ("gate=sigmoid:biased=logits", {"on_logits": True}),
        ("gate=softmax:biased=logits:groups=2:kept=1", {"on_logits": True, "groups": 2, "kept": 1}),
        ("gate=sqrtsoftplus:update=quantile", {}),
        ("gate=sigmoid:groups=3:kept=2:balance=0.1:balance_scope=sequence:balance_on=scores", {"groups": 3, "kept": 2}),
        ("gate=sqrtsoftplus:groups=2:kept=1:group_score=max", {"groups": 2, "kept": 1, "score": "max"}),
    ],
)
def test_the_transcription(spec: str, options: dict[str, object], k: int) -> None:
    for seed in range(3):
        router = router_for(f"loss-free:{spec}", k, seed)
        router.select.bias.normal_()
        hidden, mask = inputs(seed)
        hidden.requires_grad_()
        gate = spec.partition(":")[0].removeprefix("gate=")
        expected = transcription(router, hidden, mask, k, gate, **options)
        compare(router, hidden, mask, expected, route(router, hidden, mask))


def test_weights_do_not_see_the_bias() -> None:
    """By hand: s = (.60 .55 .50 .10), b = (0 -.1 .1 .2), k = 2: c = (.60 .45 .60 .30), a tie."""
    router, scaled = (
        build_router(spec, dim=4, num_experts=4).double() for spec in ("loss-free", "loss-free:scale=2.5")
    )
    for one in (router, scaled):
        one.select.bias.copy_(torch.tensor([0, -0.1, 0.1, 0.2]))
    scores = torch.tensor([0.60, 0.55, 0.50, 0.10], dtype=torch.float64)
    for one in (router, scaled):
        one.score.forward = lambda *_: torch.logit(scores).view(1, 1, 4)  # type: ignore[method-assign]
    routing = router(torch.zeros(1, 4, dtype=torch.float64))
    assert sorted(routing.experts[0].tolist()) == [0, 2]
    weights = dict(zip(routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True))
    assert weights == pytest.approx({0: 0.545455, 2: 0.454545}, abs=1e-6)
    assert sorted(scaled(torch.zeros(1, 4)).weights[0].tolist()) == pytest.approx([1.136364, 1.363636], abs=1e-6)


@pytest.mark.parametrize(
    ("scores", "groups", "kept", "k", "score", "wanted"),
    [
        ([0.9, 0.1, 0.6, 0.5, 0.7, 0.2, 0.3, 0.3], 4, 2, 2, "max", [0, 4]),
        ([0.9, 0.1, 0.6, 0.5, 0.7, 0.2, 0.3, 0.3], 4, 2, 2, "top2", [0, 2]),
        ([-0.1, -0.2, -0.9, -0.7], 2, 1, 2, "top2", [0, 1]),  # masked by 0 instead of -inf it would be 2 and 3
        ([0.9, 0.1, 0.6, 0.5], 2, 1, 4, "top2", [0, 2, 3, 1]),  # four experts need both groups
    ],
)
def test_groups_by_hand(scores: list[float], groups: int, kept: int, k: int, score: str, wanted: list[int]) -> None:
    choice = keep_groups(torch.tensor([scores]), groups, kept, k, score)
    assert ranked(choice[0], k) == wanted == chosen(scores, k, groups, kept, score)


def moved(spec: str, counts: list[int], steps: int = 1) -> Tensor:
    """The bias after steps with these counts."""
    select = build_router(f"loss-free:{spec}", dim=4, num_experts=len(counts)).double().select
    for _ in range(steps):
        select.gather({"counts": torch.tensor(counts)})
        select.step_end()
        select.sums.clear()
    return select.bias


def test_updates_by_hand() -> None:
    """Counts (5 1 1 1), so that the mean is 2."""
    counts = [5, 1, 1, 1]
    close = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(moved("update=sign", counts), torch.tensor([-1e-3, 1e-3, 1e-3, 1e-3]).double(), **close)
    centred = moved("update=sign:centre=true", counts)
    torch.testing.assert_close(centred, torch.tensor([-1.5e-3, 5e-4, 5e-4, 5e-4]).double(), **close)
    once = torch.tensor([-0.000329372, 0.000109791, 0.000109791, 0.000109791]).double()
    torch.testing.assert_close(moved("update=smebu", counts), once, **close)
    torch.testing.assert_close(moved("update=smebu", counts, steps=2), 2.5 * once, rtol=0, atol=3e-9)  # m = 3/4 D
    assert not moved("update=sign", [2, 2, 2, 2]).any()
    assert not moved("update=smebu", [0, 0, 0, 0]).any()


@pytest.mark.parametrize("bins", [0, 1000])
def test_the_quantile_by_hand(bins: int) -> None:
    """s = [[.80 .30] [.70 .60] [.50 .45] [.90 .20]], k = 1: margins of expert 0 .50 .10 .05 .70, of expert 1 all 0."""
    router = build_router(f"loss-free:update=quantile:bins={bins}:renormalize=false", dim=2, num_experts=2, top_k=1)
    layer = MoE(2, 3, 2, router=router.double()).double()
    scores = torch.tensor([[0.80, 0.30], [0.70, 0.60], [0.50, 0.45], [0.90, 0.20]], dtype=torch.float64)
    logits = torch.logit(scores).requires_grad_()
    for part in (logits[:1], logits[1:]):
        router.score.forward = lambda *_, part=part: part[None]  # type: ignore[method-assign]
        layer(torch.zeros(len(part), 2, dtype=torch.float64)).sum().backward()
    step_end(layer)
    assert router.select.bias.tolist() == pytest.approx([-0.05, 0.05], abs=1e-9 if not bins else 1.1e-3)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("update", ["sign", "smebu", "quantile:bins=0", "quantile"])
def test_the_bias_over_steps_however_a_batch_is_divided(update: str, micro_batches: int) -> None:
    k, rate = 2, 0.05
    bias, momentum = [0.0] * EXPERTS, [0.0] * EXPERTS
    given = "" if update.startswith("quantile") else f":rate={rate}"  # quantile has none
    router = router_for(f"loss-free:update={update}{given}", k)
    layer = MoE(5, 3, EXPERTS, router=router).double()
    for step in range(4):
        hidden, mask = inputs(step)
        margins: list[list[float]] = [[] for _ in range(EXPERTS)]
        counts = [0] * EXPERTS
        for row, real in zip(hidden.reshape(-1, 5), mask.reshape(-1), strict=True):
            s = torch.sigmoid(router.score.weight @ row).tolist()
            c = [one + other for one, other in zip(s, bias, strict=True)]
            for i in ranked(c, k) if real else ():
                counts[i] += 1
            for i in range(EXPERTS) if real else ():
                margins[i].append(s[i] - sorted(c, reverse=True)[k])
        mean = sum(counts) / EXPERTS
        if update == "sign":
            bias = [b + rate * ((n < mean) - (n > mean)) for b, n in zip(bias, counts, strict=True)]
        elif update == "smebu":
            change = [rate * math.tanh(2 * (mean - n) / mean) for n in counts]
            momentum = [(m + d - sum(change) / EXPERTS) / 2 for m, d in zip(momentum, change, strict=True)]
            bias = [b + m for b, m in zip(bias, momentum, strict=True)]
        else:
            q = len(margins[0]) * k // EXPERTS
            found = [-sorted(column, reverse=True)[q] for column in margins]
            bias = [value - sum(found) / EXPERTS for value in found]
        for part, real in zip(hidden.split([1] * (micro_batches - 1) + [4 - micro_batches]),
                              mask.split([1] * (micro_batches - 1) + [4 - micro_batches]), strict=True):  # fmt: skip
            layer(part, RoutingContext(padding_mask=real)).sum().backward()
            layer.eval()
            with torch.no_grad():
                layer(part)  # evaluation in between changes nothing
            layer.train()
        before = router.select.bias.clone()
        assert not step or torch.equal(before, router.select.bias)
        step_end(layer)
        # a histogram is right to half of one of its parts; the transcription goes on from it
        tolerance = 1e-12 if update != "quantile" else 2e-3
        torch.testing.assert_close(router.select.bias, torch.tensor(bias, dtype=torch.float64), rtol=0, atol=tolerance)
        if update == "quantile":
            bias = router.select.bias.tolist()


def test_state_resumes_stays_float32_and_freezes() -> None:
    layer = MoE(5, 3, EXPERTS, router="loss-free:update=smebu:rate=0.1")
    other = MoE(5, 3, EXPERTS, router="loss-free:update=smebu:rate=0.1")
    hidden = torch.randn(2, 9, 5)

    def step(one: MoE) -> Tensor:
        one(hidden).sum().backward()
        step_end(one)
        return one.router.select.bias

    step(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(step(layer), step(other))
    before = layer.router.select.bias.clone()
    set_top_k(layer, 3)
    assert torch.equal(layer.router.select.bias, before)
    freeze(layer, "router")
    hidden.requires_grad_()
    assert torch.equal(step(layer), before)
    assert layer.bfloat16().router.select.bias.dtype == torch.float32


@pytest.mark.parametrize("update", ["sign", "smebu", "quantile", "quantile:bins=0"])
def test_a_step_of_padding_alone_moves_nothing(update: str) -> None:
    layer = MoE(5, 3, EXPERTS, router=f"loss-free:update={update}")
    hidden = torch.randn(2, 4, 5, requires_grad=True)
    states = []
    for mask in (None, torch.zeros(2, 4, dtype=torch.bool)):
        layer(hidden, RoutingContext(padding_mask=mask)).sum().backward()
        step_end(layer)
        states.append([buffer.clone() for buffer in layer.router.select.buffers()])
    assert states[0][0].any()
    for before, after in zip(*states, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("bins", [0, 1000])
def test_a_micro_batch_at_k_of_all_experts_moves_no_quantile(bins: int) -> None:
    hidden, biases = torch.randn(2, 9, 5), []
    for every in (False, True):
        torch.manual_seed(0)
        layer = MoE(5, 3, EXPERTS, router=f"loss-free:update=quantile:bins={bins}")
        layer(hidden).sum().backward()
        if every:
            with set_top_k(layer, EXPERTS):
                layer(hidden).sum().backward()
        step_end(layer)
        biases.append(layer.router.select.bias)
    assert biases[0].any()
    assert torch.equal(*biases)


def test_the_bias_balances() -> None:
    layer = MoE(5, 3, EXPERTS, router="loss-free:rate=0.01").requires_grad_(False)
    with torch.no_grad():
        layer.router.score.weight.normal_()
    hidden = torch.randn(16, 16, 5, requires_grad=True)
    shares = []
    for _ in itertools.repeat(None, 100):
        counts = torch.bincount(layer.router(hidden).experts.reshape(-1), minlength=EXPERTS)
        shares.append(float(counts.max() / counts.float().mean()))
        layer(hidden).sum().backward()
        layer.router._frozen = False
        step_end(layer)
    assert shares[-1] < 1.1 < shares[0]


def test_longcat_holds_the_mean_number_of_real_experts() -> None:
    """b_i += u (K/(k E) - T_i/(k T)) for real experts, nothing for virtual ones; at its fixed point K real ones."""
    spec = "loss-free:gate=softmax:nulls=3:kind=copy:renormalize=false:update=share:rate=0.5:real=1.25"
    layer = MoE(5, 4, EXPERTS, router=spec, top_k=3).double()
    bias = torch.zeros(EXPERTS + 3, dtype=torch.float64)
    for step in range(3):
        counts, tokens = [0] * (EXPERTS + 3), 0
        for part in range(2):
            hidden, mask = inputs(10 * step + part)
            output, routing = layer(hidden, RoutingContext(padding_mask=mask), return_routing=True)
            output.sum().backward()
            tokens += int(mask.sum())
            for row in routing.chosen[mask.flatten()].tolist():
                for expert in row:
                    counts[expert] += 1
        for i in range(EXPERTS):
            bias[i] += 0.5 * (1.25 / (3 * EXPERTS) - counts[i] / (3 * tokens))
        step_end(layer)
        torch.testing.assert_close(layer.router.select.bias.double(), bias, rtol=0, atol=1e-6)
    layer.router.select.update.rate, held = 0.02, []
    for step in range(300):
        hidden = torch.randn(4, 32, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        output, routing = layer(hidden, return_routing=True)
        output.sum().backward()
        step_end(layer)
        held.append(float((routing.experts >= 0).sum() / 128))
    assert sum(held[-100:]) / 100 == pytest.approx(1.25, abs=0.05)
