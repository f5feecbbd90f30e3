"""Presets and recipes: what the papers' text and the released scripts say, and that all of them build."""

import pytest

from pointsman_lab.cli.train import parser
from pointsman_lab.recipes import list_recipes, preset, recipe, recipes
from pointsman_lab.registry import presets
from pointsman_lab.training.config import RunConfig


def test_every_row_of_the_papers_tables_has_a_recipe_and_one_for_the_scripts() -> None:
    sizes = [
        f"hyperrouter-{data}-{size}" for data in ("enwik8", "wikitext103") for size in ("small", "medium", "large")
    ]
    assert set(recipes()) == {*sizes, *(f"{name}-code" for name in sizes)}
    assert all(len(text) > 20 for text in list_recipes().values())
    for name in recipes():
        for router in ("dense", "dense-dropout", "smoe", "smoe-dropout", "hyperrouter", "thor"):
            config = recipe(name, router=router)
            assert config.preset == name
            assert config.model.router == router
            assert config.seed == 1111
            assert RunConfig.from_json(config.to_json()) == config
    assert recipe("hyperrouter-enwik8-small", seed=3).model.seed == 3
    assert "default: 0, of a recipe 1111" in parser().format_help()


@pytest.mark.parametrize("data", ["enwik8", "wikitext103"])
def test_the_papers_text(data: str) -> None:
    small = recipe(f"hyperrouter-{data}-small")
    # Table A1: input length 512, batch 22, Adam, 2.5e-4, 400,000 iterations
    assert (small.segment_length, small.batch_size, small.learning_rate, small.steps) == (512, 22, 2.5e-4, 400_000)
    assert (small.model.num_layers, small.model.dim, small.model.hidden_dim) == (4, 256, 512)
    assert (small.model.num_heads, small.model.num_experts, small.model.dropout) == (8, 16, 0.1)
    assert (small.train_top_k, small.model.moe_layers, small.eval_top_k) == ("2:N", "all", (1, 2, 4, 8, 16))
    medium, large = recipe(f"hyperrouter-{data}-medium"), recipe(f"hyperrouter-{data}-large")
    assert (medium.model.num_layers, medium.steps) == (8, 400_000)
    assert (large.model.num_layers, large.steps) == (12, 100_000)
    for router in ("smoe", "dense"):
        assert recipe(f"hyperrouter-{data}-small", router=router).model.dropout == 0.1
    assert (small.eval_batch_size, small.eval_segment_length, small.eval_memory_length) == (10, 128, 896)
    assert (small.clip_norm, small.warmup_steps, small.lr_schedule, small.weight_decay) == (0.25, 0, "cosine", 0)


@pytest.mark.parametrize("data", ["enwik8", "wikitext103"])
def test_the_released_scripts(data: str) -> None:
    small = recipe(f"hyperrouter-{data}-small-code")
    assert (small.train_top_k, small.model.moe_layers, small.model.dropout) == ("N/2:N", "0,1,2,3", 0.1)
    assert small.top_k_schedule(0) == 8
    large = recipe(f"hyperrouter-{data}-large-code")
    assert (large.model.num_layers, large.batch_size, large.steps) == (18, 44, 50_000)
    assert (large.model.moe_layers, large.model.hidden_dim) == ("0,1,2,3", 512)
    medium = recipe(f"hyperrouter-{data}-medium-code")
    assert (medium.model.num_layers, medium.batch_size, medium.steps) == (8, 22, 400_000)
    for router, dropout in (("smoe", 0.0), ("dense", 0.0), ("smoe-dropout", 0.1), ("dense-dropout", 0.1)):
        assert recipe(f"hyperrouter-{data}-small-code", router=router).model.dropout == dropout
    batch = (66, 134_000) if data == "wikitext103" else (22, 400_000)
    config = recipe(f"hyperrouter-{data}-small-code", router="dense-dropout")
    assert (config.batch_size, config.steps) == batch


@pytest.mark.parametrize("name", presets())
def test_every_shape_has_training_settings(name: str) -> None:
    config = preset(name, router="hyperrouter", data="enwik8", seed=5)
    assert (config.preset, config.data, config.seed, config.model.seed) == (name, "enwik8", 5, 5)
    for key, value in presets()[name]["model"].items():
        assert getattr(config.model, key) == value


def test_mutual_informs_settings() -> None:
    medium, large, glam = (preset(f"mutual-{name}") for name in ("medium", "large", "glam"))
    assert (medium.steps, medium.learning_rate, medium.warmup_steps, medium.lr_schedule) == (
        60_000,
        7e-4,
        4000,
        "constant",
    )
    assert (medium.batch_size, medium.segment_length, medium.memory_length, medium.clip_norm) == (48, 512, 1024, 0)
    assert (large.batch_size, large.segment_length, large.memory_length, large.warmup_steps) == (24, 1024, 2048, 5000)
    assert (large.steps, preset("mutual-glam-code").steps) == (60_000, 80_000)
    assert (glam.memory_length, glam.learning_rate, glam.steps) == (2048, 7e-5, 80_000)
    assert [config.top_k_schedule(100) for config in (medium, large, glam)] == [2, 2, 2]


def test_fewer_steps_validate_and_save_more_often() -> None:
    config = preset("small", steps=100)
    assert (config.steps, config.validate_every, config.checkpoint_every) == (100, 25, 25)
    assert preset("tiny", steps=3).validate_every == 1
    assert preset("tiny", steps=3).warmup_steps == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: preset("tinny"), "unknown preset 'tinny': did you mean 'tiny'"),
        (lambda: recipe("hyperrouter-enwik8-smal"), "did you mean 'hyperrouter-enwik8-small'"),
        (lambda: preset("tiny", learning_rat=3), "did you mean 'learning_rate'"),
        (lambda: preset("tiny", steps=0), "steps=0"),
        (lambda: preset("tiny", router="smo"), "did you mean 'smoe'"),
        (lambda: recipe("hyperrouter-enwik8-small", router="smo"), "did you mean 'smoe'"),
    ],
)
def test_wrong_names_get_the_nearest_one(call, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"unknown|allowed") as caught:
        call()
    assert told in str(caught.value)
