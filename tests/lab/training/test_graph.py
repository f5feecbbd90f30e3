"""Graphed steps: on a CPU through a tape that stands for a CUDA graph, on a device against eager steps."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman import add_losses, list_routers, losses
from pointsman._errors import RunError
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.experts import apply
from pointsman.kernels import attention, experts
from pointsman.routers.frame import router as router_module
from pointsman.routers.frame.stages import TopK
from pointsman.routers.mutual import posterior, streaming
from pointsman_lab.data.corpus import Corpus
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.runs.checkpoints import open_checkpoint
from pointsman_lab.tasks.language_modelling.task import LanguageModelling
from pointsman_lab.training import state as state_module
from pointsman_lab.training.checkpoint import write_checkpoint
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.failures import Diverged
from pointsman_lab.training.graph import WARM_UP, PassResult, cuda_recorder
from pointsman_lab.training.kernels import choose_kernels
from pointsman_lab.training.objectives import objective_of
from pointsman_lab.training.state import TrainingState
from pointsman_lab.training.trainer import train
from tests.library.kernels.tools import interpreted, needs_triton

Settings = Callable[..., RunConfig]
NOISY = "smoe:noise=0.5:balance=0.01:z_loss=0.1:capacity=1.0"
ROUTERS = ["hyperrouter+similarity", "xmoe", "smoe+attention", NOISY, "thor"]


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class WaitingError(RuntimeError):
    """An operator that would wait for a device."""


class NoWaiting(TorchDispatchMode):
    """Refuses operators whose result a host must know (numbers out of tensors, shapes that depend on data), and copies
    between host and device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        masks = any(index.dtype == torch.bool for index in tensors(args[1:2])) if "index" in func.__name__ else True
        known = "output_size" in kwargs
        if func is torch.ops.aten.lift_fresh.default:
            raise WaitingError("a tensor made of numbers on the host")
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and masks and not known
        ):
            raise WaitingError(str(func))
        result = func(*args, **kwargs)
        if len({tensor.device.type for tensor in tensors((args, kwargs, result))}) > 1:
            raise WaitingError(f"{func} between host and device")
        return result


class Tape(NoWaiting):
    """A graph's stand-in: notes every operator, and runs the same again on the same tensors, in their memory.

    What Python does between operators is not repeated, a number that an operator was given stays what it was, and
    before the first replay nothing has been computed: as with a CUDA graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # what is written over, and what was there
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        for tensor in tensors([given.get(name) for name in written]):
            place = tensor.untyped_storage().data_ptr()
            if place not in self.made and place not in self.before:
                self.before[place] = tensor.untyped_storage(), tensor.untyped_storage().clone()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, result))
            if not written:
                self.made |= {tensor.untyped_storage().data_ptr() for tensor in tensors(result)}
        return result

    def forget(self) -> None:
        for storage, held in self.before.values():
            storage.copy_(held)
        for _, args, kwargs, result in self.calls:
            given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
            for tensor in tensors(result):
                if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in given:
                    tensor.detach().fill_(math.nan)

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, result in self.calls:
                for old, new in zip(tensors(result), tensors(func(*args, **kwargs)), strict=True):
                    if new is not old:
                        old.copy_(new)


class TapeRecorder:
    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.tape = Tape()

    def run(self, function: Callable[[], PassResult]) -> PassResult:
        return function()

    def capture(self, function: Callable[[], PassResult]) -> tuple[Callable[[], None], PassResult]:
        self.captured += 1
        random = torch.get_rng_state()
        with Tape() as tape:
            passed = function()
        self.tape = tape
        tape.forget()
        torch.set_rng_state(random)

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay, passed


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors take the way of those on a GPU, wherever they are."""
    monkeypatch.setattr(apply, "_path", lambda *_: "cuda")
    monkeypatch.setattr(posterior, "_nothing_to_wait_for", lambda _: False)


def state_of(config: RunConfig, corpus: Corpus, device: str, recorder: TapeRecorder | None = None) -> TrainingState:
    task = LanguageModelling(corpus)
    return TrainingState(task.prepared(config), task, torch.device(device), recorder)


def state(config: RunConfig, corpus: Corpus, recorder: TapeRecorder | None = None) -> TrainingState:
    config = config.with_overrides({"cuda_graph": recorder is not None})
    return state_of(config, corpus, "cpu", recorder)


def step(one: TrainingState, monitor: RoutingMonitor | None = None) -> dict[str, Any]:
    row = one.train_step(monitor)
    return {key: value for key, value in row.items() if "seconds" not in key}


