"""Shared by the tests of the report."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.report.fixtures import WORDS, dump


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison directory with two real, very small runs."""

    from pointsman_lab.models.transformer_xl import TransformerXLConfig
    from pointsman_lab.training.config import RunConfig
    from pointsman_lab.training.trainer import train

    root = tmp_path_factory.mktemp("trained")
    text = root / "text.txt"
    text.write_text(WORDS * 150)
    model = TransformerXLConfig(
        vocab_size=2, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=16, num_experts=4, top_k=2
    )
    config = RunConfig(
        model=model, data=str(text), steps=6, batch_size=2, segment_length=16, memory_length=16, eval_batch_size=2,
        eval_segment_length=16, eval_memory_length=16, eval_tokens=100, eval_top_k=(1, 2, 4), checkpoint_every=3,
    )  # fmt: skip
    path = root / "comparison"
    for router in ("smoe", "dense"):
        train(replace(config, model=replace(model, router=router)), path / "runs" / router / "seed-0")
    dump(path / "comparison.json", {"format": 1, "settings": {"model": {}}, "routers": ["smoe", "dense"], "seeds": [0]})
    return path
