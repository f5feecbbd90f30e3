"""check_trainer on a step of one's own, on one process and on two."""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pointsman.testing import check_trainer
from pointsman.testing.trainers import check
from pointsman.testing.trainers.case import Batch, Trainer
from pointsman.testing.trainers.check import find_trainer, verdicts
from pointsman.testing.trainers.own import OwnStep


def step(model: Any, batches: Sequence[Batch], max_norm: float | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def times_the_ranks(model: Any, batches: Sequence[Batch]) -> None:
    """transformers#48690: the loss that a process returns is multiplied by their number."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        outputs = model(**batch)
        more = (ranks - 1) * (outputs.aux_loss or 0)
        ((outputs.loss + more) / len(batches)).backward()
    optimizer.step()


def test_a_step_of_your_own() -> None:
    pytest.importorskip("transformers")
    asked = ["accumulation", "clip norm", "resume", "bias once a step"]
    assert [one.holds for one in check_trainer(step, "pointsman", asked)] == [True] * 4
    with pytest.raises(AssertionError, match=r"step changes what the router learns: top-k: x 1 at k = 1, x 2 at k = 2"):
        check_trainer(step, lines=["top-k"])
    precision = next(iter(verdicts(step, lines=["router in float32"])))
    assert (precision.holds, precision.told) == (None, "the step takes no bf16")


def two_optimizers(model: Any, batches: Sequence[Batch], max_norm: float | None = None) -> None:
    gates = [parameter for name, parameter in model.named_parameters() if "gate.weight" in name]
    others = [parameter for name, parameter in model.named_parameters() if "gate.weight" not in name]
    optimizers = [torch.optim.SGD(parameters, 0.1) for parameters in (others, gates)]
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def several_evaluations(model: Any, batches: Sequence[Batch], max_norm: float | None = None) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        losses = [model(**batch).loss / len(batches) for batch in batches]
        sum(losses).backward()  # type: ignore[union-attr]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return sum(losses)

    optimizer.step(closure)


@pytest.mark.parametrize("own", [two_optimizers, several_evaluations])
def test_gradients_of_several_optimizers_and_of_the_first_evaluation_are_read(own: Any) -> None:
    pytest.importorskip("transformers")
    asked = ["accumulation", "clip norm"]
    assert [one.holds for one in check_trainer(own, "pointsman", asked)] == [True] * 2


def test_what_is_unknown_is_refused() -> None:
    cases: tuple[tuple[Any, tuple[str, ...], str], ...] = (
        ("trainer", (), "allowed: a function, FILE.py:function"),
        ("nothing.py:step", (), "there is no file nothing.py"),
        ("no_such.deep:step", (), "trainer 'no_such.deep:step': there is no module 'no_such'"),
        (f"{__file__}:stepp", (), "has no function 'stepp'"),
        (step, ("packed",), "did you mean 'packing'"),
    )
    for bad, lines, told in cases:
        with pytest.raises(ValueError, match=told):
            check_trainer(bad, lines=lines)
    with pytest.raises(ValueError, match="allowed: own, pointsman"):
        check_trainer(step, "none")
    assert isinstance(find_trainer(f"{__file__}:step"), OwnStep)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package `my_package` of two files, and the same two files beside it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    source = """
from __future__ import annotations
from dataclasses import dataclass
from pointsman.testing.trainers.case import Trainer
from {}my_own import RATE

@dataclass
class Config:
    rate: float = RATE

class Mine(Trainer):
    pass

def step(model, batches):
    return Config()
"""
    (tmp_path / "my_package").mkdir()
    for name, text in (("my_own", "RATE = 1"), ("my_file", source.format("")), ("__init__", "")):
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / "my_package" / f"{name}.py").write_text(text.replace("from my_own", "from .my_own"))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("my_", "pointsman_trainer_"))]:
        del sys.modules[name]


@pytest.mark.parametrize("module", ["my_package.my_file", "my_file", "__main__"])
def test_what_another_process_imports(module: str, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's file as part of it; of a script, which is __main__ here alone, the file."""
    if module == "__main__":
        found = ModuleType("__main__")
        found.__file__, found.__spec__ = str(written / "my_file.py"), None
        monkeypatch.setitem(sys.modules, "__main__", found)
        exec(compile((written / "my_file.py").read_text(), found.__file__, "exec"), found.__dict__)
    else:
        found = import_module(module)
    place = module if "." in module else written / "my_file.py"
    monkeypatch.setattr(check, "_ranks", lambda trainer, name, balance: name)
    for trainer, name in ((found.step, "step"), (found.Mine(), "Mine")):
        told: Any = next(iter(verdicts(trainer, lines=["ranks"])))
        assert told == f"{place}:{name}"
        assert isinstance(find_trainer(told), OwnStep if name == "step" else Trainer)


def test_a_class_of_a_notebook_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec("class Mine:\n    pass", module.__dict__)
    assert check._reference(module.__dict__["Mine"]) == ""


@pytest.mark.slow
def test_two_processes_see_a_loss_that_is_multiplied_by_their_number() -> None:
    pytest.importorskip("transformers")
    assert next(iter(verdicts(step, lines=["ranks"]))).holds
    wrong = next(iter(verdicts(f"{Path(__file__)}:times_the_ranks", lines=["ranks"])))
    assert (wrong.holds, wrong.told) == (False, "x 2 on 2 processes")


@pytest.mark.slow
def test_each_check_compiles() -> None:
    """torch compiles a function a few times and then runs it as it is, without an error; the line must not hold so."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            torch._dynamo.utils.counters.clear()
            check_trainer(step, lines=["compiled"])
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
