"""The list of all prunings against smaller models that are really made, and the page."""

from typing import Any

import pytest

pytest.importorskip("transformers")
from pointsman.hf.gates import find_gates
from pointsman_lab.checkpoints.audit.trials import mean_of, measured
from pointsman_lab.checkpoints.choosing import METHODS
from pointsman_lab.checkpoints.cutting import cut
from pointsman_lab.checkpoints.text import text_batches
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread
from tests.library.hf.zoo import texts, tokenizer
from tools import pruning


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3_moe"])
def test_each_loss_of_the_list_is_that_of_the_smaller_model(name: str) -> None:
    model: Any = spread(zoo.tiny_model(name))
    gates = find_gates(model)
    (batch,) = text_batches(tokenizer(), texts(4), length=8, batch_size=2, max_tokens=16)
    subsets, losses = pruning.enumerated(model, batch, 7)
    assert losses.shape == (8, 8)
    for first, second in ((0, 3), (5, 5), (7, 1)):
        keep = {gates[0].layer: subsets[first], gates[1].layer: subsets[second]}
        smaller = cut(model, gates, {layer: [[one] for one in kept] for layer, kept in keep.items()})
        assert float(losses[first, second]) == pytest.approx(mean_of(measured(smaller, [batch])), abs=1e-5)


def test_the_page_has_every_method_and_its_regret() -> None:
    found = {
        name: {"loss": 2.0 + place / 10, "better": place} for place, name in enumerate(METHODS) if name != "random"
    }
    row = {"seed": 0, "original": 1.8, "best": 1.9, "mean": 2.5, "worst": 3.0, "prunings": 100, "methods": found}
    page = pruning.text([{**row, "model": name} for name in pruning.TRAINED])
    assert "| reap | 0.1000 | 0.1000 | 0.1000 | 0.0% | 0.0% |" in page
    assert "| random pruning, the mean of all | 0.6000 |" in page
    assert all(f"| {name} |" in page for name in found)
