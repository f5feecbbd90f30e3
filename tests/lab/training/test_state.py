"""One step: paired seeds, accumulation, and where a number stops being finite."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman import add_losses
from pointsman_lab.data.corpus import Corpus
from pointsman_lab.tasks.language_modelling.task import LanguageModelling
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import Outcome, consistency
from pointsman_lab.training.optimizer import optimizer_tensors, restore_optimizer
from pointsman_lab.training.state import Diverged, TrainingState

Settings = Callable[..., RunConfig]
CPU = torch.device("cpu")


def state(config: RunConfig, corpus: Corpus) -> TrainingState:
    return TrainingState(config.with_vocabulary(corpus.vocabulary.size), LanguageModelling(corpus), CPU)


@contextmanager
def recorded_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The zero patterns of every dropout, in order."""
    masks: list[Tensor] = []
    dropout = torch.nn.functional.dropout

    def recording(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        masks.append(dropout(torch.ones_like(values), p, training) == 0)
        return values.masked_fill(masks[-1], 0) / (1 - p) if training else values

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", recording)
        yield masks


@pytest.mark.parametrize("other", ["hyperrouter", "frozen-scaled", "smoe", "xmoe"])
def test_runs_of_one_seed_share_weights_and_masks(
    settings: Settings, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    masks: dict[str, list[Tensor]] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    for router in ("smoe-dropout", other):
        one = state(settings(router), corpus)
        weights[router] = {
            name: weight.detach().clone() for name, weight in one.model.named_parameters() if "router" not in name
        }
        with recorded_masks(monkeypatch) as found:
            for _ in range(3):
                one.train_step()
        masks[router] = found
    assert weights["smoe-dropout"].keys() == weights[other].keys()
    assert all(torch.equal(weight, weights[other][name]) for name, weight in weights["smoe-dropout"].items())
    assert len(masks[other]) == len(masks["smoe-dropout"]) > 3
    assert all(torch.equal(one, two) for one, two in zip(masks["smoe-dropout"], masks[other], strict=True))
    assert any(bool(mask.any()) for mask in masks[other])
    assert not torch.equal(masks[other][0], masks[other][len(masks[other]) // 3]), "each step draws anew"


def test_equal_routers_have_equal_losses_and_another_seed_has_another(settings: Settings, corpus: Corpus) -> None:
    frozen = state(settings("smoe-dropout"), corpus).train_step()["loss"]
    temperature = state(settings("frozen-temperature"), corpus).train_step()["loss"]  # starts as the frozen one
    assert frozen == temperature
    assert frozen != state(settings("smoe-dropout", seed=1), corpus).train_step()["loss"]


def test_k_and_learning_rate_of_each_step(settings: Settings, corpus: Corpus) -> None:
    one = state(settings(train_top_k="2:N", steps=6), corpus)
    rows = [one.train_step() for _ in range(6)]
    assert [row["top_k"] for row in rows] == [2 + round(2 * step / 6) for step in range(6)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(
        [3e-3 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("router", ["smoe:z_loss=0.1", "hyperrouter"])
def test_accumulation_equals_the_large_batch(settings: Settings, corpus: Corpus, router: str) -> None:
    whole = state(settings(router, clip_norm=0, **{"model.dropout": 0.0}), corpus)
    parts = state(settings(router, clip_norm=0, accumulation=2, **{"model.dropout": 0.0}), corpus)
    for step in range(2):  # the second one has a memory
        one, two = whole.train_step(), parts.train_step()
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)
        for name, weight in whole.parameters.items():
            if step == 0:
                torch.testing.assert_close(parts.parameters[name].grad, weight.grad, rtol=1e-4, atol=1e-7)


def test_the_routers_losses_are_halved_in_two_passes(settings: Settings, corpus: Corpus) -> None:
    """With the main loss taken away, the gradient is that of the mean of both passes' losses."""
    two = consistency(1.0)

    def alone(*arguments: Any) -> Outcome:
        outcome = two.run(*arguments)
        return replace(outcome, loss=outcome.loss * 0)

    trained = state(settings("smoe:z_loss=0.1", clip_norm=0, **{"model.dropout": 0.0}), corpus)
    trained.objective = replace(two, run=alone)
    (inputs, targets), *_ = trained._micro_batches()
    trained.model.train()
    both = trained.objective.run(trained.model, inputs, targets, None, trained.config.memory_length)
    loss = both.loss + (add_losses(both.loss, trained.model) - both.loss) / 2
    scorer = trained.model.layers[0].moe.router.score.weight
    (expected,) = torch.autograd.grad(loss, [scorer])
    trained.train_step()
    torch.testing.assert_close(scorer.grad, expected)
    assert expected.any()


def test_memories_are_forgotten_where_the_text_starts_again(settings: Settings, corpus: Corpus) -> None:
    one = state(settings("smoe", **{"model.dropout": 0.0}), corpus)
    one.train_step()
    assert one.memories[0] is not None
    assert one.memories[0].length == 16
    one.step = one.batches.steps_per_epoch
    seen: list[object] = []
    one.model.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    one.train_step()
    one.train_step()
    assert seen[0] is None
    assert seen[1] is not None


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.1.moe.experts.w_out", "layers.1.moe.experts"),
        ("layers.0.attention.qkv.weight", "layers.0.attention"),
        ("layers.1.moe.router.score.weight", "layers.1.moe.router.score"),
    ],
)
def test_a_loss_that_is_not_finite_names_step_and_layer(
    settings: Settings, corpus: Corpus, name: str, layer: str
) -> None:
    one = state(settings(), corpus)
    one.train_step()
    with torch.no_grad():
        one.model.get_parameter(name).fill_(math.nan)
    before = {key: weight.detach().clone() for key, weight in one.model.named_parameters() if key != name}
    with pytest.raises(Diverged, match=rf"step 2: the loss is nan; .* layer {layer}\b"):
        one.train_step()
    assert all(torch.equal(weight, one.model.get_parameter(key)) for key, weight in before.items())
    assert one.step == 1


def test_a_gradient_that_is_not_finite_names_the_parameter(settings: Settings, corpus: Corpus) -> None:
    one = state(settings(), corpus)
    weight = one.model.get_parameter("layers.0.moe.experts.w_in")
    weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(Diverged, match=r"step 1: the gradient's norm is (nan|inf); .*layers\.0\.moe\.experts\.w_in"):
        one.train_step()
    assert weight.isfinite().all()


def test_bfloat16(settings: Settings, corpus: Corpus) -> None:
    full = state(settings(**{"model.dropout": 0.0}), corpus).train_step()["loss"]
    half = state(settings(precision="bfloat16", **{"model.dropout": 0.0}), corpus)
    loss = half.train_step()["loss"]
    assert loss != full
    assert loss == pytest.approx(full, rel=0.02)
    assert half.train_step()["loss"] < loss
    assert all(weight.dtype == torch.float32 for weight in half.model.parameters())


@pytest.mark.parametrize("router", ["xmoe", "xmoe-torchscale", "switch"])
def test_trained_at_k_1_the_weight_is_the_gate_and_the_router_trains(
    settings: Settings, corpus: Corpus, router: str
) -> None:
    one = state(settings(f"{router}:balance=0", train_top_k="1"), corpus)
    before = {name: value.clone() for name, value in one.parameters.items() if ".router." in name}
    assert not one.model.layers[0].moe.router.select.renormalize
    one.train_step()
    assert before
    assert not any(torch.equal(value, one.parameters[name]) for name, value in before.items())


def test_a_router_trains_at_a_rate_of_its_own_and_nothing_else_does(settings: Settings, corpus: Corpus) -> None:
    plain, scaled = (state(settings(spec), corpus) for spec in ("hyperrouter", "hyperrouter:lr_scale=0.25"))
    started = {name: value.clone() for name, value in plain.parameters.items()}
    for one in (plain, scaled):
        one.train_step()
    for name, start in started.items():
        moved, other = plain.parameters[name] - start, scaled.parameters[name] - start
        if ".router." in name:
            torch.testing.assert_close(other, 0.25 * moved, rtol=1e-3, atol=1e-9)
        else:
            assert torch.equal(other, moved)
    assert [group["lr_scale"] for group in scaled.optimizer.param_groups] == [1.0, 0.25]


def test_a_checkpoint_keeps_each_rate_with_its_parameters(settings: Settings, corpus: Corpus) -> None:
    whole, first, second = (state(settings("smoe:lr_scale=4"), corpus) for _ in range(3))
    for one, count in ((whole, 4), (first, 2)):
        for _ in range(count):
            one.train_step()
    second.model.load_state_dict(first.model.state_dict())
    saved = optimizer_tensors(first.optimizer, first.parameters)
    restore_optimizer(second.optimizer, second.parameters, {name: value.clone() for name, value in saved.items()})
    second.memories, second.step = first.memories, first.step
    for _ in range(2):
        second.train_step()
    assert all(torch.equal(value, second.parameters[name]) for name, value in whole.parameters.items())