def assert_equal(one: TrainingState, other: TrainingState) -> None:
    for kind, mine in one.tensors().items():
        theirs = other.tensors()[kind]
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name
    for name, parameter in one.parameters.items():
        mine_gradient, their_gradient = parameter.grad, other.parameters[name].grad
        assert (mine_gradient is None) == (their_gradient is None), name
        assert mine_gradient is None or their_gradient is None or torch.equal(mine_gradient, their_gradient), name


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("router", ROUTERS)
def test_graphed_training_is_eager_training(settings: Settings, corpus: Corpus, router: str) -> None:
    config = settings(router, steps=12, train_top_k="2:3", accumulation=2)
    recorder = TapeRecorder()
    eager, graphed = state(config, corpus), state(config, corpus, recorder)
    monitors = [RoutingMonitor(one.model, 5) for one in (eager, graphed)]
    seen = []
    for _ in range(12):
        row = step(eager, monitors[0])
        assert step(graphed, monitors[1]) == row
        rows = monitors[0].rows()
        assert monitors[1].rows() == rows
        assert losses(graphed.model) == losses(eager.model)
        seen.append((row["top_k"], len(rows)))
    assert {k for k, _ in seen} == {2, 3}
    assert recorder.captured == 2, "one graph for each k"
    assert recorder.replayed == 12 - 1 - 2 * WARM_UP, "the first step has no memory"
    assert any(count for _, count in seen)
    assert_equal(eager, graphed)
    assert any(memory is not None for memory in graphed.memories)


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize(
    "changes", [{"precision": "bfloat16"}, {"memory_length": 0}, {"memory_length": 24}, {"model.router": "dense"}]
)
def test_settings_under_which_steps_are_graphed(settings: Settings, corpus: Corpus, changes: dict[str, Any]) -> None:
    config, recorder = settings(train_top_k="2").with_overrides(changes), TapeRecorder()
    eager, graphed = state(config, corpus), state(config, corpus, recorder)
    for _ in range(7):
        assert step(graphed) == step(eager)
    assert recorder.replayed
    assert_equal(eager, graphed)


@pytest.mark.usefixtures("gpu_path")
def test_the_first_step_of_an_epoch_has_no_memory_and_leaves_the_graph(settings: Settings, corpus: Corpus) -> None:
    config, recorder = settings(train_top_k="2", lr_schedule="constant"), TapeRecorder()
    eager, graphed = state(config, corpus), state(config, corpus, recorder)
    eager.step = graphed.step = eager.batches.steps_per_epoch - 5
    eager.batches.batch(eager.step)
    for _ in range(8):
        assert step(graphed) == step(eager)
    assert (recorder.captured, recorder.replayed) == (1, 8 - 2 * 1 - WARM_UP)
    assert_equal(eager, graphed)


@pytest.mark.usefixtures("gpu_path")
def test_a_longer_evaluation_does_not_disturb_the_graph(settings: Settings, corpus: Corpus) -> None:
    recorder = TapeRecorder()
    graphed, eager = state(settings(train_top_k="2"), corpus, recorder), state(settings(train_top_k="2"), corpus)
    for number in range(7):
        assert step(graphed) == step(eager)
        if number == 5:  # replaces the table of positions
            for one in (graphed, eager):
                one.model.eval()(torch.zeros(1, 100, dtype=torch.int64))
    assert_equal(eager, graphed)


@pytest.mark.usefixtures("gpu_path")
def test_a_resumed_run_goes_on_as_the_eager_one(settings: Settings, corpus: Corpus, tmp_path: Path) -> None:
    config = settings("smoe+attention", steps=11, train_top_k="2")
    eager, graphed = state(config, corpus), state(config, corpus, TapeRecorder())
    for _ in range(5):
        step(graphed)
    path = write_checkpoint(tmp_path, 5, graphed.tensors(), {}, 1)
    recorder = TapeRecorder()
    resumed = state(config, corpus, recorder)
    resumed.restore(open_checkpoint(path))
    for _ in range(6):
        step(resumed)
    for _ in range(11):
        step(eager)
    assert recorder.replayed == 6 - WARM_UP
    assert_equal(eager, resumed)


