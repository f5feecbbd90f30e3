"""The benchmark on a layer small enough for a test: every implementation answers, and the report is whole."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pointsman._errors import RunError
from pointsman.control import named_routers
from tools.bench import report
from tools.bench.__main__ import main
from tools.bench.cases import NAMES, A, Case, cases, growth, steps
from tools.bench.implementations import IMPLEMENTATIONS, LIMITS, OWN
from tools.bench.process import Process
from tools.bench.run import (
    Benchmark,
    Point,
    Result,
    StepResult,
    Times,
    _competitive,
    _warm_up,
    names_for,
    run_case,
    run_routers,
    run_steps,
)
from tools.bench.steps import Steps
from tools.bench.worker import Worker


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "words.txt").write_text("a few words, " * 400)
    return folder / "words.txt"


TINY = Case("tiny", 64, 16, 24, 4, 2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.filterwarnings("ignore")  # peers
def test_every_implementation_computes(name: str) -> None:
    implementation = IMPLEMENTATIONS[name]
    if not implementation.installed:
        pytest.skip(f"{implementation.package} is not installed")
    case = TINY if implementation.suits(TINY) else replace(TINY, train=False)
    if not implementation.suits(case):
        pytest.skip("it needs a GPU")
    worker = Worker(name, case)
    answer = worker.measure(0)
    assert 0 < answer["forward"] <= answer["total"]
    output = worker.layer(worker.hidden(0))
    assert output.shape == (64, 16)
    if name in LIMITS:
        return
    assert not torch.equal(output, worker.layer(worker.hidden(1)))
    if case.train:
        assert all(parameter.grad is not None for parameter in worker.module.parameters() if parameter.dim() > 1)


def test_peers_and_ours_agree_on_the_same_weights() -> None:
    pytest.importorskip("transformers")
    ours, theirs = Worker("pointsman", TINY), Worker("transformers grouped_mm", TINY)
    experts, gate = theirs.module
    with torch.no_grad():
        ours.module.experts.w_in.copy_(experts.up_proj)
        ours.module.experts.w_out.copy_(experts.down_proj)
        ours.module.router.score.weight.copy_(gate.weight)
    torch.testing.assert_close(ours.layer(ours.hidden(3)), theirs.layer(theirs.hidden(3)))


@pytest.mark.slow
def test_a_case_in_processes_of_their_own(tmp_path: Path) -> None:
    result = run_case(TINY, names_for(TINY, []), seconds=0.1)
    assert set(result.times) == set(OWN) - {"limit (reading weights)"}
    for times in result.times.values():
        assert times.error is None
        assert len(times.total) >= 1
    specs = ("smoe", "soft", "recurrent", "hash", "thor")
    shares = run_routers(TINY, specs, rounds=1)
    assert all(share > 0 for share in shares.values())
    benchmark = Benchmark([result], {"float32": shares}, {"k": [Point(1, 2.0, 1.5), Point(2, 4.0, 1.4)]})
    pytest.importorskip("matplotlib")
    page, data, figure = report.write(benchmark, tmp_path)
    text = page.read_text()
    assert "| pointsman |" in text
    assert f"| recurrent | {shares['recurrent']:.1%} |" in text
    assert "nan" not in text
    assert json.loads(data.read_text())["machine"]["torch"] == torch.__version__
    assert figure.read_text().startswith("<?xml")


FEW = {"preset": "tiny", "router": "smoe", "batch_size": 2, "segment_length": 8, "memory_length": 8}


@pytest.mark.slow
def test_training_steps_in_processes_of_their_own(text: Path, tmp_path: Path) -> None:
    result = run_steps(2, "cpu", rounds=1, settings={**FEW, "data": str(text)}, ways=["eager", "graph"])
    assert len(result.times["eager"].total) == 1
    assert result.times["graph"].error is not None
    assert "only a CUDA device has graphs" in result.times["graph"].error
    (page, data) = report.write(Benchmark([], {}, {}, [result]), tmp_path)
    assert "\n| eager | " in page.read_text()
    assert json.loads(data.read_text())["steps"][0]["k"] == 2


def test_training_steps(text: Path) -> None:
    worker = Steps("eager", "cpu", {**FEW, "data": str(text), "train_top_k": "3"})
    before = worker.state.step
    assert worker.measure(0)["total"] > 0
    assert worker.state.step > before
    assert worker.memory(0) == {}
    assert {router.top_k for _, router in named_routers(worker.state.model)} == {3}
    times = {"eager": Times([], [0.02, 0.04], 3 << 20), "compiled": Times(error="no"), "graph": Times([], [0.01, 0.02])}
    table = report.step_table(StepResult(2, times))
    assert table.splitlines()[2:] == [
        "| eager | 30.00 | 33.3 | 1.00 | 3 |", "| compiled | no | - | - | - |", "| graph | 15.00 | 66.7 | 2.00 | - |"
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device(text: Path) -> None:
    case = replace(TINY, dtype="bfloat16", device="cuda")
    layer = run_case(case, names_for(case, None), seconds=0.1)
    steps = run_steps(2, "cuda", rounds=1, settings={**FEW, "data": str(text)})
    for name, times in {**layer.times, **steps.times}.items():
        assert times.error is None, f"{name}: {times.error}"
        assert times.total
        assert name in LIMITS or times.memory


def test_hopeless_peers_are_left_out() -> None:
    processes = [SimpleNamespace(name=name) for name in ("pointsman", "near", "far", "fast", "new", "limit")]
    totals = {"pointsman": [9.0], "near": [1.9], "far": [2.1, 9.0, 2.1], "fast": [1.0], "new": [], "limit": [0.1]}
    left = _competitive(processes, {name: Times([], total) for name, total in totals.items()}, 2)  # type: ignore[arg-type]
    assert [process.name for process in left] == ["pointsman", "near", "fast", "new", "limit"]
    left = _competitive(processes, {process.name: Times() for process in processes}, 2)  # type: ignore[arg-type]
    assert left == processes
    left = _competitive(processes, {process.name: Times() for process in processes}, math.inf)  # type: ignore[arg-type]
    assert left == processes


def test_a_peer_far_behind_keeps_its_time_when_warm() -> None:
    def stub(name: str, seconds: float) -> Any:
        return SimpleNamespace(name=name, ask=lambda request, value: {"forward": seconds, "total": seconds})

    processes = [stub("pointsman", 9.0), stub("fast", 1.0), stub("slow", 3.0), stub("hopeless", 8.5)]
    times = {process.name: Times() for process in [*processes, SimpleNamespace(name="broken")]}
    times["broken"].error = "it broke"
    processes.append(SimpleNamespace(name="broken", ask=lambda *_: pytest.fail("asked again")))
    contenders = _warm_up(processes, times, seconds=10.0)
    assert [process.name for process in contenders] == ["pointsman", "fast", "slow", "broken"]
    assert {name: len(one.total) for name, one in times.items() if one.total} == {"hopeless": 1}


def test_warm_when_calls_get_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("pointsman", TINY)
    seconds = [9.0] * 4 + [5.0] * 4 + [3.0] * 4 + [2.9] * 4 + [1.0] * 4
    seeds: list[int] = []

    def once(seed: int) -> dict[str, float]:
        seeds.append(seed)
        return {"forward": 0.5, "total": seconds[len(seeds) - 1]}

    monkeypatch.setattr(worker, "once", once)
    assert worker.warm(100.0) == {"forward": 0.5, "total": 2.9}
    assert len(seeds) == len(set(seeds)) == 16
    seeds.clear()
    assert worker.warm(0.0)["total"] == 9.0
    assert len(seeds) == 1


def test_a_worker_that_fails_is_reported() -> None:
    with Process("pointsman") as process:
        assert "error" in process.ask("build", ["pointsman", replace(TINY, k=9)])
        process._process.kill()
        assert "error" in process.ask("measure", 0)
    failed = Result(
        TINY,
        {"pointsman": Times([1.0], [3.0]), "st-moe-pytorch": Times(error="it broke"), "limit": Times([1.0], [2.0])},
    )
    assert "| st-moe-pytorch | it broke | - | - | - | - |" in report.table(failed)
    assert failed.best_peer() is None
    assert report.rate(failed) == ["pointsman, forward + backward: 67% of 2.95e-07 TFLOP/s, the limit's rate.", ""]
    broken = Result(TINY, {"pointsman": Times(error="out of memory"), "peer": Times([1.0], [1.0]), "limit": Times()})
    assert broken.best_peer() is None
    assert "| out of memory | - |" in report.markdown(Benchmark([broken], {}, {}))


def test_cases() -> None:
    assert len(cases("cpu", quick=True)) == 4
    assert {case.dtype for case in cases("cpu", quick=False)} == {"float32", "bfloat16"}
    assert all(case.device == "cuda:1" for case in cases("cuda:1", quick=False))
    assert {case.name for case in cases("cpu", False, ["decode", "b"])} == {"decode", "b"}
    assert set(NAMES) == {case.name for device in ("cpu", "cuda") for case in cases(device, False)} | {
        "gpu",
        "routers",
        "steps",
    }
    assert len(cases("cuda", False, ["gpu"])) == len({case.name for case in cases("cuda", False)}) == 16
    assert [case.k for case in cases("cuda", False, ["gpu-2048x4096-e64-k8"])] == [8]
    grid = {(case.dim, case.hidden_dim // case.dim, case.num_experts, case.k) for case in cases("cuda", False)}
    assert grid == set(product((1024, 2048), (2, 4), (16, 64), (2, 8)))
    assert {(case.tokens, case.dtype) for case in cases("cuda", False)} == {(32768, "bfloat16")}
    assert [bool(steps(*given)) for given in (("cuda", False), ("cuda:1", True, ["steps"]))] == [True, True]
    assert not any(steps(*given) for given in (("cuda", True), ("cpu", False), ("cuda", False, ["gpu"])))
    assert set(growth()) == {"tokens", "experts", "k"}
    assert "pointsman" in names_for(A, [])
    assert not set(names_for(A, [])) - set(OWN)
    assert all(IMPLEMENTATIONS[name].installed for name in names_for(A, None))


def test_ratio_is_paired() -> None:
    # a disturbance that doubles both times of a round leaves the ratio alone
    ours, limit = Times([], [2.0, 4.0, 2.0]), Times([], [1.0, 2.0, 1.0])
    assert ours.ratio(limit) == 2.0


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--peers", "transformers eger"], "did you mean 'transformers eager'"), (["--case", "decod"], "mean 'decode'"),
     (["--case", "gpu,c", "--quick", "--device", "cpu"], "not measured")],
)  # fmt: skip
def test_command_line_names_the_mistake(words: list[str], told: str) -> None:
    with pytest.raises(RunError, match=told):
        main(words)


def test_what_has_no_time_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--case", "c,routers", "--seconds", "0", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "No time was left for: c: 2048 tokens" in " ".join(shown.split())
    assert "routers: " in shown
    assert json.loads((tmp_path / "layer.json").read_text())["results"] == []
