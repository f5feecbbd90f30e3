"""`pointsman.testing`: a router that keeps the contract, and routers that break a promise each."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman import Routing, RoutingContext
from pointsman.routers.frame import registry
from pointsman.routers.frame.registry import LayerSpec
from pointsman.routers.frame.router import Router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scores
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.testing import Case, check_router, layer, routing, test_router


class Flat(LinearScorer):
    """Only the first expert's logit depends on the weight: the others' rows get no gradient."""

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return super().forward(hidden, context).detach() + 0 * self.weight.sum()


class Twice(Selector):
    """The best expert, k times."""

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        best = scores.probs.flatten(0, 1).max(-1, keepdim=True)
        return best.indices.expand(-1, k), best.values.expand(-1, k)


class Crash(LinearScorer):
    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        if not hidden.numel():
            raise RuntimeError("no tokens")
        return super().forward(hidden, context)


class Nothing(LinearScorer):
    def forward(self, hidden: Tensor, context: RoutingContext) -> Any:
        super().forward(hidden, context)


class Sees(LinearScorer):
    """Logits that are not numbers."""

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return super().forward(hidden, context) * torch.nan


class InPlace(LinearScorer):
    """Clamps the hidden states that the experts read, too."""

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        hidden.data.clamp_(-1, 1)
        return super().forward(hidden, context)


class Drawn(LinearScorer):
    """Noise in training that nothing declares: of torch's generator, or of one of its own."""

    def __init__(self, layer: LayerSpec, generator: torch.Generator | None) -> None:
        super().__init__(layer.dim, layer.num_experts)
        self.generator = generator

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        logits = super().forward(hidden, context)
        return logits + torch.randn(logits.shape, generator=self.generator) if self.training else logits


class Moved(LinearScorer):
    """A buffer that moves in training's forward, or a number that is no buffer and moves in `step_end`."""

    def __init__(self, layer: LayerSpec, in_forward: bool) -> None:
        super().__init__(layer.dim, layer.num_experts)
        self.in_forward, self.steps = in_forward, 1.0
        self.load: Tensor
        self.register_buffer("load", torch.zeros(layer.num_experts))

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        logits = super().forward(hidden, context)
        if self.in_forward and self.training and logits.numel():
            self.load += 0.01 * logits.detach().softmax(-1).mean((0, 1))
        return self.steps * logits - self.load

    def step_end(self) -> None:
        self.steps += not self.in_forward


class FourTimes(Selector):
    """4 k experts, which `cost` tells or not."""

    ragged = True

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        weights, experts = scores.probs.flatten(0, 1).sort(-1, descending=True)
        beyond = torch.arange(experts.shape[-1]) >= 4 * k
        return experts.masked_fill(beyond, -1), weights.masked_fill(beyond, 0)

    def cost(self, batch: int, tokens: int, k: int, dim: int) -> tuple[float, int]:
        return tokens * k * (4 if self.told else 1), 0


def with_loss(layer: LayerSpec, loss: Callable[[LossInput], Tensor]) -> Stages:
    return Stages(LinearScorer(layer.dim, layer.num_experts), losses={"own": Loss(loss, 0.1)})


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, build in {
        "flat": lambda layer: Stages(Flat(layer.dim, layer.num_experts)),
        "twice": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), select=Twice()),
        "crash": lambda layer: Stages(Crash(layer.dim, layer.num_experts)),
        "nothing": lambda layer: Stages(Nothing(layer.dim, layer.num_experts)),
        "sees": lambda layer: Stages(Sees(layer.dim, layer.num_experts)),
        "in-place": lambda layer: Stages(InPlace(layer.dim, layer.num_experts)),
        "drawn": lambda layer: Stages(Drawn(layer, None)),
        "drawn-apart": lambda layer: Stages(Drawn(layer, torch.Generator())),
        "moved": lambda layer: Stages(Moved(layer, True)),
        "unsaved": lambda layer: Stages(Moved(layer, False)),
        "more": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), select=FourTimes(False)),
        "told": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), select=FourTimes(True)),
        "vector": lambda layer: with_loss(layer, lambda given: given.logits.sum(-1)),
        "number": lambda layer: with_loss(layer, lambda given: 0.5),  # type: ignore[arg-type,return-value]
        "nan": lambda layer: with_loss(layer, lambda given: given.logits.mean() * torch.nan),
    }.items():
        build.__annotations__["layer"] = LayerSpec
        monkeypatch.setitem(registry.ROUTERS, name, registry.Entry(name, build, "", ""))


