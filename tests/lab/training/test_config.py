"""RunConfig: strict, typed, and as JSON and back."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from pointsman._errors import RunError
from pointsman_lab.models.encoder import EncoderConfig
from pointsman_lab.recipes import preset as run_of
from pointsman_lab.training.config import RunConfig, differing_settings
from pointsman_lab.training.config import settings as all_settings
from pointsman_lab.training.directory import validated_k
from pointsman_lab.training.k_schedule import doublings
from pointsman_lab.training.settings import derived

Settings = Callable[..., RunConfig]


def test_json_and_back(settings: Settings) -> None:
    config = settings(
        "hyperrouter:hyper_dim=8",
        eval_tokens=None,
        betas=(0.9, 0.98),
        **{"model.attention_only": (1,), "model.moe_layers": "0"},
    )
    assert RunConfig.from_json(config.to_json()) == config
    values = json.loads(config.to_json())
    assert values["format"] == 1
    assert values["model"]["router"] == "hyperrouter:hyper_dim=8"


@pytest.mark.parametrize(("name", "value"), [("valid_tokens", -1), ("label_smoothing", 1.0)])
def test_a_saved_setting_out_of_range_is_refused_with_its_file(settings: Settings, name: str, value: float) -> None:
    saved = json.dumps({**settings().to_dict(), name: value})
    with pytest.raises(RunError, match=f"run/config.json: {name}={value}: allowed are"):
        RunConfig.from_json(saved, "run/config.json")


def test_overrides_are_read_as_their_type(settings: Settings) -> None:
    config = settings().with_overrides(
        {
            "learning_rate": "1e-3",
            "model.dim": "64",
            "eval_tokens": "all",
            "eval_top_k": "1,4",
            "betas": "0.9,0.95",
            "deterministic": "true",
            "model.pre_norm": "true",
            "steps": "1000",
        }
    )
    assert config.learning_rate == 1e-3
    assert config.model.dim == 64
    assert config.eval_tokens is None
    assert config.eval_top_k == (1, 4)
    assert config.betas == (0.9, 0.95)
    assert config.deterministic is True
    assert config.model.pre_norm is True
    assert config.steps == 1000


@pytest.mark.parametrize(
    ("preset", "unread"),
    [("tiny-vit", "segment_length"), ("tiny-mlm", "eval_split"), ("tiny-mt", "memory_length")],
)
def test_what_nothing_reads_cannot_be_set(preset: str, unread: str) -> None:
    config = run_of(preset)
    assert unread not in all_settings(config.model.family)
    with pytest.raises(RunError, match=f"{unread}.*do not read it"):
        config.with_overrides({unread: "3"})


def test_every_setting_but_the_derived_ones_can_be_set(settings: Settings) -> None:
    config = settings()
    own = {each.name for each in fields(config)} - {"model", "own"} | set(config.own)
    of_model = {f"model.{each.name}" for each in fields(config.model)} - set(derived(config.model.family))
    assert set(all_settings()) == own | of_model


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"model.dims": 8}, "did you mean 'model.dim'"),
        ({"steps": "1.5"}, "steps='1.5': allowed is a whole number"),
        ({"steps": 0}, "steps=0: allowed are whole numbers from 1"),
        ({"steps": True}, "steps=True"),
        ({"batch_size": "many"}, "batch_size='many'"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"learning_rate": "nan"}, "learning_rate='nan'"),
        ({"clip_norm": -1}, "clip_norm=-1"),
        ({"accumulation": 3}, "accumulation=3"),
        ({"eval_top_k": "1,5"}, "k=5"),
        ({"eval_top_k": "1,1"}, "twice"),
        ({"eval_top_k": "0"}, "k=0"),
        ({"eval_tokens": 0}, "eval_tokens=0"),
        ({"betas": "0.9"}, "2 values"),
        ({"betas": "0.9,1"}, "betas"),
        ({"train_top_k": "2:9"}, "k=9"),
        ({"k_schedule": "lin"}, "linear"),
        ({"precision": "fp8"}, "bfloat16"),
        ({"deterministic": "perhaps"}, "true or false"),
        ({"data": 3}, "allowed is a text"),
        ({"model.router": "hyperruter"}, "did you mean 'hyperrouter'"),
        ({"model.seed": 1}, "set seed"),
        ({"model.vocab_size": 1}, "vocabulary of the data"),
        ({"eval_split": "train"}, "valid or test"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(settings: Settings, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings().with_overrides(change)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda values: values.pop("format"), "format"),
        (lambda values: values.update(format=2), "format"),
        (lambda values: values.update(stepz=3), "did you mean 'steps'"),
        (lambda values: values.update(steps="3.5"), "steps"),
        (lambda values: values.pop("model"), "model is missing"),
        (lambda values: values["model"].pop("vocab_size"), "vocab_size is missing"),
        (lambda values: values["model"].update(dimm=3), "did you mean 'dim'"),
        (lambda values: values.update(own={}), "own"),
    ],
)
def test_a_wrong_file_is_refused_by_name(settings: Settings, damage: Callable[[Any], Any], told: str) -> None:
    values = settings().to_dict()
    damage(values)
    with pytest.raises(ValueError, match=told) as caught:
        RunConfig.from_dict(values, "runs/x/config.json")
    assert "runs/x/config.json" in str(caught.value)


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        RunConfig.from_json("{", "config.json")


def test_a_file_from_before_a_setting_existed_takes_its_default(settings: Settings) -> None:
    values = settings().to_dict()
    del values["observe_every"]
    del values["model"]["activation"], values["model"]["family"]
    assert RunConfig.from_dict(values) == settings()


def test_another_family_comes_back(settings: Settings) -> None:
    model = EncoderConfig(vocab_size=50, num_experts=4, dim=8, num_heads=2, head_dim=4, hidden_dim=8)
    config = RunConfig(model=model, train_top_k="1")
    values = config.to_dict()
    assert values["model"]["family"] == "encoder"
    assert RunConfig.from_dict(values) == config
    assert config.with_overrides({"model.positions": "t5"}).model == replace(config.model, positions="t5")
    with pytest.raises(RunError, match=r"unknown setting 'model.pre_norm'"):
        config.with_overrides({"model.pre_norm": "true"})
    with pytest.raises(RunError, match=r"'model.family' cannot be set"):
        config.with_overrides({"model.family": "encoder"})
    assert differing_settings(settings(), config)["model.family"] == ("transformer-xl", "encoder")
    values["model"]["family"] = "encodr"
    with pytest.raises(RunError, match=r"config: unknown model family 'encodr': did you mean 'encoder'"):
        RunConfig.from_dict(values)


def test_the_seed_is_the_models_too(settings: Settings) -> None:
    assert settings(seed=7).model.seed == 7
    assert differing_settings(settings(), settings(seed=7)) == {"seed": (0, 7), "model.seed": (0, 7)}


def test_settings_by_which_a_validation_chooses_may_not_change(settings: Settings) -> None:
    for key in ("validate_every", "eval_tokens"):
        last, chosen = ([settings(choose=choose, **{key: n}) for n in (2, 3)] for choose in ("last", "best-valid"))
        assert not last[0].differing(last[1])
        assert chosen[0].differing(chosen[1]) == {key: (2, 3)}
    config = settings(choose="best-valid", train_top_k="2", eval_top_k="1")
    assert not config.differing(settings(choose="best-valid", train_top_k="2"))
    assert validated_k(config) == 2
    assert validated_k(settings(train_top_k="2:3")) == 3, "the last of a schedule, as everywhere"
    assert validated_k(settings("dense", train_top_k="2")) == 4


def test_k_values_of_the_evaluation_follow_the_number_of_experts(settings: Settings) -> None:
    assert doublings(1, 16) == (1, 2, 4, 8, 16)
    assert doublings(1, 6) == (1, 2, 4, 6)
    assert doublings(1, 1) == (1,)
    assert settings(**{"model.num_experts": 6}).eval_top_k == (1, 2, 4, 6)


@pytest.mark.parametrize(("train_top_k", "first"), [("1", 1), ("2", 2), ("2:N", 2), ("N/2:N", 2), ("N", 4)])
def test_the_model_starts_with_the_first_k_of_training(
    settings: Callable[..., RunConfig], train_top_k: str, first: int
) -> None:
    config = settings(train_top_k=train_top_k)
    assert config.model.top_k == first
    assert RunConfig.from_dict(config.to_dict()) == config
    with pytest.raises(RunError, match=r"'model.top_k' cannot be set: it is the first k of train_top_k"):
        config.with_overrides({"model.top_k": 3})


def test_a_single_expert(settings: Settings) -> None:
    config = settings().with_overrides({"model.num_experts": "1", "train_top_k": "1"})
    assert (config.model.top_k, config.eval_top_k) == (1, (1,))
