"""Learning rates, clipping and Adam's state."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pointsman.control import undecayed
from pointsman.parallel.shard import clip_gradient, gradient_norm
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.optimizer import (
    build_adam,
    learning_rate,
    lr_scales,
    optimizer_tensors,
    restore_optimizer,
    trainable,
)

Settings = Callable[..., RunConfig]


def test_cosine_to_zero(settings: Settings) -> None:
    config = settings(steps=1000, learning_rate=2.0)
    for step in (0, 1, 250, 500, 999):
        assert learning_rate(config, step) == pytest.approx(2.0 * 0.5 * (1 + math.cos(math.pi * step / 1000)))
    assert learning_rate(config, 1000) == pytest.approx(0.0, abs=1e-12)


def test_warm_up_is_linear_and_the_cosine_follows_it(settings: Settings) -> None:
    config = settings(steps=110, learning_rate=1.0, warmup_steps=10)
    assert [learning_rate(config, step) for step in (0, 4, 9)] == pytest.approx([1 / 11, 5 / 11, 10 / 11])
    assert learning_rate(config, 10) == 1.0
    assert learning_rate(config, 60) == pytest.approx(0.5)
    assert learning_rate(settings(lr_schedule="constant", warmup_steps=2, steps=9), 8) == 3e-3


def test_linear_and_inverse_square_root(settings: Settings) -> None:
    linear = settings(steps=110, learning_rate=1.0, warmup_steps=10, lr_schedule="linear", final_learning_rate=0.2)
    assert [learning_rate(linear, step) for step in (9, 10, 60, 110)] == pytest.approx([10 / 11, 1.0, 0.6, 0.2])
    root = settings(steps=110, learning_rate=1.0, warmup_steps=10, lr_schedule="inverse-sqrt")
    assert [learning_rate(root, step) for step in (9, 10, 40, 90)] == pytest.approx([10 / 11, 1.0, 0.5, 1 / 3])
    cosine = settings(steps=100, learning_rate=1.0, final_learning_rate=0.5)
    assert [learning_rate(cosine, step) for step in (0, 50, 100)] == pytest.approx([1.0, 0.75, 0.5])


def test_decoupled_decay_on_matrices_alone(settings: Settings) -> None:
    config = settings(
        "hyperrouter:lr_scale=2", decay="decoupled", decay_on="matrices", weight_decay=0.5, learning_rate=0.1
    )
    model = TransformerXL(config.model)
    weights = trainable(model)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer = build_adam(config, weights, lr_scales(model), undecayed(model))
    assert isinstance(optimizer, torch.optim.AdamW)
    optimizer.step()
    decayed = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    assert "layers.0.attention.qkv.weight" in decayed
    assert "layers.0.moe.experts.w_in" in decayed
    assert not [name for name in decayed if "embedding" in name or "norm" in name or "position_encoding" in name]
    assert not [name for name in decayed if name.rpartition(".")[2].startswith("b")]
    torch.testing.assert_close(weights["layers.0.moe.experts.w_in"], before["layers.0.moe.experts.w_in"] * 0.95)


@pytest.mark.parametrize(
    ("router", "experts", "name"),
    [
        ("smoe", "base", "experts.norms.2.weight"),
        ("smoe:nulls=3:kind=mixed", "ffn", "virtual.value"),
        ("stable", "ffn", "score.token"),
    ],
)
def test_tensors_of_two_dimensions_that_are_no_matrices(
    settings: Settings, router: str, experts: str, name: str
) -> None:
    layout = "after:1" if experts == "base" else "all"
    model = TransformerXL(settings(router, **{"model.experts": experts, "model.moe_layers": layout}).model)
    left = undecayed(model)
    found = [id(weight) in left for full, weight in model.named_parameters() if full.endswith(name)]
    assert found
    assert all(found)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {"a": nn.Parameter(torch.randn(3, 2)), "b": nn.Parameter(torch.randn(4))}


def test_adams_state_and_back(settings: Settings) -> None:
    def steps(weights: dict[str, nn.Parameter], optimizer: torch.optim.Adam, count: int, start: int) -> None:
        for step in range(start, start + count):
            torch.manual_seed(step)
            for weight in weights.values():
                weight.grad = torch.randn_like(weight)
            optimizer.step()

    whole = parameters()
    steps(whole, build_adam(settings(), whole), 5, 0)
    first = parameters()
    optimizer = build_adam(settings(), first)
    steps(first, optimizer, 3, 0)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, first).items()}
    second = {name: nn.Parameter(weight.detach().clone()) for name, weight in first.items()}
    resumed = build_adam(settings(), second)
    restore_optimizer(resumed, second, saved)
    steps(second, resumed, 2, 3)
    for name, weight in whole.items():
        assert torch.equal(weight, second[name])
    with pytest.raises(ValueError, match="another model"):
        restore_optimizer(resumed, {"a": second["a"]}, saved)


def test_clipping_scales_the_whole_gradient() -> None:
    weights = parameters()
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 2.0)
    norm = gradient_norm(weights.values())
    clip_gradient(weights.values(), norm, 1.0)
    assert float(norm) == pytest.approx(2.0 * math.sqrt(10))
    after = torch.cat([weight.grad.flatten() for weight in weights.values() if weight.grad is not None])
    assert float(after.norm()) == pytest.approx(1.0, rel=1e-5)
    clip_gradient(weights.values(), gradient_norm(weights.values()), 9.0)
    assert float(gradient_norm(weights.values())) == pytest.approx(1.0, rel=1e-5)


def test_only_what_trains_is_optimized() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(trainable(model)) == ["1.weight", "1.bias"]


def test_a_model_in_which_nothing_trains_is_refused(settings: Settings) -> None:
    with pytest.raises(ValueError, match="nothing in the model trains"):
        build_adam(settings(), {})
