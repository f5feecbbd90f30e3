"""`add_losses`: live values, once each, scaled with the main loss; the warnings where losses are lost or unscaled."""

import copy
import gc
import math
import pickle
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pointsman
from pointsman import MoE
from pointsman.delivery import LossDelivery

ROUTER = "smoe:balance=0.1:z_loss=0.01"


class Model(nn.Module):
    """Two MoE layers, or one that is used twice."""

    def __init__(self, *, attach: bool = False, shared: bool = False, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = MoE(8, 16, 4, router=ROUTER, attach_losses=attach)
        self.second = self.first if shared else MoE(8, 16, 4, router=ROUTER, attach_losses=attach)
        self.recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            if self.recompute is None:
                hidden = hidden + layer(hidden)
            else:
                hidden = hidden + checkpoint(layer, hidden, use_reentrant=self.recompute)
        return hidden


def data() -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def attached(**how: bool) -> list[Tensor]:
    model = Model(attach=True, **how)
    model(data()).square().mean().backward()
    return gradients(model)


def test_they_equal_attached_losses_and_show_in_the_value() -> None:
    model = Model()
    main = model(data()).square().mean()
    whole = pointsman.add_losses(main, model)
    values = [value for layer in pointsman.losses(model).values() for value in layer.values()]
    assert len(values) == 4
    torch.testing.assert_close(whole, main + sum(values))
    whole.backward()
    torch.testing.assert_close(gradients(model), attached())
    assert pointsman.add_losses(main, model) is main  # each once


@pytest.mark.parametrize("how", [{"shared": True}, {"recompute": False}])
def test_layers_used_twice_and_layers_done_again(how: dict[str, bool]) -> None:
    model = Model(**how)
    for _ in range(2):
        model.zero_grad()
        pointsman.add_losses(model(data()).square().mean(), model).backward()
        torch.testing.assert_close(gradients(model), attached(**how))


def test_several_forwards_count_together_and_forgotten_ones_do_not() -> None:
    model = Model()
    model(data())  # its graph is gone: nothing to add
    gc.collect()
    (model(data()).square().mean() + model(data()).square().mean()).backward()
    once = [grad / 2 for grad in gradients(model)]
    model = Model()
    loss = pointsman.add_losses(model(data()).square().mean() + model(data()).square().mean(), model)
    loss.backward()
    both = [grad / 2 for grad in gradients(model)]
    torch.testing.assert_close(both, attached())
    assert not torch.allclose(once[0], both[0])


def test_the_whole_is_scaled_alike() -> None:
    model = Model()
    for _ in range(4):
        (pointsman.add_losses(model(data()).square().mean(), model) * 65536 / 4).backward()
    torch.testing.assert_close([grad / 65536 for grad in gradients(model)], attached())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attach", [False, True])
def test_losses_count_where_the_output_needs_no_gradient(attach: bool, recompute: bool) -> None:
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, router="compete:rate=1", attach_losses=attach)  # its weights are the experts' alone
    pointsman.freeze(layer, "experts")
    _, routing = layer(data(), return_routing=True)
    (expected,) = torch.autograd.grad(sum(routing.losses.values()), layer.router.score.weight)
    head = nn.Linear(8, 1)
    for _ in range(2):
        layer.zero_grad()
        output = checkpoint(layer, data(), use_reentrant=False) if recompute else layer(data())
        loss = head(output).sum()
        (loss if attach else pointsman.add_losses(loss, layer)).backward()
        torch.testing.assert_close(layer.router.score.weight.grad, expected)


def test_without_gradients_and_in_evaluation_the_loss_is_as_it_was() -> None:
    model = Model()
    with torch.no_grad():
        loss = model(data()).square().mean()
        assert pointsman.add_losses(loss, model) is loss
    model.eval()
    loss = model(data()).square().mean()
    assert pointsman.add_losses(loss, model) is loss


