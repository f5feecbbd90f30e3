"""The benchmark on a layer small enough for a test: all implementations compute, ratios are paired."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from pointsman._errors import RunError
from pointsman.control import named_routers
from tools.bench import turns
from tools.bench.__main__ import NAMES, cases, compared, main, shares
from tools.bench.peers import IMPLEMENTATIONS, LIMIT, OWN, Case
from tools.bench.steps import Steps

TINY = Case("tiny", 64, 16, 24, 4, 2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.filterwarnings("ignore")  # peers
def test_every_implementation_computes(name: str) -> None:
    implementation = IMPLEMENTATIONS[name]
    if not implementation.installed:
        pytest.skip(f"{implementation.package} is not installed")
    if not implementation.suits(TINY):
        pytest.skip("it needs a GPU")
    layer, module = implementation.build(TINY)
    one, other = torch.randn(2, 64, 16, requires_grad=True)
    output = layer(one)
    assert output.shape == (64, 16)
    if name == LIMIT:
        return
    assert not torch.equal(output, layer(other))
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters() if parameter.dim() > 1)


@pytest.mark.parametrize("name", ["eight lines", "eight lines as nn.Linear", "transformers grouped_mm"])
def test_peers_and_ours_agree_on_the_same_weights(name: str) -> None:
    if not IMPLEMENTATIONS[name].installed:
        pytest.skip("transformers is not installed")
    (ours, own), (theirs, other) = IMPLEMENTATIONS["pointsman"].build(TINY), IMPLEMENTATIONS[name].build(TINY)
    gate, w_in, w_out = (
        (other.router, other.w_in.mT, other.w_out.mT)
        if name.startswith("eight lines")
        else (other[1], other[0].up_proj, other[0].down_proj)
    )
    with torch.no_grad():
        own.experts.w_in.copy_(w_in)
        own.experts.w_out.copy_(w_out)
        own.router.score.weight.copy_(gate.weight)
    hidden = torch.randn(64, 16)
    torch.testing.assert_close(ours(hidden), theirs(hidden))


@pytest.mark.filterwarnings("ignore")  # peers
def test_a_case() -> None:
    grid = compared(replace(TINY, tokens=4096), ["eight lines"], 2)
    assert [row[0] for row in grid.rows] == ["pointsman", "eight lines", LIMIT]
    assert grid.rows[0][3] == "1.00"
    assert float(grid.rows[0][4]) < float(grid.rows[1][4])
    decoding = compared(replace(TINY, train=False, dtype="bfloat16"), [], 2)
    assert [len(row) for row in decoding.rows] == [4]
    specs = ("smoe", "soft", "recurrent", "hash", "thor")
    assert [row[0] for row in shares(TINY, specs, rounds=1).rows] == list(specs)


def test_a_ratio_is_paired_with_the_fastest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"ours": [1.0, 2.0, 1.0], "slow": [9.0, 9.0, 9.0], "fast": [2.0, 4.0, 2.0]}
    monkeypatch.setattr(turns, "measured", lambda *_: times)
    grid = turns.table("case", {}, 3, 10, "tokens", ["slow", "fast"])
    assert list(grid.header) == ["case", "tokens a second", "times fast"]
    assert [list(row) for row in grid.rows] == [["ours", "10", "2.00"], ["slow", "1", "0.22"], ["fast", "5", "1.00"]]


def test_calls_take_turns() -> None:
    seen: list[str] = []
    times = turns.measured({name: (lambda name=name: seen.append(name)) for name in "abc"}, 2)
    assert "".join(seen[3:]) == "abcbca"
    assert {name: len(own) for name, own in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_training_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "words.txt").write_text("a few words, " * 400)
    few = {"preset": "tiny", "router": "smoe", "batch_size": 2, "segment_length": 8, "memory_length": 8}
    worker = Steps("cpu", {**few, "data": str(tmp_path / "words.txt"), "train_top_k": "3"})
    before = worker.state.step
    assert worker.measure()["total"] > 0
    assert worker.state.step > before
    assert {router.top_k for _, router in named_routers(worker.state.model)} == {3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device() -> None:
    assert compared(replace(TINY, dtype="bfloat16", device="cuda"), None, 2).rows


def test_cases() -> None:
    assert {case.dtype for case in cases("cpu")} == {"float32", "bfloat16"}
    assert {case.name for case in cases("cpu", ["decode", "b"])} == {"decode", "b"}
    assert {case.name for device in ("cpu", "cuda") for case in cases(device)} | {"routers"} == set(NAMES)
    grid = {(case.dim, case.hidden_dim // case.dim, case.num_experts, case.k) for case in cases("cuda:1")}
    assert grid == set(product((1024, 2048), (2, 4), (16, 64), (2, 8)))
    assert {case.device for case in cases("cuda:1")} == {"cuda:1"}
    assert set(OWN) < set(IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--peers", "transformers eger"], "did you mean 'transformers eager'"), (["--case", "decod"], "mean 'decode'"),
     (["--case", "gpu", "--device", "cpu"], "not measured")],
)  # fmt: skip
def test_command_line_names_the_mistake(words: list[str], told: str) -> None:
    with pytest.raises(RunError, match=told):
        main(words)


@pytest.mark.filterwarnings("ignore")  # peers
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench.__main__.ON_CPU", (TINY,))
    monkeypatch.setattr("tools.bench.__main__.NAMES", ("tiny",))
    main(["--case", "tiny", "--peers", "none", "--rounds", "1", "--out", str(tmp_path / "layer.md")])
    assert "python -m tools.bench --case tiny" in capsys.readouterr().out
    assert (tmp_path / "layer.md").read_text().count("| pointsman |") == 1
