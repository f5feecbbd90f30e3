"""Virtual experts: routing and layer against a float64 transcription, the worked example, and what stays as it was."""

import pytest
import torch
from torch import Tensor

from pointsman import MoE, Router, RoutingContext, build_router, record_routing, step_end
from tests.library.routers.oracle import DIM, EXPERTS, Expected, compare, inputs, ranked, route, softmax

KINDS = {"zero": ["zero"] * 4, "copy": ["copy"] * 4, "constant": ["constant"] * 4}
KINDS["mixed"] = ["zero", "copy", "constant", "constant"]


def routed(router: Router, h: Tensor, k: int, kinds: list[str], renormalize: bool) -> dict[int, Tensor]:
    """Column -> weight of a token's choice among E experts and the virtual ones."""
    p = softmax(router.score.weight @ h + router.score.bias)
    chosen = ranked(p, k)
    there = [c for c in chosen if c < EXPERTS or kinds[c - EXPERTS] != "zero"]
    total = sum((p[c] for c in there), torch.zeros((), dtype=torch.float64)) if renormalize else 1.0
    return {c: (p[c] / total if c in there else p[c] * 0) for c in chosen}


@pytest.mark.parametrize(("renormalize", "eta"), [(True, 1.0), (False, 0.75)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_transcription(k: int, kind: str, renormalize: bool, eta: float) -> None:
    spec = f"smoe:nulls=4:kind={kind}:renormalize={str(renormalize).lower()}:balance=0.1:eta={eta}"
    torch.manual_seed(0)
    layer = MoE(DIM, 4, EXPERTS, router=spec, top_k=k).double()
    layer.eval()  # at k = 1 training warns
    for parameter in layer.parameters():
        parameter.data.normal_()
    hidden, mask = inputs()
    hidden.requires_grad_()
    flat, real = hidden.flatten(0, 1), mask.flatten()
    found = [
        routed(layer.router, h, k, KINDS[kind], renormalize) if there else {}
        for h, there in zip(flat, real, strict=True)
    ]
    with record_routing(layer) as records:
        output = layer(hidden, RoutingContext(padding_mask=mask)).flatten(0, 1)
    assert records[""].num_experts == EXPERTS
    routing = route(layer.router, hidden, mask)
    # the balance loss counts virtual experts; equal ones have their mean count
    counts = [sum(column in row for row in found) / sum(map(len, found)) for column in range(EXPERTS + 4)]
    if kind in ("zero", "copy"):
        counts[EXPERTS:] = [sum(counts[EXPERTS:]) / 4] * 4
    counts[EXPERTS:] = [eta * share for share in counts[EXPERTS:]]
    p = torch.stack([softmax(layer.router.score.weight @ h + layer.router.score.bias) for h in flat[real]]).mean(0)
    balance = 0.1 * (EXPERTS + 4) * sum(share * p[column] for column, share in enumerate(counts))
    experts = [[c for c in row if c < EXPERTS] for row in found]
    weights = [[row[c] for c in row if c < EXPERTS] for row in found]
    e, expected = layer.experts, []
    for h, row in zip(flat, found, strict=True):
        y = 0 * h
        for c, w in row.items():
            if c < EXPERTS:
                y = y + w * (e.w_out[c] @ torch.relu(e.w_in[c] @ h + e.b_in[c]) + e.b_out[c])
            elif KINDS[kind][c - EXPERTS] == "copy":
                y = y + w * h
            elif KINDS[kind][c - EXPERTS] == "constant":
                place = c - EXPERTS - (2 if kind == "mixed" else 0)
                a = softmax(layer.virtual.weight[place] @ h)
                y = y + w * (a[0] * h + a[1] * layer.virtual.value[place])
        expected.append(y)
    torch.testing.assert_close(output, torch.stack(expected))
    wanted = [hidden, *layer.parameters()]
    coefficients = torch.randn_like(output)
    left, right = (
        torch.autograd.grad((one * coefficients).sum(), wanted, allow_unused=True, retain_graph=True)
        for one in (output, torch.stack(expected))
    )
    for one, other, tensor in zip(left, right, wanted, strict=True):
        zero = torch.zeros_like(tensor)
        torch.testing.assert_close(zero if one is None else one, zero if other is None else other)
    compare(layer.router, hidden, mask, Expected(experts, weights, {"balance": balance}), routing)


def by_hand(spec: str) -> tuple[Router, Tensor]:
    """p = (.4 .3 | .2 .1), k = 3, two virtual experts."""
    router = build_router(spec, dim=2, num_experts=3, top_k=3).double()
    logits = torch.tensor([0.4, 0.3, 1e-9, 0.2, 0.1], dtype=torch.float64).log()
    router.score.forward = lambda *_: logits.view(1, 1, 5)  # type: ignore[method-assign]
    return router, torch.zeros(1, 2, dtype=torch.float64)


def test_the_worked_example() -> None:
    router, hidden = by_hand("smoe:nulls=2")
    routing = router(hidden)
    assert routing.experts.tolist() == [[0, 1, -1]]
    assert routing.weights[0].tolist() == pytest.approx([0.571429, 0.428571, 0], abs=1e-6)
    router, hidden = by_hand("smoe:nulls=2:kind=copy")
    routing = router(hidden)
    assert routing.weights[0].tolist() == pytest.approx([0.4 / 0.9, 0.3 / 0.9, 0], abs=1e-6)
    assert routing.dense_weights[0, 3:].tolist() == pytest.approx([0.2 / 0.9, 0], abs=1e-6)


def test_nothing_but_null_experts_is_zero() -> None:
    layer = MoE(DIM, 4, EXPERTS, router="smoe:nulls=2", top_k=2)
    with torch.no_grad():
        layer.router.score.bias[EXPERTS:] = 1e4
    hidden = torch.randn(3, DIM, requires_grad=True)
    output = layer(hidden)
    output.sum().backward()
    assert not output.any()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.router.parameters())


def test_the_bias_of_longcat_moves_for_virtual_experts() -> None:
    """LongCat-Flash: softmax, weights 6 p, identity experts, b of E + V entries."""
    spec = "loss-free:gate=softmax:nulls=2:kind=copy:renormalize=false:scale=6:rate=0.01"
    layer, other = (MoE(DIM, 4, EXPERTS, router=spec, top_k=3).double() for _ in range(2))
    hidden, _ = inputs()
    bias = [0.0] * 8
    for step in range(3):
        counts = [0] * 8
        for h in hidden.flatten(0, 1):
            p = softmax(layer.router.score.weight @ h).tolist()
            for c in ranked([a + b for a, b in zip(p, bias, strict=True)], 3):
                counts[c] += 1
        bias = [b + 0.01 * ((n < sum(counts) / 8) - (n > sum(counts) / 8)) for b, n in zip(bias, counts, strict=True)]
        for part in hidden:
            layer(part).sum().backward()
        step_end(layer)
        assert layer.router.select.bias.tolist() == pytest.approx(bias)
        if step == 1:
            other.load_state_dict(layer.state_dict())
    for part in hidden:
        other(part).sum().backward()
    step_end(other)  # saved after the second step, the third is the same
    assert torch.equal(layer.router.select.bias, other.router.select.bias)
    routing = layer.router.eval()(hidden)
    p = torch.softmax(routing.logits, -1)
    real = routing.experts >= 0
    torch.testing.assert_close(routing.weights[real], 6 * p.gather(1, routing.experts.clamp_min(0))[real])
    total = 6 * p.gather(1, (p + layer.router.select.bias).topk(3).indices).sum()
    torch.testing.assert_close(routing.dense_weights.sum(), total)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_padding_and_no_tokens(kind: str) -> None:
    layer = MoE(16, 16, 4, router=f"smoe:nulls=3:kind={kind}").bfloat16()
    for shape in ((2, 0, 16), (0, 5, 16), (1, 1, 16), (2, 5, 16)):
        assert layer(torch.randn(shape).bfloat16()).dtype == torch.bfloat16
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    assert not layer(torch.randn(2, 5, 16).bfloat16(), RoutingContext(padding_mask=nothing)).any()


def test_base_experts_contain_their_input() -> None:
    with pytest.raises(ValueError, match="cannot be used with experts='base'"):
        MoE(8, 8, 4, router="smoe:nulls=2", experts="base")
