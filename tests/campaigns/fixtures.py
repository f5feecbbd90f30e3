"""What campaigns start from: the smallest run, comparison, fine-tuning, Hugging Face model and files."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import torch

from pointsman_lab.cli.main import main
from pointsman_lab.runs import environment

SMALL = """
steps = 4
eval-tokens = 64
[set]
"model.num_layers" = 1
"model.dim" = 8
"model.num_heads" = 2
"model.head_dim" = 4
"model.hidden_dim" = 8
"model.num_experts" = 4
"batch_size" = 2
"segment_length" = 8
"memory_length" = 8
"eval_batch_size" = 2
"eval_segment_length" = 8
"eval_memory_length" = 8
"valid_tokens" = 32
"validate_every" = 2
"checkpoint_every" = 2
"log_every" = 1
"observe_every" = 2
"deterministic" = true
"""
OWN_ROUTER = """
from pointsman.routers.frame.registry import LayerSpec, register_router
from pointsman.routers.frame.stages import Stages
from pointsman.routers.papers.topk import LinearScorer

@register_router("mine", paper="none")
def mine(layer: LayerSpec, *, noise: float = 0.0) -> Stages:
    \"\"\"A linear router.\"\"\"
    return Stages(LinearScorer(layer.dim, layer.num_experts, noise=noise))
"""


def called(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        try:
            code = main(list(words))
        except SystemExit as ended:  # --help
            code = ended.code if isinstance(ended.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def must(*words: str) -> str:
    """Standard output of a command line that has to work."""
    code, out, err = called(words)
    assert code == 0, (words, err)
    return out


def make_files(folder: Path) -> None:
    """Texts, tasks and settings, good and bad. From here on no run asks git for its commit, which takes long."""
    environment.commit = lambda: None
    random = Random(0)
    letters = ["".join(random.choices("abcdefgh", k=random.randint(1, 5))) for _ in range(30)]
    (folder / "text.txt").write_text("".join(random.choice(letters) + random.choice(" \n") for _ in range(400)))
    rows = [f"{random.choice(letters)} {random.choice(letters)}\t{number % 2}" for number in range(120)]
    (folder / "task.tsv").write_text("text\tlabel\n" + "".join(f"{row}\n" for row in rows))
    (folder / "small.toml").write_text(SMALL)
    (folder / "own.py").write_text(OWN_ROUTER)
    (folder / "empty.txt").write_text("")
    (folder / "binary.bin").write_bytes(random.randbytes(500))
    (folder / "letters").mkdir()
    (folder / "letters" / "letter.txt").write_text("not ours")


_MADE: list[Path] = []


def make_all(folder: Path) -> None:
    """All of it, for a campaign whose folder is the working one; made once in a process."""
    if not _MADE:
        kept = Path(tempfile.mkdtemp(prefix="campaign-fixtures-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        with inside(kept):
            for make in (make_files, make_run, make_comparison, make_huggingface):
                make(kept)
        _MADE.append(kept)
    shutil.copytree(_MADE[0], folder, dirs_exist_ok=True)


def make_run(folder: Path) -> None:
    """`run` with two checkpoints and diagnoses, and `run/finetune/…`."""
    must("train", "--config", "small.toml", "--data", "text.txt", "--router", "xmoe", "--out", "run")
    must("evaluate", "run", "--out", "run")
    must("diagnose", "run", "--eval-tokens", "64")
    must("finetune", "run", "--task", "task.tsv", "--steps", "2", "--length", "8", "--set", "batch_size=2")


def make_comparison(folder: Path) -> None:
    """`cmp`, two routers, with its tables, record and page."""
    words = ["compare", "--config", "small.toml", "--data", "text.txt", "--routers", "smoe,hyperrouter:hyper_dim=4"]
    must(*words, "--jobs", "1", "--out", "cmp")


def make_huggingface(folder: Path) -> None:
    """`hf`, a Mixtral of a few thousand weights, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder / "hf")
    words = {
        word: index for index, word in enumerate(["?", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJ", *"0123456789"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder / "hf")


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Works in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
