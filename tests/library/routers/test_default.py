"""Default MoE against a float64 transcription of several steps, in micro-batches."""

import pytest
import torch
from torch import Tensor

from pointsman import MoE, RoutingContext, set_top_k, step_end
from pointsman.experts.reference import expert, experts
from tests.library.routers.oracle import DIM, EXPERTS, inputs, ranked, softmax


def default_layer(spec: str = "default:decay=0.75", k: int = 2) -> MoE:
    torch.manual_seed(0)
    layer = MoE(DIM, 4, EXPERTS, router=spec, top_k=k).double()
    with torch.no_grad():
        layer.router.score.weight.normal_()
    return layer


def transcription(
    layer: MoE, hidden: Tensor, mask: Tensor, k: int, means: list[Tensor]
) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """The output, and the outputs of each expert."""
    each = experts(layer.experts.expert_parameters)
    rows, found = [], {e: [] for e in range(EXPERTS)}
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        y = torch.zeros(DIM, dtype=torch.float64)
        if real:
            p = softmax(layer.router.score.weight @ h)
            chosen = ranked(p, k)
            for e in range(EXPERTS):
                if e in chosen:
                    result = expert(h, each[e], "relu")
                    found[e].append(result.detach())
                    y = y + p[e] * result
                else:
                    y = y + p[e] * means[e]
        rows.append(y)
    return torch.stack(rows).view_as(hidden), found


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_transcription_over_three_steps(k: int, parts: int) -> None:
    layer = default_layer()
    set_top_k(layer, k)
    means = [torch.zeros(DIM, dtype=torch.float64) for _ in range(EXPERTS)]
    for step in range(3):
        hidden, mask = inputs(step)
        hidden.requires_grad_()
        wanted, found = transcription(layer, hidden, mask, k, means)
        pieces = [
            layer(part, RoutingContext(padding_mask=real))
            for part, real in zip(hidden.chunk(parts), mask.chunk(parts), strict=True)
        ]
        output = torch.cat(pieces)
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
        weights = torch.arange(1.0, output.numel() + 1).view_as(output).sin()
        tensors = [hidden, *layer.parameters()]
        left, right = (torch.autograd.grad((one * weights).sum(), tensors) for one in (output, wanted))
        for one, other in zip(left, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        step_end(layer)
        for e, outputs in found.items():
            if outputs:
                means[e] = 0.75 * means[e] + 0.25 * torch.stack(outputs).mean(0)
        torch.testing.assert_close(layer.router.select.means, torch.stack(means), rtol=1e-12, atol=1e-12)


def test_without_means_it_is_smoe_not_renormalised() -> None:
    layer = default_layer()
    plain = MoE(DIM, 4, EXPERTS, router="smoe:renormalize=false:bias=false").double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    hidden, _ = inputs()
    torch.testing.assert_close(layer(hidden), plain(hidden), rtol=1e-12, atol=1e-12)


def test_evaluation_and_a_frozen_router_keep_the_means() -> None:
    layer = default_layer()
    hidden, _ = inputs()
    layer(hidden).sum().backward()
    step_end(layer)
    before = layer.router.select.means.clone()
    assert before.any()
    layer.eval()(hidden).sum().backward()
    step_end(layer)
    layer.train().router.requires_grad_(False)
    layer.router.frozen = True
    layer(hidden.clone().requires_grad_()).sum().backward()
    step_end(layer)
    assert torch.equal(layer.router.select.means, before)


def test_a_dropped_expert_leaves_its_mean() -> None:
    layer = default_layer("default:capacity=0.5")
    layer.router.select.means.fill_(1.0)
    hidden, _ = inputs()
    _, routing = layer(hidden, return_routing=True)
    total = routing.weights.sum(-1) + routing.combine.weights()["means"].sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert (routing.experts < 0).any()
