"""The planner against published figures, hand-counted layouts, and bad input."""

from itertools import product
from math import isclose

import pytest
import torch

from pointsman._errors import RunError
from pointsman.parallel.layout import Layout
from pointsman_lab.cli.main import main
from pointsman_lab.models.families import build_model, preset_config
from pointsman_lab.planning.machines import machine, published_billions, runs, shapes
from pointsman_lab.planning.plan import Job, estimate, layouts, memory, plan
from pointsman_lab.planning.shapes import Shape
from pointsman_lab.planning.time import calibration, distinct_ranks, exchange_bytes, fit, parts


def test_parameters_are_the_published_ones():
    known = shapes()
    for name, billions in published_billions().items():
        assert isclose(known[name].parameters / 1e9, billions, rel_tol=2e-3), name


def test_operations_are_the_published_ones():
    """TFLOP/s a GPU over tokens/s a GPU, as printed in one line: to 0.6 % where all layers see the whole sequence."""
    known = shapes()
    for run in runs():
        if run.teraflops and not known[run.model].windowed:
            assert isclose(known[run.model].flops(run.length), run.teraflops * 1e12 / run.speed, rel_tol=6e-3), run


def test_the_error_that_is_printed():
    found = calibration()
    assert len(found.runs) == 13
    assert found.median_error < 0.18
    assert found.worst_error < 0.40
    assert "17% in the median, 39% at worst" in str(found)


def test_the_fit_finds_the_constants_of_its_own_predictions():
    known, true = shapes(), (0.4, 1.3, 2.5)
    made = [parts(known[run.model], machine(run.machine), run.experts, run.length) for run in runs()]
    found = fit([(part, part.seconds(true)) for part in made])
    assert all(isclose(a, b, rel_tol=1e-4) for a, b in zip(found, true, strict=True))


def test_distinct_ranks_by_counting():
    """All choices of k = 3 of E = 8 experts on R = 4 ranks, counted."""
    choices = [set(choice) for choice in product(range(8), repeat=3) if len(set(choice)) == 3]
    counted = sum(len({expert // 2 for expert in choice}) for choice in choices) / len(choices)
    assert isclose(distinct_ranks(4, 8, 3), counted)
    assert isclose(distinct_ranks(8, 64, 8), 5.43, abs_tol=0.005)  # OLMoE on 8 ranks
    assert exchange_bytes(shapes()["olmoe"], 1) == 0


@pytest.mark.parametrize("preset", ["tiny", "small", "tiny-decoder", "mutual-glam"])
def test_a_preset_has_the_parameters_of_its_model(preset: str):
    config = preset_config(preset, 100)
    with torch.device("meta"):
        model = build_model(config)
    shape = Shape.of(config, preset)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    chosen = shape.sparse_layers * shape.matrices * shape.dim * shape.hidden_dim
    assert shape.active_parameters <= shape.parameters - chosen * (shape.experts - shape.top_k)


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="no sparse layer"):
        Shape.of(preset_config("tiny", 100, router="dense"), "tiny")


def test_state_is_divided_over_the_ranks_that_hold_it():
    shape, job = shapes()["olmoe"], Job(4096)
    one = memory(shape, Layout(1), job, recompute=False)
    eight = memory(shape, Layout(8), job, recompute=False)
    assert isclose(one - eight, 16 * shape.parameters * 7 / 8)
    assert memory(shape, Layout(8, replicas=2), job, recompute=False) > eight
    assert memory(shape, Layout(8), job, recompute=True) < eight


def test_every_layout_divides():
    found = list(layouts(8, 12))
    assert len(found) == len(set(found)) == 9
    for layout in found:
        layout.check_experts(12)


def test_what_does_not_fit_is_said_with_the_smallest_layout():
    best = plan(shapes()["deepseek-v3"], machine("h100"), [8], Job(4096))
    assert [one.note for one in best] == ["does not fit"]


def test_a_slower_link_never_makes_a_plan_faster():
    shape, h100 = shapes()["qwen3-30b-a3b"], machine("h100")
    inside = estimate(shape, h100, Layout(8, experts=8), Job(8192))
    across = estimate(shape, h100, Layout(64, experts=64), Job(8192))
    assert across.step > inside.step
    assert across.exchange > inside.exchange


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "olmoe", "--machine", "a100"], "no published run to calibrate a plan with; did you mean 'h100'"),
        (["--model", "olmo"], "did you mean 'olmoe'"),
        ([], "allowed is one of --model and --preset"),
        (["--model", "olmoe", "--preset", "tiny"], "allowed is one of --model and --preset"),
        (["--model", "olmoe", "--parallel", "experts=3"], "1, 2, 4, 8 do"),
        (["--model", "olmoe", "--tokens", "5000"], "allowed are multiples of --length, e.g. 4096"),
        (["--model", "olmoe", "--set", "model.dim=4"], "--set has no effect without --preset"),
        (["--compare", "--model", "olmoe"], "--model has no effect with --compare"),
        (["--preset", "tiny", "--set", "model.router=dense"], "no sparse layer"),
        (["--preset", "tiny", "--set", "accumulation=8"], "--set accumulation has no effect on a plan"),
        (["--preset", "tiny-mt"], "one stack of layers, not for an encoder with a decoder"),
        (
            ["--preset", "tiny-vit", "--length", "64"],
            "--length has no effect with --preset tiny-vit, which reads images",
        ),
        (["--preset", "tiny-mlm", "--length", "1024"], "tiny-mlm has positions for 512 tokens"),
    ],
)
def test_bad_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path):
    assert main(["plan", "--model", "olmoe", "--gpus", "8,16", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "6.92 billion parameters" in text
    assert "experts=2" in text
    assert (tmp_path / "plan.txt").read_text() == text
    assert len((tmp_path / "plan.csv").read_text().splitlines()) == 7
    assert main(["plan", "--preset", "tiny", "--length", "64"]) == 0
    assert "dim 128 lies outside the published runs (2048 to 7168)" in capsys.readouterr().out
    assert main(["plan", "--preset", "olmoe-1b-7b"]) == 0
    assert "6.92 billion parameters" in capsys.readouterr().out, "with its own vocabulary"
    assert main(["plan", "--preset", "tiny-vit"]) == 0
    with pytest.raises(RunError, match="multiples of --length"):
        Job(100, 64)
