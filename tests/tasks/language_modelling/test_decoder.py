"""A decoder from the command line: trained, exported to transformers, continued from there, and generating text."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pointsman_lab.cli.main import main
from pointsman_lab.runs.checkpoints import open_checkpoint
from pointsman_lab.training.checkpoint import checkpoint_tensors
from pointsman_lab.training.run import load_run

SMALL = ["--preset", "tiny-decoder", "--steps", "4", "--eval-tokens", "64", "--device", "cpu"]
SHAPE = ["dim=16", "num_heads=2", "kv_heads=1", "head_dim=8", "hidden_dim=12", "num_experts=4"]
LENGTHS = ["batch_size=2", "segment_length=16", "memory_length=16", "eval_batch_size=2", "eval_segment_length=16",
           "eval_memory_length=16", "valid_tokens=32", "deterministic=true", "checkpoint_every=2"]  # fmt: skip
PROMPT = "ab cd"
BLOCKED = """
import sys
sys.modules["pointsman"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer(text, return_tensors="pt")
with torch.no_grad():
    logits = model(**ids).logits
new = model.generate(**ids, max_new_tokens=6, do_sample=False)
print(type(model).__name__, tokenizer.decode(new[0]).encode())
torch.save((ids["input_ids"], logits), folder + "/logits.pt")
"""


def settings(shape: Sequence[str] = SHAPE) -> list[str]:
    changes = [f"model.{one}" for one in shape] + LENGTHS
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(40)]
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("".join(draw.choice(words) + draw.choice("  \n") for _ in range(3000)))
    return file


def trained(text: Path, out: Path, *more: str, router: str = "smoe:bias=false") -> Path:
    arguments = ["train", *SMALL, "--data", str(text), "--router", router, "--out", str(out), *settings(), *more]
    assert main(arguments) == 0
    return out


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        return trained(text, tmp_path_factory.mktemp("runs") / "bytes")


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "model"
    assert main(["export", str(run), "--format", "hf", "--top-k", "2", "--out", str(out)]) == 0
    return out


@torch.no_grad()
def logits(run: Path, ids: torch.Tensor, k: int) -> torch.Tensor:
    from pointsman.control import set_top_k

    model = load_run(run).model
    set_top_k(model, k)
    found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.slow
def test_a_process_without_pointsman_opens_it_with_the_same_logits(run: Path, exported: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, str(exported), PROMPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, new = done.stdout.strip().splitlines()[-1].split(" ", 1)
    assert name == "Qwen3MoeForCausalLM"
    ids, theirs = torch.load(exported / "logits.pt")
    assert ids[0].tolist() == load_run(run).vocabulary.encode(PROMPT).tolist()
    torch.testing.assert_close(logits(run, ids, 2), theirs, rtol=1e-5, atol=1e-5)
    assert eval(new).decode() == PROMPT + continued(run, ["--prompt", PROMPT, "--top-k", "2"], exported.parent)[0]


def test_an_export_goes_through_no_link_and_replaces_all_weights(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {file.name for file in exported.iterdir()} - {"logits.pt"}  # which another test writes
    mine, out = tmp_path / "mine", tmp_path / "run" / "export"
    mine.write_text("kept")
    shutil.copytree(run, tmp_path / "run")
    out.mkdir()
    for name in (*names, "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (out / name).symlink_to(mine)
    (out / "README.md").write_text("mine, too")
    assert main(["export", str(tmp_path / "run"), "--format", "hf"]) == 0
    assert mine.read_text() == "kept"
    assert {file.name for file in out.iterdir()} == names | {"README.md"}
    assert [file.name for file in out.iterdir() if file.is_symlink()] == []


def continued(run: Path, more: Sequence[str], folder: Path) -> list[str]:
    """What greedy generation adds to each prompt."""
    out = folder / "texts.jsonl"
    arguments = ["generate", str(run), "--greedy", "--tokens", "6", "--device", "cpu", "--out", str(out), *more]
    assert main(arguments) == 0
    return [json.loads(line)["text"] for line in out.read_text().splitlines()]


def test_a_batch_of_prompts_is_each_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["ab cd ef ab", "a", "hh g"]
    k = ["--top-k", "3"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    together = continued(run, [*words, *k], tmp_path)
    assert together == [continued(run, ["--prompt", prompt, *k], tmp_path)[0] for prompt in prompts]
    assert f"a{together[1]}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("router", "same"), [("", True), ("smoe-dropout", True), ("loss-free", False), ("hyperrouter", False)]
)
def test_training_goes_on_from_a_folder(
    text: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], router: str, same: bool
) -> None:
    words = ["train", "--from", str(exported), "--data", str(text), "--device", "cpu", "--steps", "1", "--eval-tokens",
             "64", "--out", str(tmp_path / "run"), *settings([])]  # fmt: skip
    assert main([*words, *(["--router", router] if router else [])]) == 0
    told = capsys.readouterr().err
    assert ("starts with the logits of" in told) is same
    assert ("with other logits" in told) is not same
    model: Any = load_run(tmp_path / "run").config.model
    assert model.context_length == 32
    assert (model.num_experts, model.qk_norm, model.router) == (4, "head", router or "smoe:bias=false")


def test_a_run_of_pieces_resumes_bit_for_bit_and_leaves_with_its_tokenizer(text: Path, tmp_path: Path) -> None:
    """Stopped after step 2: the checkpoint of step 2 is all that is left."""
    import shutil

    whole = trained(text, tmp_path / "whole", "--tokenizer", "pieces:330", router="loss-free+similarity")
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step-4")
    (broken / "evaluation.json").unlink()
    trained(text, broken, "--tokenizer", "pieces:330", "--resume", router="loss-free+similarity")
    for name in ("model", "trainer"):
        first, second = (checkpoint_tensors(open_checkpoint(one / "checkpoints" / "step-4"), name)
                         for one in (whole, broken))  # fmt: skip
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
    saved = load_run(whole)
    assert saved.vocabulary.level == "subword"
    assert saved.vocabulary.decode(saved.vocabulary.encode(PROMPT)) == PROMPT
    assert main(["evaluate", str(whole), "--device", "cpu", "--top-k", "2"]) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert not captured.out
    return lines[0]


def test_bad_input_is_one_line(
    text: Path, run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    start = ["train", "--data", str(text), "--device", "cpu", *out, "--from"]
    unknown, latent, other = (tmp_path / name for name in ("unknown", "latent", "other"))
    for folder, kind in ((unknown, "llama"), (latent, "deepseek_v3")):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    from transformers import PreTrainedTokenizerFast

    from pointsman_lab.data.subwords import as_tokenizer, learn_pieces

    large = as_tokenizer(learn_pieces(text.read_text().splitlines(keepends=True), 330))
    PreTrainedTokenizerFast(tokenizer_object=large).save_pretrained(other)
    for words, says in (
        (["generate", str(run)], "--prompt is missing"),
        (["generate", str(run), "--prompt", "a" * 33], "the prompt has 33 tokens, and the model's context is 32"),
        (["generate", str(run), "--prompt", "a", "--prompt", ""], "prompt 2 is empty"),
        (["generate", str(run), "--prompt", "a", "--top-k", "5"], "whole numbers from 1 to 4"),
        (["generate", str(run), "--prompt", "a", "--greedy", "--top-p", "0.5"], "no effect with --greedy"),
        (["generate", str(run), "--prompt", "a", "--top-p", "0"], "allowed are numbers above 0"),
        (["export", str(run), "--top-k", "2", *out], "no effect without --format hf"),
        (["export", str(run), "--format", "hf", "--top-k", "9", *out], "whole numbers from 1 to 4"),
        (["export", str(run), "--format", "hf", "--materialize", *out], "no effect with --format hf"),
        ([*start, str(tmp_path / "nowhere")], "no folder of a Hugging Face model"),
        ([*start, str(unknown)], "'llama' is no class that a decoder can be"),
        ([*start, str(latent)], "latent attention"),
        ([*start, str(exported), "--tokenizer", str(other)], "the tokenizer does not fit: it has 330 ids"),
        (["train", "--data", str(text), "--tokenizer", str(text), *out], f"{text}: not a tokenizer"),
        (["train", "hyperrouter-enwik8-small", "--from", str(exported), *out], "leave the recipe out"),
    ):
        assert says in refused(capsys, *words), says
