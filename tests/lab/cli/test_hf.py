"""`pointsman hf`, and what commands for runs say of a Hugging Face folder."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pointsman._errors import RunError
from pointsman_lab.cli.hf import save
from pointsman_lab.cli.main import main
from tests.library.hf import zoo

IDS = torch.arange(3, 15)[None]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def test_replace_and_materialize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock, replaced, plain = tmp_path / "stock", tmp_path / "replaced", tmp_path / "plain"
    zoo.tiny_model("mixtral").save_pretrained(stock)
    assert main(["hf", "replace", str(stock), "--router", "hyperrouter", "--out", str(replaced)]) == 0
    assert "without a tokenizer" in capsys.readouterr().err
    assert json.loads((replaced / "config.json").read_text())["pointsman"]
    assert main(["hf", "materialize", str(replaced), "--out", str(plain)]) == 0
    assert "pointsman" not in json.loads((plain / "config.json").read_text())
    torch.testing.assert_close(logits(plain), logits(stock), rtol=1e-4, atol=1e-5)
    for words, says in [
        (["materialize", str(plain), "--out", str(tmp_path / "x")], "has a pointsman router"),
        (["materialize", str(replaced), "--out", str(replaced)], "this is the model to read"),
        (["materialize", str(replaced), "--out", str(plain)], "this folder holds a model, which would be overwritten"),
        (["upcycle", str(stock), "--experts", "2", "--out", str(tmp_path / "x")], "no mixture of experts matches"),
    ]:
        capsys.readouterr()
        assert main(["hf", *words]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "x").exists()


def test_what_transformers_cannot_save_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.tiny_model("mixtral").save_pretrained(tmp_path / "stock")

    def fails(*args: object, **kwargs: object) -> None:  # as for FP8 that was loaded on a CPU
        raise ValueError("Undefined Operation encountered!")

    monkeypatch.setattr("transformers.modeling_utils.revert_weight_conversion", fails)
    words = ["hf", "replace", str(tmp_path / "stock"), "--router", "smoe", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "transformers cannot save this MixtralForCausalLM (Undefined Operation encountered!); if the weights" in told
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_saved_is_told_where_no_folder_was_made(tmp_path: Path) -> None:
    class Refuses:
        def save_pretrained(self, out: Path) -> None:
            raise ValueError("quantized")

    with pytest.raises(RunError, match="transformers cannot save this Refuses"):
        save(Refuses(), tmp_path / "out")
    (tmp_path / "own").mkdir()
    with pytest.raises(RunError, match="transformers cannot save this Refuses"):
        save(Refuses(), tmp_path / "own")
    assert [one.name for one in tmp_path.iterdir()] == ["own"]


def test_a_full_disk_leaves_nothing_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.tiny_model("mixtral").save_pretrained(tmp_path / "stock")
    words = ["hf", "replace", str(tmp_path / "stock"), "--router", "smoe", "--out", str(tmp_path / "out")]

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full)
        assert main(words) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith(f"pointsman: {tmp_path / 'out'}: the model was not written: Error while serializing")
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr("pointsman_lab._files.open_own", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        model = zoo.tiny_model("mixtral")
        with pytest.raises(RunError, match="/record: the model was not written: full"):
            save(model, tmp_path / "record", **{"compression.md": "text"})
    for rename in (0, 1, 2):  # killed at one of the first three, the last of which is that of the weights

        def killed(file: Path, target: Path, left: list[int] = [rename]) -> Path:  # noqa: B006
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return file.rename(target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            assert main(words) == 130
        assert not [*(tmp_path / "out").glob("*.safetensors")]
    assert main(words) == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}


@pytest.mark.parametrize("there", [False, True])
def test_two_commands_do_not_write_one_folder(
    there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of one and the configuration of the other were left."""
    out = tmp_path / "new" / "out"
    words = ["hf", "replace", "stock", "--router", "smoe", "--out", str(out)]
    code = "import sys; from pointsman_lab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    second = [sys.executable, "-c", code, *words]

    def meanwhile(*_: object, **__: object) -> None:
        done = subprocess.run(second, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("another process is working in this directory")) == (2, 1)
        raise RunError("the first fails")

    monkeypatch.setattr("pointsman.hf.loading.load_model", meanwhile)
    if there:
        out.mkdir(parents=True)
    assert main(words) == 2
    assert capsys.readouterr().err == "pointsman: the first fails\n"
    assert [one.name for one in tmp_path.rglob("*")] == (["new", "out"] if there else [])
    assert "another process" not in subprocess.run(second, capture_output=True, text=True).stderr


def test_upcycle(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained(tmp_path / "dense")
    words = ["hf", "upcycle", str(tmp_path / "dense"), "--experts", "4", "--out", str(tmp_path / "sparse")]
    assert main(words) == 0
    torch.testing.assert_close(logits(tmp_path / "sparse"), logits(tmp_path / "dense"), rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "sparse" / "config.json").read_text())["num_local_experts"] == 4


@pytest.mark.parametrize("words", [["export"], ["evaluate"], ["report"]])
def test_commands_for_runs_say_what_to_do_with_a_model(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo.tiny_model("mixtral").config.save_pretrained(tmp_path)
    assert main([words[0], str(tmp_path), *words[1:]]) == 2
    told = capsys.readouterr().err
    assert f"is a Hugging Face model, not a run: `pointsman audit {tmp_path}`" in told
    assert len(told.splitlines()) == 1
