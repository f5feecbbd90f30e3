"""Quality at any k against one long forward; entropies and loads against the routing itself; nothing left changed."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pointsman._errors import RunError, Stopped
from pointsman.control import set_top_k
from pointsman.experts import apply
from pointsman.ops.kernels import Kernels, using
from pointsman.recording import record_routing
from pointsman_lab.data.corpus import load_corpus
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from pointsman_lab.recipes import preset
from pointsman_lab.tasks.language_modelling.task import EvalProtocol, LanguageModelling, evaluate, quality

TOKENS = np.random.default_rng(0).integers(0, 20, 200).astype(np.uint8)
WHOLE = EvalProtocol(batch_size=1, segment_length=16, memory_length=200)


def build(router: str = "smoe", **changes: object) -> TransformerXL:
    config = TransformerXLConfig(
        20, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=16, num_experts=4, router=router, init_std=0.3,
        **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return TransformerXL(config).double()


@pytest.mark.parametrize("router", ["smoe", "hyperrouter", "xmoe"])
def test_every_k_equals_one_long_forward(router: str) -> None:
    model = build(router)
    results = evaluate(model, TOKENS, "byte", split="test", top_k=[1, 2, 4], protocol=WHOLE)
    assert [result["top_k"] for result in results] == [1, 2, 4]
    text = torch.from_numpy(TOKENS.astype(np.int64))
    for result in results:
        with torch.no_grad(), set_top_k(model.eval(), result["top_k"]), record_routing(model) as records:
            logits = model(text[None, :-1]).logits[0]
        nats = F.cross_entropy(logits, text[1:]).item()
        assert result["nats"] == pytest.approx(nats, rel=1e-9)
        assert result["value"] == pytest.approx(nats / math.log(2), rel=1e-9)
        assert (result["metric"], result["split"], result["tokens"]) == ("bits_per_character", "test", 199)
        for name, routing in records.items():
            found = result["routers"][name]
            probs = torch.softmax(routing.logits, -1)
            entropy = -(probs * probs.log()).sum(-1)
            if router != "xmoe":  # its temperature is not in the logits
                assert found["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-6)
                assert found["entropy_std"] == pytest.approx(entropy.std(correction=0).item(), rel=1e-6)
            load = torch.bincount(routing.experts.flatten(), minlength=4) / routing.experts.numel()
            assert found["load"] == pytest.approx(load.tolist())
            assert found["experts_per_token"] == result["top_k"]
    assert len({result["nats"] for result in results}) == 3


def test_rows_side_by_side_score_every_token_but_each_rows_first() -> None:
    protocol = EvalProtocol(batch_size=4, segment_length=7, memory_length=200)
    model = build()
    (result,) = evaluate(model, TOKENS, "byte", split="valid", top_k=[2], protocol=protocol)
    assert result["tokens"] == 199
    total, load = 0.0, torch.zeros(4)
    starts = [0, 50, 100, 150]
    for start, length in zip(starts, [50, 50, 50, 49], strict=True):
        row = torch.from_numpy(TOKENS[start : start + length + 1].astype(np.int64))
        with torch.no_grad(), set_top_k(model.eval(), 2), record_routing(model) as records:
            total += F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="sum").item()
        load += torch.bincount(records["layers.1.moe"].experts.flatten(), minlength=4)
    assert result["nats"] == pytest.approx(total / 199, rel=1e-9)
    assert result["routers"]["layers.1.moe"]["load"] == pytest.approx((load / load.sum()).tolist()), "no padding"


def test_a_budget_scores_whole_segments() -> None:
    protocol = EvalProtocol(batch_size=4, segment_length=8, memory_length=8, tokens=70)
    (result,) = evaluate(build(), TOKENS, "byte", split="test", top_k=[1], protocol=protocol)
    assert result["tokens"] == 64


def test_nothing_is_left_changed() -> None:
    model = build("thor").train()
    set_top_k(model, 3)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    first = evaluate(model, TOKENS, "byte", split="test", top_k=[1, 2], protocol=WHOLE)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert model.layers[0].moe.top_k == 3
    assert evaluate(model, TOKENS, "byte", split="test", top_k=[1, 2], protocol=WHOLE) == first
    assert evaluate(model, TOKENS, "byte", split="test", top_k=[2], protocol=WHOLE) == first[1:]


def test_a_mixers_entropy_is_given_before_and_after_mixing() -> None:
    (result,) = evaluate(build("smoe+similarity"), TOKENS, "byte", split="test", top_k=[2], protocol=WHOLE)
    layer = result["routers"]["layers.0.moe"]
    assert {"entropy", "entropy_std", "load", "mixed_entropy"} <= layer.keys()
    assert layer["mixed_entropy"] != layer["entropy"]


def test_a_model_without_routers_has_one_result() -> None:
    (result,) = evaluate(build("dense"), TOKENS, "byte", split="test", top_k=[1, 2, 4], protocol=WHOLE)
    assert result["top_k"] == 4
    assert result["routers"] == {}


def test_quality_by_level() -> None:
    assert quality("word", math.log(50)) == ("perplexity", pytest.approx(50))
    assert quality("byte", math.log(4)) == ("bits_per_character", pytest.approx(2))
    assert quality("word", 1e4) == ("perplexity", None)
    assert quality("byte", math.nan) == ("bits_per_character", None)


@pytest.mark.parametrize("k", [0, 5, -1, 1.5, True, "2"])
def test_a_wrong_k_is_refused(k: object) -> None:
    with pytest.raises(ValueError, match="whole numbers from 1 to 4"):
        evaluate(build(), TOKENS, "byte", split="test", top_k=[2, k], protocol=WHOLE)  # type: ignore[list-item]


def test_a_text_shorter_than_a_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="one segment needs 17"):
        evaluate(build(), TOKENS[:10], "byte", split="test", top_k=[2], protocol=WHOLE)


def test_a_validation_part_shorter_than_a_segment_is_refused_before_training(tmp_path: Path) -> None:
    for part, count in (("train", 900), ("valid", 9), ("test", 900)):
        (tmp_path / f"{part}.txt").write_text("ab" * count)
    task = LanguageModelling(load_corpus(str(tmp_path), cache_dir=tmp_path / "cache"))
    small = {"batch_size": 2, "segment_length": 16, "eval_segment_length": 16, "validate_every": 0}
    config = preset("tiny", data=str(tmp_path)).with_overrides(small)
    task.check(config)
    with pytest.raises(RunError, match="has 18 tokens, and one segment needs 65"):
        task.check(config.with_overrides({"eval_segment_length": 64}))


def test_padding_is_marked_in_what_a_diagnosis_reads(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab cd " * 100)
    config = preset("tiny", data=str(tmp_path / "text.txt")).with_overrides(
        {"eval_batch_size": 4, "eval_segment_length": 7}
    )
    task = LanguageModelling(load_corpus(config.data, cache_dir=tmp_path / "cache"))
    batches = list(task.observed(config, "test", None, torch.device("cpu")).batches)
    assert batches[0].mask is None
    assert (batches[-1].targets < 0).any()
    assert torch.equal(batches[-1].mask, batches[-1].targets >= 0)


def test_it_stops_when_asked() -> None:
    class Now:
        def is_set(self) -> bool:
            return True

    with pytest.raises(Stopped):
        evaluate(build(), TOKENS, "byte", split="test", top_k=[2], protocol=WHOLE, how=EvaluationContext(stop=Now()))


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: numbers out of tensors, and shapes that depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        known = "output_size" in (kwargs or {}) or "index" in func.__name__
        self.count += torch.Tag.data_dependent_output in func.tags
        self.count += torch.Tag.dynamic_output_shape in func.tags and not known
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("routing", [False, True])
def test_it_waits_for_a_device_once_a_k(routing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_path", lambda *_: "cuda")
    model, counts, how = build().float(), [], EvaluationContext(final=routing)
    with using(Kernels()):
        for segments in (2, 5):
            text = np.arange(2 * 16 * segments + 1, dtype=np.uint8) % 20
            with Waits() as waits:
                evaluate(model, text, "byte", split="test", top_k=[1], protocol=EvalProtocol(2, 16, 16), how=how)
            counts.append(waits.count)
    assert counts[0] == counts[1]
