"""`examples/moe_in_one_file.py` is the library's layer: outputs, losses, gradients and what a step changes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import pointsman

FILE = Path(__file__).parents[2] / "examples" / "moe_in_one_file.py"
DIM, HIDDEN, EXPERTS = 8, 16, 6
NAMES = {"score.hypernetwork.0.weight": "w1", "score.hypernetwork.0.bias": "b1", "score.hypernetwork.2.weight": "w2",
         "score.hypernetwork.2.bias": "b2"}  # fmt: skip
ROUTERS = ["smoe", "hyperrouter", "xmoe", "loss-free", "smoe+similarity", "xmoe+similarity", "loss-free+similarity"]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("moe_in_one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def theirs(name: str) -> str | None:
    """The file's name of a parameter or buffer of the library's layer; None for the mixer's, which is a constant."""
    if not name.startswith("router."):
        return name.removeprefix("experts.")
    inner = name.removeprefix("router.")
    return None if inner.startswith("mix.") else f"router.{NAMES.get(inner, inner.split('.', 1)[1])}"


def both(page: ModuleType, router: str, top_k: int) -> tuple[pointsman.MoE, nn.Module]:
    """The library's layer and the file's, in float64, with the same weights."""
    layer = pointsman.MoE(DIM, HIDDEN, EXPERTS, top_k=top_k, router=router).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    one = page.MoE(DIM, HIDDEN, EXPERTS, top_k, router).double()
    one.load_state_dict({new: value for name, value in layer.state_dict().items() if (new := theirs(name))})
    return layer, one


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


@pytest.mark.filterwarnings("ignore:.*with top_k=1 and renormalised weights")
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
@pytest.mark.parametrize("router", ROUTERS)
def test_outputs_losses_and_gradients_are_the_librarys(page: ModuleType, router: str, k: int) -> None:
    for built in {1, 2}:
        layer, one = both(page, router, built)
        pointsman.set_top_k(layer, k)
        page.set_top_k(one, k)
        hidden = torch.randn(3, 7, DIM, dtype=torch.float64)
        target = torch.randn_like(hidden)
        output, expected = one(hidden), layer(hidden)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        loss = page.add_losses((output * target).sum(), one)
        wanted = pointsman.add_losses((expected * target).sum(), layer)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        mine = gradients(one, loss)
        for name, gradient in gradients(layer, wanted).items():
            new = theirs(name)
            assert new is not None
            if gradient is not None:
                torch.testing.assert_close(mine[new], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("router", ["xmoe", "loss-free"])
def test_a_step_changes_what_the_librarys_does(page: ModuleType, router: str) -> None:
    layer, one = both(page, router, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (layer, one)]
    for _ in range(3):
        hidden = torch.randn(3, 7, DIM, dtype=torch.float64)
        for model, optimizer, library in zip((layer, one), optimizers, (pointsman, page), strict=True):
            optimizer.zero_grad()
            library.add_losses(model(hidden).square().mean(), model).backward()
            optimizer.step()
            library.step_end(model)
    state = one.state_dict()
    for name, value in layer.state_dict().items():
        if new := theirs(name):
            torch.testing.assert_close(state[new], value, rtol=1e-6, atol=1e-6)


def test_it_needs_torch_alone_trains_and_is_short(page: ModuleType) -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 300
    untrained, trained = page.train("smoe", steps=1), page.train("smoe", steps=100)
    assert trained[2] < 0.7 * untrained[2]
    imported = {line.split()[1].split(".")[0] for line in FILE.read_text(encoding="utf-8").splitlines()
                if line.startswith(("import ", "from "))}  # fmt: skip
    assert imported - set(sys.stdlib_module_names) == {"torch"}
