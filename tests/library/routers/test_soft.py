"""Soft MoE against a float64 transcription, its worked example, and its one k."""

import pytest
import torch
from torch import Tensor

from pointsman import MoE, RoutingContext, build_router, set_top_k
from pointsman.experts.reference import expert, experts
from pointsman.routers.frame.registry import has_one_k
from pointsman.routers.frame.stage_values import Scores
from pointsman.routers.papers.soft import SoftSlots
from tests.library.routers.oracle import DIM, EXPERTS, inputs, softmax


def soft_layer(slots: int) -> MoE:
    torch.manual_seed(0)
    layer = MoE(DIM, 4, EXPERTS, router=f"soft:slots={slots}", activation="gelu").double()
    with torch.no_grad():
        for parameter in layer.router.parameters():
            parameter.normal_()
    return layer


def transcription(layer: MoE, hidden: Tensor, mask: Tensor) -> Tensor:
    phi, gain = layer.router.score.phi, layer.router.score.gain
    slots = phi.shape[1]
    each = experts(layer.experts.expert_parameters)
    outputs = []
    for x, real in zip(hidden, mask, strict=True):
        fit = [
            [[gain * (t / t.norm()) @ (phi[e, p] / phi[e, p].norm()) for p in range(slots)] for e in range(EXPERTS)]
            for t in x
        ]
        places = [t for t in range(len(x)) if real[t]]
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            for p in range(slots):
                dispatch = softmax(torch.stack([fit[t][e][p] for t in places]))
                slot = sum(d * x[t] for d, t in zip(dispatch, places, strict=True))
                result = expert(slot, each[e], "gelu")
                for t in places:
                    combine = softmax(torch.stack([one for row in fit[t] for one in row]))[e * slots + p]
                    y = y.index_add(0, torch.tensor([t]), (combine * result)[None])
        outputs.append(y)
    return torch.stack(outputs)


@pytest.mark.parametrize("slots", [1, 2])
def test_transcription(slots: int) -> None:
    layer = soft_layer(slots)
    hidden, mask = inputs()
    hidden.requires_grad_()
    output, routing = layer(hidden, RoutingContext(padding_mask=mask), return_routing=True)
    wanted = transcription(layer, hidden, mask)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    assert routing.experts[mask.flatten()].tolist() == [list(range(EXPERTS))] * int(mask.sum())
    weights = torch.arange(1.0, output.numel() + 1).view_as(output).sin()
    tensors = [hidden, *layer.parameters()]
    left, right = (torch.autograd.grad((one * weights).sum(), tensors) for one in (output, wanted))
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_worked_example() -> None:
    fit = torch.tensor([[[[1.0], [0.0]], [[0.0], [2.0]]]], dtype=torch.float64)
    scores = fit.logsumexp(-1)
    selection = SoftSlots(2)(Scores(scores, scores.softmax(-1), scores, {"fit": fit}), 2, RoutingContext())
    dispatch = torch.tensor([[0.731059, 0.119203], [0.268941, 0.880797]], dtype=torch.float64)
    combine = torch.tensor([[0.731059, 0.268941], [0.119203, 0.880797]], dtype=torch.float64)
    torch.testing.assert_close(selection.combine.dispatch[0, ..., 0], dispatch, rtol=0, atol=1e-6)
    torch.testing.assert_close(selection.combine.combine[0, ..., 0], combine, rtol=0, atol=1e-6)


def test_equal_slots_give_the_mean_of_the_experts_of_the_mean() -> None:
    layer = soft_layer(2)
    hidden, _ = inputs()
    with torch.no_grad():
        layer.router.score.phi.copy_(layer.router.score.phi[:1, :1].expand_as(layer.router.score.phi))
        layer.router.score.gain.zero_()
    each = [expert(hidden.mean(1), one, "gelu") for one in experts(layer.experts.expert_parameters)]
    wanted = (sum(each) / EXPERTS)[:, None].expand_as(hidden)
    torch.testing.assert_close(layer(hidden), wanted, rtol=1e-12, atol=1e-12)


def test_it_has_one_k_and_no_place_where_only_weights_are_applied() -> None:
    layer = soft_layer(1)
    assert layer.top_k == EXPERTS
    assert [has_one_k(spec) for spec in ("soft+uniform", "soft | soft:slots=2", "smoe+uniform")] == [True, True, False]
    set_top_k(layer, EXPERTS)
    with pytest.raises(ValueError, match="soft:slots=1: top_k=2: every token uses all 6 experts"):
        set_top_k(layer, 2)
    with pytest.raises(ValueError, match="experts='base'"):
        MoE(8, 8, 2, router="soft", experts="base")
    with pytest.raises(ValueError, match="soft: option slots"):
        build_router("soft:slots=0", dim=4, num_experts=4)


def test_a_sequence_of_padding_alone_is_zero() -> None:
    hidden, mask = inputs()
    mask[1] = False
    output = soft_layer(2)(hidden, RoutingContext(padding_mask=mask))
    assert bool(output.isfinite().all())
    assert not output[1].any()
