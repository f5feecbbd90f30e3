"""torch.export of the layer: the program runs on any number of tokens, also after saving and loading."""

import io

import pytest
import torch
from torch.export import Dim, export, load, save

from pointsman import MoE


@pytest.mark.parametrize(
    "router",
    [
        "smoe:balance=0.1", "xmoe+similarity", "top-p", "default", "smoe:weigh=input",
        "smoe:nulls=4:kind=mixed", "loss-free:groups=2:kept=1",
    ],
)  # fmt: skip
def test_an_exported_layer_gives_what_the_layer_gives(router: str) -> None:
    layer = MoE(16, 32, 4, router=router).eval()
    program = export(layer, (torch.randn(2, 8, 16),), dynamic_shapes=({1: Dim("tokens", min=2, max=4096)},))
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    hidden = torch.randn(2, 1201, 16)  # the layer itself goes another way with so many tokens
    with torch.no_grad():
        torch.testing.assert_close(load(file).module()(hidden), layer(hidden))


def test_an_exported_layer_says_that_it_has_no_backward() -> None:
    program = export(MoE(8, 16, 4).eval(), (torch.randn(1, 3, 8),))
    with pytest.raises(RuntimeError, match="for inference"):
        program.module()(torch.randn(1, 3, 8)).sum().backward()
