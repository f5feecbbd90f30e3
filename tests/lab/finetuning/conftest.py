"""A tiny comparison, trained once for all tests of fine-tuning, and a task that its models can learn."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman_lab.progress import Quiet
from pointsman_lab.recipes import preset
from pointsman_lab.training.compare import Plan, compare

ROUTERS = ("smoe", "xmoe", "dense")


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A comparison directory with one seed of `ROUTERS`. Tests copy it, or write elsewhere."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the film was good, the play was bad. \n" * 800)
    config = preset("tiny", data=str(folder / "text.txt"), steps=6).with_overrides(
        {"model.dim": 16, "model.num_layers": 2, "model.num_experts": 4, "model.hidden_dim": 16, "model.num_heads": 2,
         "model.head_dim": 8, "batch_size": 4, "eval_tokens": 400, "validate_every": 0, "eval_batch_size": 4}
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        compare(Plan(config, ROUTERS, (0,)), folder / "runs", progress=Quiet())
        yield folder / "runs"


@pytest.fixture
def run(comparison: Path) -> Path:
    """The pre-trained run of smoe."""
    return comparison / "runs" / "smoe" / "seed-0"


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Reviews whose last word tells the class, in three parts."""
    folder = tmp_path_factory.mktemp("task")
    draw = random.Random(0)
    for part, count in (("train", 160), ("valid", 20), ("test", 40)):
        rows = ["text,label"]
        for index in range(count):
            words = " ".join(draw.choice(["the", "film", "play", "was", "so"]) for _ in range(draw.randrange(1, 8)))
            rows.append(f"{words} {'good,pos' if index % 2 else 'bad,neg'}")
        (folder / f"{part}.csv").write_text("\n".join(rows) + "\n")
    return str(folder)
