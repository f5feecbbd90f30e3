"""The plan against published figures, a model that is really divided, and bad input."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import isclose
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman import MoE
from pointsman.parallel import shard
from pointsman.parallel.layout import Layout
from pointsman.ranks import Ranks
from pointsman_lab.cli.main import main
from pointsman_lab.models.config import build_model
from pointsman_lab.planning import (
    STATE,
    Shape,
    distinct_ranks,
    exchanged_bytes,
    gathered_bytes,
    layouts,
    plan,
    state_bytes,
)
from pointsman_lab.registry import find_preset, preset_config


def published(preset: str) -> Shape:
    return Shape.of(preset_config(preset, find_preset(preset)["vocabulary"]), preset)


@pytest.mark.parametrize(("preset", "billions"), [("olmoe-1b-7b", 6.92), ("qwen3-30b-a3b", 30.53)])
def test_parameters_are_the_published_ones(preset: str, billions: float):
    assert isclose(published(preset).parameters / 1e9, billions, rel_tol=2e-3)


def test_a_matrix_of_the_embeddings_shape_is_no_second_embedding() -> None:
    for vocabulary in (128, 255):  # as wide as the model, and not
        shape = Shape.of(preset_config("tiny-decoder", vocabulary), "tiny-decoder")
        assert (shape.embeddings, shape.inputs) == (128 * vocabulary, 0)


@pytest.mark.parametrize(("preset", "change"), [("tiny-mlm", {"max_length": 1024}), ("tiny-vit", {"image_size": 64})])
def test_learned_positions_take_no_operations(preset: str, change: dict[str, int]):
    config = preset_config(preset, 128)
    short, long = (Shape.of(one, preset) for one in (config, replace(config, **change)))
    assert short.parameters < long.parameters
    assert short.active_parameters == long.active_parameters


def test_operations_are_the_published_ones():
    """TFLOP/s a GPU over tokens/s a GPU in sequences of 4,096, of NeMo AutoModel's performance summary on H100."""
    assert isclose(published("qwen3-30b-a3b").flops(4096), 277e12 / 12040, rel_tol=6e-3)


def test_distinct_ranks_by_counting():
    """All choices of k = 3 of E = 8 experts on R = 4 ranks, counted."""
    choices = [set(choice) for choice in product(range(8), repeat=3) if len(set(choice)) == 3]
    counted = sum(len({expert // 2 for expert in choice}) for choice in choices) / len(choices)
    assert isclose(distinct_ranks(4, 8, 3), counted)
    assert isclose(distinct_ranks(8, 64, 8), 5.43, abs_tol=0.005)  # OLMoE on 8 ranks
    assert exchanged_bytes(published("olmoe-1b-7b"), Layout(8)) == 0


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        with patch.object(Ranks, "gather", lambda ranks, value: [value] * ranks.count):
            yield
    finally:
        dist.destroy_process_group()


class Gathered(TorchDispatchMode):
    """Inside `with`: bytes of a rank's own parts in collectives, by the name of the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"):
            own: list[Tensor] = tree_leaves(args[1] if name == "_allgather_base_" else args[0])
            self.bytes[name] += sum(part.numel() * part.element_size() for part in own if isinstance(part, Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of an RMS norm under autocast on a CPU
@pytest.mark.parametrize("preset", ["tiny", "tiny-decoder"])
@pytest.mark.parametrize("words", ["", "replicas=2", "experts=4", "experts=2,replicas=2"])
def test_a_divided_model_holds_and_gathers_what_the_plan_counts(eight_ranks: None, preset: str, words: str):
    config, layout = preset_config(preset, 100), Layout.parse(words, 8)
    shape, model = Shape.of(config, preset), build_model(config)
    shard.parallelize(model, layout, Ranks(0, 8), gather=torch.bfloat16)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert isclose(STATE * held, state_bytes(shape, layout), rel_tol=2e-3), "but for padding"
    if layout.experts > 1:  # the exchange needs ranks that answer
        return
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with Gathered() as gathered, torch.autocast("cpu", torch.bfloat16):
        model(tokens, tokens).loss.backward()
    over_shards = (gathered.bytes["_allgather_base_"] + gathered.bytes["_reduce_scatter_base_"]) * (layout.shards - 1)
    over_replicas = gathered.bytes["allreduce_"] * 2 * (1 - 1 / layout.replicas)
    assert isclose(over_shards + over_replicas, gathered_bytes(shape, layout), rel_tol=5e-3)
    one = Layout(8, experts=8)
    assert gathered_bytes(shape, one) < gathered_bytes(shape, Layout(8))
    assert gathered_bytes(shape, Layout(1)) == 0


def test_positions_are_no_second_embedding_and_biases_are_the_experts():
    for vocabulary in (204, 1000):  # with as many learned positions as tokens, and with fewer
        config = preset_config("tiny-mlm", vocabulary)
        with torch.device("meta"):
            model = build_model(config)
        shape = Shape.of(config, "tiny-mlm")
        (layer,) = (module for module in model.modules() if isinstance(module, MoE))
        own = sum(one.numel() for one in layer.experts.parameters())
        assert shape.expert_parameters == own
        assert (shape.inputs, shape.embeddings) == (0, vocabulary * config.dim)


@pytest.mark.parametrize("preset", ["tiny", "small", "tiny-decoder", "mutual-glam"])
def test_a_preset_has_the_parameters_of_its_model(preset: str):
    config = preset_config(preset, 100)
    with torch.device("meta"):
        model = build_model(config)
    shape = Shape.of(config, preset)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    chosen = shape.sparse_layers * shape.expert_parameters // shape.experts
    assert shape.active_parameters <= shape.parameters - chosen * (shape.experts - shape.top_k)


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="no sparse layer"):
        Shape.of(preset_config("tiny", 100, router="dense"), "tiny")


def test_every_layout_divides():
    found = list(layouts(8, 12))
    assert len(found) == len(set(found)) == 9
    for layout in found:
        layout.check_experts(12)
    assert len(plan(published("olmoe-1b-7b"), [8], "experts=4").rows) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--preset", "olmoe-1b-7"], "did you mean 'olmoe-1b-7b'"),
        ([], "required: --preset"),
        (["--preset", "olmoe-1b-7b", "--parallel", "experts=3"], "1, 2, 4, 8 do"),
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
    assert main(["plan", "--preset", "olmoe-1b-7b", "--gpus", "8,16", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "6.92 billion parameters" in text
    assert "experts=2" in text
    assert (tmp_path / "plan.txt").read_text() == text
    assert len((tmp_path / "plan.csv").read_text().splitlines()) == 26
    assert main(["plan", "--preset", "tiny", "--length", "64"]) == 0
    assert main(["plan", "--preset", "tiny-vit"]) == 0
