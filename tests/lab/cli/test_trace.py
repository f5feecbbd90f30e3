"""`pointsman trace` as a user types it."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pointsman.traces import RoutingTrace
from pointsman_lab.cli import trace
from pointsman_lab.cli.main import main


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoutingTrace:
    """a.safetensors, and b.safetensors: the same shifted by a token, its logits 0.0001 off."""
    monkeypatch.chdir(tmp_path)
    logits = {f"layers.{i}.moe": torch.randn(64, 8) for i in range(2)}
    chosen = {name: one.topk(2).indices.to(torch.int16) for name, one in logits.items()}
    trace = RoutingTrace(chosen, dict.fromkeys(chosen, 8), torch.tensor([32, 32]), logits=logits)
    trace.save("a.safetensors")
    rows = torch.cat([torch.arange(32).roll(1), torch.arange(32).roll(1) + 32])
    moved = trace.rows(rows, trace.lengths)
    noisy = {name: one + 1e-4 * torch.randn(one.shape) for name, one in moved.logits.items()}
    replace(moved, logits=noisy).save("b.safetensors")
    return trace


def test_diff_names_the_fault(files: RoutingTrace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", "a.safetensors", "b.safetensors", "--out", "d"]) == 0
    said = capsys.readouterr().out
    assert "shifted by a token (+1)" in said
    assert max(map(len, said.splitlines())) <= 80
    assert json.loads(Path("d/trace.json").read_text())["after"] == 0
    assert main(["trace", "diff", "a.safetensors", "b.safetensors", "--margins", "--out", "d"]) == 0
    assert "predicted" in capsys.readouterr().out
    margins = json.loads(Path("d/trace.json").read_text())["margins"]
    assert [one["flipped"] for one in margins] == [0.0] * 8  # of the traces with the shift undone
    assert main(["trace", "diff", "a.safetensors", "a.safetensors"]) == 0
    assert "the traces are equal" in capsys.readouterr().out


def test_infinite_logits_make_no_invalid_json(files: RoutingTrace, capsys: pytest.CaptureFixture[str]) -> None:
    hidden = {name: one.scatter(1, one.argmin(-1, keepdim=True), -torch.inf) for name, one in files.logits.items()}
    replace(files, logits=hidden).save("a.safetensors")
    assert main(["trace", "diff", "a.safetensors", "b.safetensors", "--margins", "--out", "d"]) == 0
    assert "nan" not in capsys.readouterr().out
    assert json.loads(Path("d/trace.json").read_text(), parse_constant=pytest.fail)["margins"] == []


def test_the_result_is_saved_before_it_is_printed(files: RoutingTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    for words in (["diff", "a.safetensors", "b.safetensors"], ["place", "a.safetensors"]):
        monkeypatch.setattr(sys, "stdout", Closed())
        with pytest.raises(BrokenPipeError):
            trace.run([*words, "--out", words[0]])
        assert Path(words[0], "trace.json").is_file()


def test_traces_of_another_k_are_refused(files: RoutingTrace, capsys: pytest.CaptureFixture[str]) -> None:
    replace(files, experts={name: one[:, :1] for name, one in files.experts.items()}).save("one.safetensors")
    assert main(["trace", "diff", "a.safetensors", "one.safetensors"]) == 2
    assert "layer 'layers.0.moe': a token has 2 choices in one trace, 1 in the other" in capsys.readouterr().err


def test_place_shows_a_table(files: RoutingTrace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "place", "a.safetensors", "--devices", "4", "--spare", "2", "--cache", "2"]) == 0
    said = capsys.readouterr().out
    assert "batches of 32 tokens" in said  # half of the trace: no batch has more
    for word in ("contiguous", "balanced", "EPLB, 2 copies", "optimum", "layers.1.moe"):
        assert word in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the action is missing"),
        (["dif"], "did you mean 'diff'"),
        (["diff", "a.safetensors", "no.safetensors"], "no.safetensors: no such file"),
        (["place", "a.safetensors", "--devices", "9"], "allowed are 2 to 8"),
        (["place", "a.safetensors", "--cache", "8"], "size=8: allowed are 1 to 7"),
        (["place", "a.safetensors", "--spares", "1"], "did you mean '--spare'"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], told: str, files: RoutingTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out