@pytest.mark.slow
def test_compiled() -> None:
    model = Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        model.zero_grad()
        pointsman.add_losses(compiled(data()).square().mean(), compiled).backward()
        torch.testing.assert_close(gradients(model), attached())
    for _ in range(3):
        compiled(data())  # nobody adds them: nothing piles up, nothing is compiled again
    assert len(model.first.delivery.take()) == 2


def test_models_that_hold_live_losses_are_copied_and_pickled() -> None:
    model = Model()
    output = model(data())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss = output.sum()
        assert pointsman.add_losses(loss, other) is loss
    assert pointsman.add_losses(output.sum(), model).item() > output.sum().item()


def test_what_cannot_be_right_is_refused() -> None:
    loss = torch.zeros(())
    with pytest.raises(ValueError, match="layer 'first' attaches no losses"):
        pointsman.set_loss_scale(Model(), 2.0)
    with pytest.raises(ValueError, match="Linear has no MoE layer"):
        pointsman.add_losses(loss, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layer 'first' attaches its losses"):
        pointsman.add_losses(loss, Model(attach=True))
    with pytest.raises(ValueError, match=r"loss is of shape \[3\]: give a scalar"):  # whose sum would count thrice
        pointsman.add_losses(torch.zeros(3), Model())
    for none in (None, 0.5):  # a model of transformers without labels returns None
        with pytest.raises(ValueError, match=f"loss is {none}, no tensor: give a scalar tensor"):
            pointsman.add_losses(none, Model())  # type: ignore[arg-type]
    scales: list[Any] = [math.nan, math.inf, -1.0, "1", None, torch.ones(2), torch.tensor(math.nan)]
    for scale in scales:
        attached = Model(attach=True)
        with pytest.raises(ValueError, match=r"set_loss_scale: scale=.*: allowed are numbers from 0"):
            pointsman.set_loss_scale(attached, scale)
        assert attached.first.delivery.scale == 1
    pointsman.set_loss_scale(attached, torch.full((1,), 0.25))
    assert attached.first.delivery.scale == 0.25
    model, hidden = Model(recompute=True), data().requires_grad_()
    loss = model(hidden).square().mean()
    with pytest.raises(ValueError, match="use_reentrant=False"):
        pointsman.add_losses(loss, model)


def test_attached_losses_warn_once_under_a_scaler_whose_factor_nobody_told() -> None:
    model = Model(attach=True)
    with torch.autocast("cpu", torch.float16), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(data())
        model(data())
    assert all("pointsman.add_losses" in str(one.message) for one in caught)
    assert len(caught) == 2  # one a layer
    with warnings.catch_warnings(), torch.autocast("cpu", torch.float16):
        warnings.simplefilter("error")
        told, added = Model(attach=True), Model()
        pointsman.set_loss_scale(told, 65536.0)
        for quiet in (told, added, Model(attach=True).eval()):
            quiet(data())


def steps(model: nn.Module, *, accumulation: int = 1, added: bool = False, forward: Any = None) -> list[str]:
    """The warnings of three optimizer steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for _ in range(accumulation):
                loss = (model if forward is None else forward)(data()).square().mean()
                ((pointsman.add_losses(loss, model) if added else loss) / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("how", [{}, {"accumulation": 4}])
def test_a_loop_that_takes_no_losses_is_warned_once_what_to_write(how: dict[str, int]) -> None:
    (told,) = steps(Model(), **how)
    assert told.startswith("the routers' losses (balance, z_loss) reached no gradient: before backward write loss = ")
    (told,) = steps(copy.deepcopy(Model()), **how)  # each model
    for quiet in (Model(attach=True), Model().eval(), nn.Sequential(MoE(8, 8, 4))):
        assert steps(quiet, **how) == []
    assert steps(Model(), added=True, **how) == []
    assert steps(Model(recompute=False), added=True, **how) == []
    assert len(steps(Model(recompute=False), **how)) == 1


@pytest.mark.slow
def test_a_compiled_loop_that_takes_no_losses_is_warned() -> None:
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    assert len(steps(model, forward=compiled)) == 1
    assert steps(model, forward=compiled, added=True) == []


def test_gradients_before_the_losses_are_added_are_no_loss() -> None:
    """A loop may look at the input's gradient before it adds the losses."""
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            inputs = data().requires_grad_()
            main = model(inputs).square().mean()
            (gradient,) = torch.autograd.grad(main, [inputs], retain_graph=True)
            pointsman.add_losses(main * gradient.norm(), model).backward()


def test_an_attack_before_the_step_counts_no_losses_and_warns_of_nothing() -> None:
    model, plain = Model(), Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            inputs = data().requires_grad_()
            attack = model(inputs).square().mean()
            (gradient,) = torch.autograd.grad(attack, inputs)
            changed = (inputs + 0.1 * gradient.sign()).detach()
            loss = pointsman.add_losses(model(changed).square().mean(), model)
            assert torch.equal(loss, pointsman.add_losses(plain(changed).square().mean(), plain))
            loss.backward()  # with `attack` still alive


def test_a_graph_that_is_kept_keeps_its_losses() -> None:
    model, plain = Model(), Model()
    main = model(data()).square().mean()
    torch.autograd.grad(main, list(model.parameters()), retain_graph=True, allow_unused=True)  # a norm, say
    pointsman.add_losses(main, model).backward()
    pointsman.add_losses(plain(data()).square().mean(), plain).backward()
    for own, expected in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(own, expected)


def test_the_scale_of_attached_losses_survives_a_loader_that_knows_no_buffers() -> None:
    with torch.device("meta"):
        model = Model(attach=True)
    model.load_state_dict(Model(attach=True).state_dict(), assign=True)
    model.to("cpu")
    model(data()).square().mean().backward()
    for own, expected in zip(gradients(model), attached(), strict=True):
        torch.testing.assert_close(own, expected)


def test_a_step_of_another_model_through_these_layers_warns_of_nothing() -> None:
    """A critic's losses are its own step's: in that of the actor or generator nobody takes them."""
    critic, actor = Model(), nn.Linear(8, 8)
    first, second = (torch.optim.SGD(one.parameters(), 0.1) for one in (critic, actor))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            pointsman.add_losses(critic(data()).square().mean(), critic).backward()
            first.step()
            for _ in range(3):
                critic(actor(data())).mean().backward()
                second.step()
    assert [len(steps(critic)) for _ in range(40)].count(1) == 1  # too many steps for another model's


@pytest.mark.parametrize("how", ["first", "by hand", pytest.param("compiled", marks=pytest.mark.slow)])
def test_nobody_is_warned_of_losses_that_were_not_lost(how: str) -> None:
    """Another optimizer steps before the first `add_losses`; a loop adds `Routing.losses`; nothing went backward."""
    model, other = Model(), nn.Linear(8, 8)
    first, second = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, other))
    if how == "compiled":
        torch.compile(model, backend="aot_eager")(data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            (model(other(data())) if how == "first" else other(data())).square().mean().backward()
            second.step()
            if how == "first":
                pointsman.add_losses(model(data()).square().mean(), model).backward()
            elif how == "by hand":
                output, routing = model.first(data(), return_routing=True)
                (output.square().mean() + sum(routing.losses.values())).backward()
            first.step()
    assert len(steps(Model())) == 1


def test_a_layer_that_ran_without_gradients_is_left_out() -> None:
    """As LayerDrop under `no_grad` does it, or a teacher in training mode."""
    model, plain = Model(), Model()
    with torch.no_grad():
        hidden = model.first(data())
    main = model.second(hidden).square().mean()
    expected = pointsman.add_losses(plain.second(hidden).square().mean(), plain.second)
    assert torch.equal(pointsman.add_losses(main, model), expected)


def test_layers_may_be_made_in_one_thread_while_another_steps() -> None:
    kept = [LossDelivery(False) for _ in range(300)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    optimizer.step()
    maker = threading.Thread(target=lambda: [LossDelivery(False) for _ in range(3000)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        maker.start()
        while maker.is_alive():
            optimizer.step()
    finally:
        sys.setswitchinterval(interval)
        maker.join()
    assert kept