@pytest.mark.usefixtures("gpu_path")
def test_a_replay_that_diverges_names_the_layer_and_changes_nothing(settings: Settings, corpus: Corpus) -> None:
    told = []
    for recorder in (None, TapeRecorder()):
        one = state(settings(train_top_k="2"), corpus, recorder)
        for _ in range(6):
            step(one)
        with torch.no_grad():
            one.model.get_parameter("layers.1.moe.experts.w_out").fill_(math.nan)
        before = {name: weight.detach().clone() for name, weight in one.model.named_parameters()}
        rest = {name: value.clone() for name, value in one.tensors()["trainer"].items()}
        with pytest.raises(Diverged) as error:
            one.train_step()
        told.append(str(error.value))
        for name, weight in before.items():
            assert torch.equal(weight.nan_to_num(), one.model.get_parameter(name).nan_to_num())
        for name, value in one.tensors()["trainer"].items():  # Adam's, and memories
            assert torch.equal(value, rest[name]), name
        assert one.step == 6
    assert told[0] == told[1]
    assert "step 7" in told[0]
    assert "layer layers.1.moe.experts" in told[0]


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("router", ["xmoe", "loss-free", "smoe+attention:heads=lowest-entropy"])
def test_steps_that_nobody_reads_wait_for_nothing(settings: Settings, corpus: Corpus, router: str) -> None:
    config = settings(router, train_top_k="2", steps=12)
    eager, graphed = state(config, corpus), state(config, corpus, TapeRecorder())
    for number in range(12):
        row, read = step(eager), number == 8
        assert graphed.graph
        with NoWaiting() if graphed.graph.replayed and not read else nullcontext():
            found = graphed.train_step(read=read)
        if graphed.graph.replayed and not read:
            assert found == {key: row[key] for key in ("kind", "step", "top_k", "learning_rate")}
        else:
            assert {key: value for key, value in found.items() if "seconds" not in key} == row
    graphed.check()
    assert graphed.step == 12
    assert_equal(eager, graphed)


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("router", ["xmoe", "loss-free", "smoe+attention:heads=lowest-entropy"])
@pytest.mark.parametrize("how", ["weight", "gradient"])
def test_divergence_that_is_read_later_changes_nothing(
    settings: Settings, corpus: Corpus, router: str, how: str
) -> None:
    """The step that is named is the first, and nothing has moved since: weights, Adam, memories, routers' own state."""
    told = []
    for recorder in (None, TapeRecorder()):
        one = state(settings(router, train_top_k="2", steps=30), corpus, recorder)
        for _ in range(6):
            step(one)
        weight = one.model.get_parameter("layers.1.moe.experts.w_out")
        if how == "weight":
            with torch.no_grad():
                weight.fill_(math.nan)
        else:
            weight.register_hook(lambda gradient: gradient * math.inf)
            if one.graph:  # what is captured has no hook
                one.graph._graph = None
        kept = {name: value.clone() for kind in one.tensors().values() for name, value in kind.items()}
        with pytest.raises(Diverged) as error:  # noqa: PT012
            for _ in range(3):
                one.train_step(read=one.graph is None)
            assert one.step == 9
            one.check()
        told.append(str(error.value))
        assert one.step == 6
        for kind in one.tensors().values():
            for name, value in kind.items():
                assert torch.equal(value.nan_to_num(), kept[name].nan_to_num()), name
    assert told[0] == told[1]
    assert "step 7: the " in told[0]
    assert ("layer layers.1.moe.experts" if how == "weight" else "is that of layers.1.moe.experts.w_out") in told[0]


