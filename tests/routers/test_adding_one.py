"""The example of docs/routers/index.md is a router, as it stands."""

import re
from pathlib import Path

import torch

from pointsman import MoE
from pointsman.routers import registry


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "routers" / "index.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    try:
        exec(found[1], {})
        layer = MoE(8, 8, 4, router="mine:sharpness=2")
        assert layer(torch.randn(2, 3, 8)).shape == (2, 3, 8)
        assert layer.router.score.sharpness == 2.0
        assert registry.entry("mine").summary.startswith("One line that")
    finally:
        registry._ROUTERS.pop("mine", None)
