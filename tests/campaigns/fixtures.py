"""What campaigns start from: the smallest run, comparison, fine-tuning, Hugging Face model and files."""

import atexit
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import torch

from pointsman.parallel import STORE
from pointsman_lab._files import write_whole
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
    return Stages(LinearScorer(layer.dim, layer.columns, noise=noise))
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


def forked(folder: Path, words: Sequence[str], first: Callable[[], object]) -> tuple[int, int]:
    """A command line in a process of its own, after `first` there: its id, and a pipe with its errors."""
    out, into = os.pipe()  # a limit on files does not hold for it
    if pid := os.fork():
        os.close(into)
        return pid, out
    status = 1
    try:
        os.close(out)
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        try:
            first()
            status, _, said = called(words)
        except BaseException:
            said = traceback.format_exc()
        os.write(into, said.encode()[:50_000])
    finally:
        os._exit(status)


def finished(pid: int, pipe: int) -> tuple[int, str]:
    """Exit code or -signal, and the errors."""
    with open(pipe, encoding="utf-8") as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def make_files(folder: Path) -> None:
    """Texts, tasks and settings, good and bad. From here on no run asks git for its commit, which takes long."""
    environment.commit = lambda: None
    random = Random(0)
    letters = ["".join(random.choices("abcdefgh", k=random.randint(1, 5))) for _ in range(30)]
    (folder / "text.txt").write_text("? " + "".join(random.choice(letters) + random.choice(" \n") for _ in range(400)))
    rows = [f"{random.choice(letters)} {random.choice(letters)}\t{number % 2}" for number in range(120)]
    (folder / "task.tsv").write_text("text\tlabel\n" + "".join(f"{row}\n" for row in rows))
    (folder / "small.toml").write_text(SMALL)
    (folder / "own.py").write_text(OWN_ROUTER)
    (folder / "empty.txt").write_text("")
    (folder / "binary.bin").write_bytes(random.randbytes(500))
    (folder / "letters").mkdir()
    (folder / "letters" / "letter.txt").write_text("not ours")


_MADE: list[Path] = []


def make_all(folder: Path, *, families: bool = False) -> Path:
    """All of it, for a campaign whose folder is the working one; made once in a process, in the folder returned."""
    if not _MADE:
        _MADE.append(Path(tempfile.mkdtemp(prefix="campaign-fixtures-")))
        atexit.register(shutil.rmtree, _MADE[0], ignore_errors=True)
    with inside(_MADE[0]):
        if not Path("hf").exists():
            for make in (make_files, make_run, make_comparison, make_huggingface):
                make(_MADE[0])
        if families and not Path("exam").exists():
            make_families(_MADE[0])
    shutil.copytree(_MADE[0], folder, dirs_exist_ok=True)
    return _MADE[0]


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


TASKS = {"masked": "masked_language_modelling", "translated": "translation", "pictures": "images"}
"""A run of a few steps in this folder -> its task's example in tests/tasks/test_contract.py; data beside it."""


def make_families(folder: Path) -> None:
    """A run of every other family, of two ranks, an audit, an exam and two traces."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.tasks import test_contract

    for name, task in TASKS.items():
        (folder / f"{name}-data").mkdir()
        getattr(test_contract, task)(folder / f"{name}-data").train(folder / name, None, None)
    words = ["train", "--config", "small.toml", "--data", "text.txt"]
    must(*words, "--preset", "tiny-decoder", "--router", "smoe:bias=false", "--out", "decoder")
    over_ranks(2, *words, "--out", "ranks")
    must("audit", "hf", "--data", "text.txt", "--eval-tokens", "64", "--out", "audited")
    must("hf", "replace", "hf", "--router", "smoe:bias=false", "--out", "replaced")
    must("share", "run", "--out", "shared/run.pointsman")
    make_exam(folder / "exam")
    make_traces(folder)


def over_ranks(count: int, *words: str) -> None:
    """A command line on so many ranks, which are forks of this process: they import nothing anew."""
    kept, alive = os.pipe()
    ranks = []
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(count):
            if (child := os.fork()) == 0:
                os.dup2(kept, 0)
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
                os.environ |= {name: str(value) for name, value in places.items()} | {STORE: f"{meeting}/store"}
                code = 1
                try:
                    os.close(alive)
                    code = called(words)[0]
                finally:
                    os._exit(code)
            ranks.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    os.close(kept)
    os.close(alive)
    assert codes == [0] * count, codes


def make_exam(out: Path) -> None:
    """The exam of one task, with invented figures."""
    from pointsman_lab.exam.cell import VERSION, path_of
    from pointsman_lab.exam.exam import ALWAYS, PLAN

    rows = [*ALWAYS, "smoe"]
    write_whole(out / PLAN, json.dumps({"version": VERSION, "rows": rows, "tasks": ["clusters"], "seeds": 1}))
    for place, row in enumerate(rows):
        found = {"value": 0.1 * place, "curve": [[1, 0.5], [2, 0.1 * place]], "used": 4}
        tried = [["smoe", 1e-3, 1000, 0.1]]
        cell = {"row": row, "tried": tried, "chosen": {"spec": row, "rate": 1e-3}, "runs": {"0": found}}
        write_whole(path_of(out, "clusters", row), json.dumps(cell))


def make_traces(folder: Path) -> None:
    """`traces/a` and `traces/b`."""
    from pointsman.traces import RoutingTrace

    (folder / "traces").mkdir(exist_ok=True)
    torch.manual_seed(0)
    for name in ("a", "b"):
        chosen = {f"layer.{index}": torch.rand(40, 4).topk(2).indices.short() for index in range(2)}
        RoutingTrace(chosen, dict.fromkeys(chosen, 4), torch.tensor([25, 15])).save(folder / "traces" / name)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Works in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