@pytest.mark.usefixtures("gpu_path")
def test_a_run_of_graphed_steps_writes_the_lines_of_an_eager_one(
    settings: Settings, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines every four steps; validation, checkpoint and the monitor's lines between them."""
    recorder, rows = TapeRecorder(), []
    monkeypatch.setattr(state_module, "cuda_recorder", lambda *_, **__: recorder)
    rest = {"log_every": 4, "observe_every": 3, "validate_every": 6, "checkpoint_every": 5, "eval_tokens": 64}
    for graphed in (False, True):
        config = settings("xmoe", steps=14, train_top_k="2", cuda_graph=graphed, **rest)
        out = tmp_path / str(graphed)
        train(config, out, task=LanguageModelling(corpus), monitor=RoutingMonitor)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        timed = ("tokens_per_second", "step_seconds", "overhead")
        rows.append([{key: value for key, value in row.items() if key not in timed} for row in lines])
    assert recorder.replayed
    assert rows[0] == rows[1]


@pytest.mark.usefixtures("gpu_path")
def test_batches_norm_clipping_and_adam_are_in_the_graph(
    settings: Settings, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("xmoe", train_top_k="2", clip_norm=0.1, weight_decay=0.1, **{"model.router": "xmoe:lr_scale=2"})
    recorder = TapeRecorder()
    eager, graphed = state(config, corpus), state(config, corpus, recorder)
    for _ in range(1 + WARM_UP + 1):
        assert step(graphed) == step(eager)

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("Python runs no part of a replay")

    names = [(graphed.batches, "batch"), (graphed.batches, "at"), (graphed.optimizer, "step"), (graphed, "_finish")]
    for owner, name in names:
        monkeypatch.setattr(owner, name, forbidden)
    rows = [step(graphed) for _ in range(3)]
    assert recorder.replayed == 4
    assert rows == [step(eager) for _ in range(3)]
    assert all(row["gradient_norm"] > 0.1 for row in rows), "clipped"
    assert_equal(eager, graphed)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="test_triton_kernels_on_the_tape runs it")
@pytest.mark.parametrize("router", ["hyperrouter", "xmoe+similarity"])
def test_a_step_of_triton_kernels(
    settings: Settings, corpus: Corpus, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, routers, attention and mixers through our kernels: graphed steps equal eager ones bit for bit."""
    monkeypatch.setattr(apply, "_path", lambda *_: "cuda")
    for module in (attention, experts, router_module, streaming):
        monkeypatch.setattr(module, "with_triton", lambda _: True)
    small = {"batch_size": 2, "segment_length": 6, "memory_length": 6, "model.num_layers": 1, "model.dim": 16}
    config = settings(router, train_top_k="2", **small)
    recorder = TapeRecorder()
    eager, graphed = state(config, corpus), state(config, corpus, recorder)
    for _ in range(1 + WARM_UP + 2):
        assert step(graphed) == step(eager)
    assert recorder.replayed == 2
    assert_equal(eager, graphed)
    called = {func for func, *_ in recorder.tape.calls}
    names = ["experts", "experts_backward", "flash", "flash_backward"]
    names += [] if "similarity" in router else ["route", "route_backward"]
    assert {getattr(torch.ops.pointsman, f"triton_{name}").default for name in names} <= called


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_triton_kernels_on_the_tape() -> None:
    ended = interpreted("tests/lab/training/test_graph.py", "-k", "test_a_step_of_triton_kernels", timeout=1700)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "2 passed" in ended.stdout or ".." in ended.stdout


@pytest.mark.usefixtures("gpu_path")
def test_a_router_that_waits_is_refused(settings: Settings, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TopK.forward

    def waiting(self: TopK, scores: Any, k: int, context: Any) -> tuple[Tensor, Tensor]:
        assert scores.probs.sum().item() > 0
        return plain(self, scores, k, context)

    monkeypatch.setattr(TopK, "forward", waiting)
    recorder = TapeRecorder()
    graphed = state(settings(train_top_k="2"), corpus, recorder)
    for _ in range(1 + WARM_UP):
        step(graphed)
    with pytest.raises(RunError, match=r"^cuda_graph=true: this step cannot be captured: .*dense") as error:
        step(graphed)
    assert "\n" not in str(error.value)


def test_a_number_from_the_host_is_found(settings: Settings, corpus: Corpus) -> None:
    """Masks of the CPU's experts come from a seed that Python draws: a tape would repeat them."""
    graphed = state(settings(train_top_k="2"), corpus, TapeRecorder())
    for _ in range(1 + WARM_UP):
        step(graphed)
    with pytest.raises(RunError, match="cannot be captured"):
        step(graphed)


@pytest.fixture
def on_meta(gpu_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The "meta" device, which knows no autocast, stands for a GPU."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def pass_without_waiting(config: RunConfig, device: str) -> None:
    """Forward and backward of two segments."""
    model = TransformerXL(config.model).to(device)
    objective, memory = objective_of(model), None
    tokens = torch.zeros(4, 16, dtype=torch.int64, device=device)
    for _ in range(2):
        with NoWaiting():
            outcome = objective.run(model, tokens, tokens, memory, 16)
            add_losses(outcome.loss, model).backward()  # type: ignore[no-untyped-call]
        memory = outcome.memory
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "experts" in name)


AHEAD = ("base", "depths", "expert-choice", "pooled", "sinkhorn", "soft")


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("device", ["cpu", "meta"])  # one shows tensors made of numbers, the other what is left behind
@pytest.mark.parametrize("mixer", ["", "+similarity", "+attention", "+attention:heads=all"])
def test_no_router_waits(settings: Settings, mixer: str, device: str) -> None:
    # a decoder refuses the first ones; hash, mask and stable check ids on a CPU, which waits for nothing; the means of
    # outputs that default needs are of pairs, whose number only the device knows
    causal = [name for name in list_routers() if name not in (*AHEAD, "hash", "mask", "stable", "default")]
    for name in [*(["xmoe"] if mixer else causal), NOISY]:
        pass_without_waiting(settings(name + mixer, **{"model.num_layers": 1}), device)


@pytest.mark.usefixtures("on_meta")
def test_what_waits_is_found(settings: Settings) -> None:
    values = torch.tensor([1.0, 0.0])
    for waits in (
        values.sum().item,
        values.nonzero,
        lambda: values[values > 0],
        lambda: values[[1, 0]],
        lambda: torch.tensor([1.0]),
        lambda: values.to("meta"),
    ):
        with NoWaiting(), pytest.raises(WaitingError):
            waits()
    order = torch.tensor([1, 0])
    with NoWaiting():
        assert len(values[order]) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "only a CUDA device"),
        ({"model.attention_dropout": 0.1}, "model.attention_dropout"),
        ({"model.experts": "base"}, "model.experts=base"),
        ({"model.checkpoint_activations": True}, "model.checkpoint_activations"),
        ({"deterministic": True}, "deterministic=true"),
        ({"model.router": "compete"}, "the router compete"),
        ({"model.router": "stable|compete+similarity"}, r"the router compete\+similarity, stable "),
        ({"precision": "float32"}, "precision=float32"),
    ],
)
def test_what_no_graph_can_capture_is_refused(
    settings: Settings, corpus: Corpus, changes: dict[str, Any], told: str
) -> None:
    config = settings(cuda_graph=True, **changes).with_vocabulary(corpus.vocabulary.size)
    with pytest.raises(RunError, match=f"^cuda_graph=true: .*{told}") as error:
        TrainingState(config, LanguageModelling(corpus), torch.device("cpu"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("deterministic", "told"), [(False, "only a CUDA device has them"), (True, "deterministic=true takes the plain")]
)
def test_kernels_for_a_gpu_are_refused_elsewhere(settings: Settings, deterministic: bool, told: str) -> None:
    config = settings(gpu_kernels="triton", deterministic=deterministic)
    with pytest.raises(RunError, match=f"^gpu_kernels=triton: {told}"):
        choose_kernels(config, None, None if deterministic else torch.device("cpu"))


def test_batches_of_several_lengths_are_refused(settings: Settings) -> None:
    with pytest.raises(RunError, match="batches differ in length"):
        cuda_recorder(settings(cuda_graph=True), torch.device("cpu"), fixed_shapes=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("router", ROUTERS)
def test_graphed_training_on_a_device(settings: Settings, corpus: Corpus, router: str) -> None:
    rows = []
    for graphed in (False, True):
        config = settings(router, steps=20, train_top_k="2:N", accumulation=2, cuda_graph=graphed)
        one = state_of(config, corpus, "cuda")
        monitor = RoutingMonitor(one.model, 5)
        rows.append([one.train_step(monitor) for _ in range(20)])
        assert all(weight.isfinite().all() for weight in one.model.parameters())
    for eager_row, row in zip(*rows, strict=True):
        assert row["top_k"] == eager_row["top_k"]
        # sums by atomic additions differ in their last bits from run to run
        assert row["loss"] == pytest.approx(eager_row["loss"], rel=0.01)
        assert row["gradient_norm"] == pytest.approx(eager_row["gradient_norm"], rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_masks_on_a_device_differ_from_step_to_step_and_follow_the_seed(
    settings: Settings, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a learning rate of almost 0 on the same batch, only the masks tell steps apart."""
    figures = []
    for graphed in (False, True):
        config = settings(train_top_k="2", steps=8, learning_rate=1e-12, cuda_graph=graphed, **{"model.dropout": 0.3})
        one = state_of(config, corpus, "cuda")
        first, found = one.batches.batch(0), []
        for name in ("batch", "at"):
            monkeypatch.setattr(one.batches, name, lambda _, batch=first: batch)
        for _ in range(8):
            found.append(one.train_step()["loss"])
        figures.append(found)
    assert figures[1] == pytest.approx(figures[0], rel=1e-3)
    assert len({round(loss, 5) for loss in figures[1][-3:]}) == 3
