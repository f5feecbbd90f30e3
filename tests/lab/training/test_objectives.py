"""THOR's two-pass objective against an independent float64 computation, forward and gradient."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.data.streams import IGNORE
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import consistency, objective_of

Settings = Callable[..., RunConfig]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    inputs, targets = torch.randint(0, 64, (2, 2, 5))
    targets[0, 2] = IGNORE
    return inputs, targets


@pytest.mark.parametrize("alpha", [0.0, 1.0, 5.0])
def test_against_an_independent_computation(settings: Settings, alpha: float) -> None:
    model = TransformerXL(settings("thor").model).double().train()
    inputs, targets = batch()
    torch.manual_seed(11)
    outcome = consistency(alpha).run(model, inputs, targets, None, 4)
    outcome.loss.backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    model.zero_grad()
    torch.manual_seed(11)
    p_logits = model(inputs).logits.flatten(0, 1)
    q_logits = model(inputs).logits.flatten(0, 1)
    assert not torch.equal(p_logits, q_logits), "the passes draw their own experts and masks"
    kept = targets.flatten() != IGNORE
    p, q, wanted = p_logits[kept], q_logits[kept], targets.flatten()[kept]
    rows = torch.arange(len(wanted))
    loss_p = -(p - p.logsumexp(-1, keepdim=True))[rows, wanted].sum() / 9
    loss_q = -(q - q.logsumexp(-1, keepdim=True))[rows, wanted].sum() / 9
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    forward = F.kl_div(log_q, log_p, log_target=True, reduction="sum") / 9
    backward = F.kl_div(log_p, log_q, log_target=True, reduction="sum") / 9
    expected = (loss_p + loss_q + alpha * 0.5 * (forward + backward)) / 2
    expected.backward()

    assert outcome.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert outcome.nats.item() == pytest.approx(loss_p.item(), rel=1e-12)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(ours[name], weight.grad, rtol=1e-9, atol=1e-12)


def test_which_objective_the_routers_ask_for(settings: Settings) -> None:
    assert objective_of(TransformerXL(settings("smoe").model)).name == "plain"
    assert objective_of(TransformerXL(settings("dense").model)).passes == 1
    thor = objective_of(TransformerXL(settings("thor:alpha=5").model))
    assert (thor.name, thor.passes) == ("consistency", 2)
    assert objective_of(TransformerXL(settings("thor|smoe").model)).name == "consistency"
    with pytest.raises(ValueError, match="different objectives"):
        objective_of(TransformerXL(settings("thor:alpha=5|thor:alpha=1").model))


def test_label_smoothing_gives_every_class_its_share(settings: Callable[..., RunConfig]) -> None:
    model = TransformerXL(settings("smoe").model).double().eval()
    inputs, targets = torch.randint(64, (2, 5)), torch.randint(64, (2, 5))
    targets[0, 0] = IGNORE
    logs = model(inputs).logits.log_softmax(-1)
    real = targets != IGNORE
    nats = -logs[real].gather(1, targets[real][:, None]).mean()
    outcome = objective_of(model, label_smoothing=0.1).run(model, inputs, targets, None, 0)
    torch.testing.assert_close(outcome.nats, nats)
    torch.testing.assert_close(outcome.loss, 0.9 * nats - 0.1 * logs[real].mean())
    with pytest.raises(RunError, match="consistency of two passes"):
        objective_of(TransformerXL(settings("thor").model), label_smoothing=0.1)


@pytest.mark.parametrize(("router", "smoothing"), [("thor", 0.0), ("smoe", 0.1)])
def test_a_micro_batch_without_a_target_adds_nothing(settings: Settings, router: str, smoothing: float) -> None:
    model = TransformerXL(settings(router).model).train()
    inputs, targets = batch()
    outcome = objective_of(model, label_smoothing=smoothing).run(model, inputs, targets.fill_(IGNORE), None, 0)
    outcome.loss.backward()
    assert outcome.loss == outcome.nats == 0
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
