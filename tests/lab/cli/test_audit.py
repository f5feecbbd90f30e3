"""`pointsman audit` as a user runs it, on a tiny saved model."""

import errno
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pointsman._errors import RunError
from pointsman_lab import _files
from pointsman_lab.cli.audit import folder_of
from pointsman_lab.cli.main import main

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.library.hf import zoo
    from tests.library.hf.test_replace import spread
    from tests.library.hf.zoo import tokenizer

    folder = tmp_path_factory.mktemp("model")
    spread(zoo.tiny_model("olmoe")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_audit(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 w5 " * 40)
    words = ["audit", str(saved), "--data", str(text), "--top-k", "1,2", "--length", "32", "--device", "cpu"]
    assert main([*words, "--against", str(saved), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "# Audit of OlmoeForCausalLM" in shown
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert [row["top_k"] for row in found["quality"]] == [1, 2]
    assert found["tokens"]["text"] == 200
    assert found["layers"]["model.layers.0.mlp"]["fluctuation"]["top1"] == 0


def test_domains_and_a_page(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, word in (("en.txt", "w1 w2 w3 "), ("de.txt", "w30 w31 w32 ")):
        (tmp_path / name).write_text(word * 60)
    data = ",".join(str(tmp_path / name) for name in ("en.txt", "de.txt"))
    words = [str(saved), "--data", data, "--length", "16", "--eval-tokens", "200", "--device", "cpu"]
    (tmp_path / "task.jsonl").write_text('{"prompt": "w1 w2", "answer": "w3"}\n{"prompt": "w2", "answer": "w4"}\n')
    task = ["--task", str(tmp_path / "task.jsonl"), "--answer-tokens", "3"]
    assert main(["audit", *words, *task, "--top-k", "2", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert found["domains"] == {"en.txt": 100, "de.txt": 100}
    assert found["answers"][0]["prompts"] == 2
    assert "Tokens to an answer" in (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Domains apart" in (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "report.html" in capsys.readouterr().err
    assert main(["audit", *words, "--data", f"{tmp_path / 'en.txt'},{tmp_path / 'en.txt'}"]) == 2
    assert "two parts have the same name" in capsys.readouterr().err


@pytest.mark.parametrize("full", ["diagnostics.json", "report.html"])
def test_a_full_disk_leaves_no_audit_of_mixed_files(
    full: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", str(saved), "--top-k", "2", "--length", "16", "--probe-tokens", "0", "--device", "cpu"]
    out, opened = tmp_path / "out", _files.open_own
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"w{ord(name[0]) % 9} w2 w3 " * 20)
    assert main([*words, "--data", str(tmp_path / "a.txt"), "--out", str(out)]) == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def opening(file: Path, *flags: int) -> int:
        if full in file.name:
            raise OSError(errno.ENOSPC, "full")
        return opened(file, *flags)

    monkeypatch.setattr(_files, "open_own", opening)
    capsys.readouterr()
    assert main([*words, "--data", str(tmp_path / "b.txt"), "--out", str(out)]) == 2  # and not 0 without its page
    assert "no space left on the disk" in capsys.readouterr().err.splitlines()[-1]
    changed = {file.name for file in out.iterdir() if file.read_bytes() != before.get(file.name)}
    assert ("config.json" in changed) == ("diagnostics.json" in changed) == (full == "report.html")
    assert "report.html" not in changed


@pytest.mark.parametrize(
    ("command", "file"),
    [("audit", "report.html"), ("compress", "model.safetensors"), ("diagnose", "diagnostics.json")],
)
def test_results_are_saved_where_nothing_can_be_printed(
    command: str, file: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pointsman audit … | head -1` left no audit."""

    class Refusing(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "full")

    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 " * 20)
    words = [command, str(saved), "--data", str(tmp_path / "text.txt"), "--device", "cpu", "--out", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "stdout", Refusing())
    assert main([*words, "--eval-tokens", "100", *([] if command == "diagnose" else ["--length", "16"])]) == 2
    assert (tmp_path / "a" / file).is_file()


def test_on_disk_is_the_same(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 " * 20)
    words = ["audit", str(saved), "--data", str(tmp_path / "text.txt"), "--top-k", "2", "--length", "16"]
    words += ["--against", str(saved)]
    assert main([*words, "--device", "cpu", "--out", str(tmp_path / "a")]) == 0
    monkeypatch.setattr("pointsman.hf.loading.load_model", None)  # neither of the two is in memory
    assert main([*words, "--on-disk", "--out", str(tmp_path / "b")]) == 0
    assert "of weights stay in memory" in capsys.readouterr().err
    one, two = (json.loads((tmp_path / name / "audit.json").read_text()) for name in "ab")
    assert one["quality"] == two["quality"]
    assert one["against"] == two["against"]
    assert one["super_experts"] == two["super_experts"]
    assert one["schedules"] == two["schedules"]


def test_compress(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7 " * 40)
    words = ["compress", str(saved), "--data", str(tmp_path / "text.txt"), "--length", "16", "--device", "cpu"]
    assert main([*words, "--experts", "0.5", "--uneven", "--method", "random", "--out", str(tmp_path / "half")]) == 0
    assert "Experts by layer: 4, 4." in capsys.readouterr().out
    assert main([*words, "--experts", "0.5", "--out", str(tmp_path / "half")]) == 0
    assert "4 of 8 experts a layer, reap" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").config.num_experts == 4
    assert json.loads((tmp_path / "half" / "compression.json").read_text())["method"] == "reap"
    shutil.copytree(saved, tmp_path / "other")
    for more, says in [
        (["--experts", "0"], "a share between 0 and 1"),
        (["--experts", "8"], "allowed are 2 to 7"),
        (["--method", "hcsmoe"], "did you mean 'hc-smoe'"),
        (["--out", str(saved)], "this is the model to read"),
        (["--out", str(tmp_path / "other")], "this folder holds a model, which would be overwritten"),
    ]:
        assert main([*words, "--out", str(tmp_path / "none"), *more]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
    record = tmp_path / "half" / "compression.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "source": "another/model"}))
    assert main([*words, "--out", str(tmp_path / "half")]) == 2  # compressed of another model


def test_the_model_to_compare_with_needs_no_tokenizer(saved: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(saved, bare, ignore=shutil.ignore_patterns("token*"))
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 " * 20)
    words = ["audit", str(saved), "--data", str(text), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*words, "--against", str(bare), "--top-k", "2"]) == 0
    assert main([*words, "--against", str(bare), "--top-k", "2"]) == 0  # over its own results


def test_a_model_without_a_tokenizer_takes_another_one(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(saved, bare, ignore=shutil.ignore_patterns("token*"))
    (bare / "text").mkdir()
    monkeypatch.chdir(bare / "text")
    Path("text.txt").write_text("w1 w2 w3 " * 20)
    words = ["audit", "..", "--data", "text.txt", "--device", "cpu", "--top-k", "2"]
    assert main(words) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no tokenizer that transformers can load" in told
    assert told.endswith("are its files missing? (--tokenizer MODEL takes another model's)")
    assert main([*words, "--tokenizer", str(saved)]) == 0
    assert (tmp_path / "audit-bare" / "audit.json").is_file()  # beside the model that one stands in
    monkeypatch.chdir(tmp_path)
    assert folder_of("bare/.") == folder_of("a/bare") == Path("audit-bare")


def test_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1")
    for name in [name for name in sys.modules if name.startswith("pointsman.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["audit", "model", "--data", str(text), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "the package 'transformers' is not installed: pip install 'pointsman[hf]'" in said
    assert "report" not in said


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.jsonl", b'{"text": "w1 \\ud800 w2"}\n', "line 1: not JSON: half a surrogate pair"),
        ("latin.jsonl", b'{"text": "caf\xe9"}\n', "line 1: not UTF-8 (byte 0xe9)"),
        ("empty.jsonl", b"", "there is no text to read"),
        ("empty.txt", b"", "there is no text to read"),
        ("blank.txt", b"\n \n", "there is no text to read"),
    ],
)
def test_texts_that_cannot_be_read(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, says: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert main(["audit", str(saved), "--data", str(file), "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("k", [0, 9, -1])
def test_a_model_whose_k_cannot_be(saved: Path, tmp_path: Path, k: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": k}))
    text.write_text("w1 w2 w3 " * 20)
    assert main(["audit", str(folder), "--data", str(text), "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"the model's own k is {k}: its config.json is damaged; allowed are 1 to 8 (model.layers.0.mlp.gate)" in said
    assert not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_is_told_before_anything_is_computed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.hf.loading.load_model", None)
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 " * 20)
    for words in (["audit"], ["compress"], ["hf", "upcycle", "--experts", "2"], ["diagnose"], ["evaluate"]):
        data = [] if words[0] == "hf" else ["--data", str(text)]
        assert main([*words, str(saved), *data, "--device", "cpu", "--out", str(text / "out")]) == 2
        assert f"{text / 'out'}: Not a directory; nothing was begun" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["minimax_m2", "lfm2_moe", "gemma4"])
def test_tensors_above_experts_on_the_disk_stay_in_memory(family: str, tmp_path: Path) -> None:
    from pointsman_lab.checkpoints.on_disk import load_on_disk
    from tests.library.hf import zoo
    from tests.library.hf.test_replace import logits

    model = zoo.tiny_model(family)
    model.save_pretrained(tmp_path / "model")
    found = load_on_disk(str(tmp_path / "model"), tmp_path / "experts").eval()
    assert all(tensor.is_meta == (".experts." in name) for name, tensor in found.named_parameters())
    torch.testing.assert_close(logits(found), logits(model))


@pytest.mark.parametrize("family", ["dbrx", "jetmoe"])
def test_classes_that_read_experts_from_outside_are_not_left_on_the_disk(family: str, tmp_path: Path) -> None:
    from pointsman_lab.checkpoints.on_disk import load_on_disk
    from tests.library.hf import zoo

    zoo.tiny_model(family).save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match="does not run with its experts on the disk"):
        load_on_disk(str(tmp_path / "model"), tmp_path / "experts")


def test_no_room_for_experts_on_the_disk_is_told_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pointsman_lab.checkpoints.on_disk import load_on_disk
    from tests.library.hf import zoo

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    zoo.tiny_model("mixtral").save_pretrained(tmp_path / "model")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(RunError, match=f"{tmp_path / 'experts'}: no space for the experts of .*; set TMPDIR"):
        load_on_disk(str(tmp_path / "model"), tmp_path / "experts")


def test_conversations(saved: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5"}]}] * 3
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert main(["audit", str(saved), "--data", str(file), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    tokens = json.loads((tmp_path / "out" / "audit.json").read_text())["tokens"]
    assert (tokens["text"], tokens["template"]) == (15, 18)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["nowhere/model"], "nowhere/model"),
        (["TRUNCATED"], "no model that transformers can load"),
        (["LACKING"], "the saved OlmoeForCausalLM lacks 1 weights: model.layers.0.mlp.gate.weight"),
        (["LACKING", "--on-disk"], "the saved OlmoeForCausalLM lacks 1 weights"),
        (["nowhere/model", "--on-disk"], "nowhere/model: no model that transformers can load"),
        (["BAD"], "this is a file"),
        ([None, "--top-k", "9"], "from 1 to 8"),
        ([None, "--data", "no-such-data"], "no-such-data"),
        ([None, "--data", "BAD"], "line 1"),
        ([None, "--data", "CHAT"], "a list of messages such as"),
        ([None, "--data", "LATIN"], "line 2: not UTF-8 (byte 0xe9)"),
        ([None, "--task", "BAD"], 'line 1: needs "prompt" or "messages"'),
        ([None, "--task", "CHAT"], "line 1: needs \"answer\", a text, found 'messages'"),
        ([None, "--answer-tokens", "8"], "--answer-tokens"),
        ([None, "--out", "RUN"], "holds a run or other results, which would be overwritten"),
    ],
)
def test_bad_input(
    saved: Path, tmp_path: Path, changes: list[str | None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"texts": 1}')
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": ["hello"]}')
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "w1"}\n{"text": "caf\xe9"}\n')
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(saved, tmp_path / "truncated")
    weights = tmp_path / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    shutil.copytree(saved, tmp_path / "lacking")
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.0.mlp.gate.weight"]
    save_file(tensors, tmp_path / "lacking" / "model.safetensors", metadata={"format": "pt"})
    places = {"LACKING": tmp_path / "lacking", None: saved, "BAD": bad, "CHAT": chat, "TRUNCATED": weights.parent}
    places |= {"LATIN": latin, "RUN": tmp_path / "run"}
    given = [str(places.get(word, word)) for word in changes]
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    device = [] if "--on-disk" in given else ["--device", "cpu"]
    assert main(["audit", *given, *device, *out]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_a_text_in_which_no_token_has_a_loss_is_told(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("x")
    words = ["--data", str(tmp_path / "text.txt"), "--eval-tokens", "1", "--probe-tokens", "0"]
    assert main(["audit", str(saved), *words, "--out", str(tmp_path / "out")]) == 0
    assert "no token had a loss" in capsys.readouterr().err
