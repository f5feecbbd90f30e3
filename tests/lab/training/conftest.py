"""A text, a corpus and settings small enough for a training run in a test."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pointsman_lab.data.corpus import Corpus, load_corpus
from pointsman_lab.models.transformer_xl import TransformerXLConfig
from pointsman_lab.training.config import RunConfig


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(50)]
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("".join(draw.choice(words) + draw.choice(" \n") for _ in range(6000)))
    return file


@pytest.fixture
def corpus(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(str(text_file), cache_dir=tmp_path_factory.getbasetemp() / "tokens")


@pytest.fixture
def settings(text_file: Path) -> Callable[..., RunConfig]:
    """settings(router, key=value, **{"model.key": value}) -> RunConfig of a run of 8 short steps."""

    def make(router: str = "smoe", **changes: Any) -> RunConfig:
        model = TransformerXLConfig(
            64, num_layers=2, dim=32, num_heads=2, head_dim=16, hidden_dim=32, num_experts=4, router=router
        )
        config = RunConfig(
            model=model,
            data=str(text_file),
            steps=8,
            batch_size=4,
            segment_length=16,
            memory_length=16,
            eval_batch_size=4,
            eval_segment_length=16,
            eval_memory_length=16,
            eval_tokens=256,
            valid_tokens=64,
            learning_rate=3e-3,
            validate_every=4,
            checkpoint_every=3,
            keep_checkpoints=3,
            log_every=1,
        )
        return config.with_overrides(changes)

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
