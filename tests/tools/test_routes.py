"""Every route of equal cost: exact losses, refusals, and groups of tokens that another model sorts."""

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman import record_routing
from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.models.config import build_model
from pointsman_lab.recipes import preset
from tools import routes
from tools.routes import losses, measured, summary, table


def model_and_text(name: str = "tiny-decoder", **settings: Any) -> tuple[Any, Tensor, Tensor]:
    shape: Any = preset(name).model
    model = build_model(replace(shape, num_experts=4, vocab_size=16, **settings)).eval()
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(0))
    return model, tokens[:, :-1], tokens[:, 1:]


def test_a_token_s_loss_on_its_own_route_is_among_those_of_all_routes() -> None:
    model, inputs, targets = model_and_text()
    own, every = losses(model, inputs, targets, 2)
    with torch.no_grad(), record_routing(model) as records:
        logits = model(inputs).logits
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none") / math.log(2)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    choices = list(combinations(range(4), 2))
    chosen = [choices.index(tuple(sorted(one))) for one in list(records.values())[-1].chosen.tolist()]
    torch.testing.assert_close(every[chosen, torch.arange(16)], own)
    assert every.shape == (6, 16)
    assert (every.std(0) > 0).all()


@pytest.mark.parametrize(
    ("name", "settings", "k", "message"),
    [
        ("tiny-glam", {}, 2, "the experts of one token change another's loss"),
        ("tiny-decoder", {"router": "loss-free:nulls=8"}, 2, "other than 2 of its 4 experts"),
        ("tiny-decoder", {}, 4, "2 to 1,000 choices are expected, not 1"),
    ],
)
def test_what_is_not_exact_is_refused(name: str, settings: dict[str, Any], k: int, message: str) -> None:
    model, inputs, targets = model_and_text(name, **settings)
    with pytest.raises(RunError, match=message):
        losses(model, inputs, targets, k)


def test_tokens_are_grouped_by_what_sorts_them() -> None:
    every = torch.tensor([[8.0, 1, 2, 3], [6, 3, 2, 1], [7, 2, 2, 2.5]]).double()
    found = summary(torch.tensor([6.0, 2, 2, 1]).double(), every, torch.tensor([9.0, 0, 2, 3]))
    assert found["hardest"] == {"own": 6.0, "mean": 7.0, "best": 6.0}
    assert found["easiest"] == {"own": 2.0, "mean": 2.0, "best": 1.0}
    assert found["all"]["own"] == 11 / 4


def test_the_runs_of_a_comparison_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(routes, "TOKENS", 256)
    Path("text.txt").write_text("the cat sat on the mat. " * 1000)
    told = "compare --data text.txt --preset tiny-decoder --routers smoe,dense --steps 2 --seeds 2 --eval-tokens 256"
    assert main([*told.split(), "--set", "model.num_experts=3", "--set", "model.dim=32", "--out", "cmp"]) == 0
    found = measured(Path("cmp"))["bits"]
    assert [*found] == [
        f"smoe, {kind}, {of}" for of in ("all", "easiest", "hardest") for kind in ("own", "mean", "best")
    ]
    assert [len(values) for values in found.values()] == [2] * 9
    for of in routes.GROUPS:
        assert found[f"smoe, best, {of}"][1] < found[f"smoe, own, {of}"][1]
    assert "smoe" in table(found)
    with pytest.raises(RunError, match="has no row 'xmoe'"):
        measured(Path("cmp"), ["xmoe"])
    with pytest.raises(RunError, match="rows with a router are measured"):
        measured(Path("cmp"), ["dense"])
    monkeypatch.setattr(routes, "TOKENS", 100_000)
    with pytest.raises(RunError, match="its test text has"):
        measured(Path("cmp"))