@pytest.mark.slow
def test_a_router_that_keeps_the_contract() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert check_router("smoe") is None
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.usefixtures("add")
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("flat", "flat breaks the contract: .*gradient.*score.weight: the gradient is 0"),
        ("twice", "twice breaks the contract: .*no token has an expert twice.*an expert twice at one token"),
        ("crash", "crash breaks the contract: .*no token .* are routed .*RuntimeError: no tokens"),
        ("nothing", "nothing: the scorer returned a NoneType, not logits or Scored"),
        ("sees", "k=1: logits: NaN"),
        ("in-place", "the router changes the hidden states in place"),
        ("drawn", "declared in training not stochastic, but torch's generator moved"),
        ("drawn-apart", "declared in training not stochastic, but two seeds differ"),
        ("moved", "a forward moves score.load, which belongs in step_end"),
        ("unsaved", "router.score.weight differs two steps later: is a state of the router no buffer"),
        ("more", "k=1: 4 experts a token; Selector.cost must say so"),
        ("vector", r"vector: the loss 'own' must be a scalar tensor, got \[33\]"),
        ("number", "number: the loss 'own' must be a scalar tensor, got float"),
        ("nan", "k=1: own: NaN"),
    ],
)
def test_a_broken_promise_is_named(spec: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_router(spec)


@pytest.mark.usefixtures("add")
def test_more_than_k_experts_that_are_declared() -> None:
    routing.shapes_and_sums(Case("told", num_experts=6))


def detached(routing: Routing) -> Routing:
    return replace(routing, losses={name: loss.detach() for name, loss in routing.losses.items()})


def unscaled(routing: Routing) -> Routing:
    for loss in routing.losses.values():
        loss.register_hook(lambda gradient: gradient.clamp_max(1))  # a scale above 1 is not applied
    return routing


@pytest.mark.parametrize(
    ("broken", "says"), [(detached, "no loss has a gradient"), (unscaled, "score.weight: the gradient at loss scale 2")]
)
def test_losses_that_do_not_reach_the_router_are_found(
    broken: Callable[[Routing], Routing], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Router.forward
    monkeypatch.setattr(Router, "forward", lambda *args: broken(own(*args)))
    with pytest.raises(AssertionError, match=says):
        layer.delivered_losses(Case("smoe"))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="did you mean 'smoe'"):
        check_router("smo")
    with pytest.raises(ValueError, match="'dense' is a baseline"):
        check_router("dense")
    with pytest.raises(ValueError, match="num_experts=1"):
        check_router("smoe", num_experts=1)


@pytest.mark.slow
def test_the_contract_as_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "pointsman.testing.plugin", "-p", "no:xdist"]
    words = ["--pyargs", "pointsman.testing", "--pointsman-router", "smoe:gate=sigmoid", "-k", "bad_input or shapes"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_project_may_have_options_of_its_own_called_router_and_import(tmp_path: Path) -> None:
    options = "".join(f"    parser.addoption({name!r})\n" for name in ("--router", "--import"))
    (tmp_path / "conftest.py").write_text(f"def pytest_addoption(parser):\n{options}")
    (tmp_path / "test_it.py").write_text(
        "def test_it(request):\n    assert request.config.getoption('--router') == 'a'\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "pointsman.testing.plugin", "-p", "no:xdist", "-q"]
    done = subprocess.run([*command, "--router", "a"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "name the router to test, as in --pointsman-router smoe"),
        ({"--pointsman-router": ["smo"]}, "did you mean 'smoe'"),
        (
            {"--pointsman-router": ["smoe"], "--pointsman-import": ["no.py"]},
            "--pointsman-import 'no.py': there is no such",
        ),
    ],
)
def test_bad_flags_of_pytest(options: dict[str, list[str]], says: str) -> None:
    metafunc = SimpleNamespace(config=SimpleNamespace(getoption=lambda name: options.get(name, [])))
    with pytest.raises(pytest.UsageError, match=says):
        test_router.pytest_generate_tests(metafunc)
