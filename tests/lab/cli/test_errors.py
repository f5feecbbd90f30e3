"""Bad input of every kind: one clear line that says what is allowed, exit code 2, nothing written."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pointsman_lab.cli.main import COMMANDS, main

COMPARE = ["compare", "--routers", "smoe"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("pointsman")
    assert "Traceback" not in captured.err
    return lines[0]


def test_a_name_that_python_takes_for_ascii_is_not_called_damaged(tmp_path: Path) -> None:
    for setting, says in (("0", "this one is UTF-8; PYTHONUTF8=1 reads it"), ("1", "größe: no such directory")):
        done = subprocess.run(
            [sys.executable, "-m", "pointsman_lab", "report", str(tmp_path / "größe").encode()],
            env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": setting}, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.decode().rstrip().endswith(says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compar"], "did you mean 'compare'"),
        (["hf"], "the action is missing; allowed: replace, materialize, upcycle"),
        (["compare"], "--routers is missing"),
        (["compare", "--routers", "hyperouter"], "did you mean 'hyperrouter'"),
        (["compare", "--routers", "smoe,,switch"], "empty name"),
        (["compare", "--routers", "hyperrouter:hiper_dim=3"], "did you mean 'hyper_dim'"),
        (["compare", "--routers", "smoe:gate=tanh"], "softmax or sigmoid"),
        ([*COMPARE, "--data", "enwik9"], "did you mean 'enwik8'"),
        ([*COMPARE, "--preset", "tinny"], "did you mean 'tiny'"),
        ([*COMPARE, "--stepps", "3"], "did you mean '--steps'"),
        ([*COMPARE, "--steps", "0"], "whole numbers from 1"),
        ([*COMPARE, "--steps", "1.5"], "whole numbers from 1"),
        ([*COMPARE, "--seeds", "x"], "whole numbers from 1"),
        ([*COMPARE, "--seeds", "2147483648"], "from 1 to 10,000"),
        ([*COMPARE, "--steps", str(2**70)], "from 1 to 2,147,483,647"),
        ([*COMPARE, "--set", f"model.dim={2**70}"], "numbers up to 1,048,576"),
        ([*COMPARE, "--set", "model.num_layers=1000000000"], "numbers up to 16,384"),
        ([*COMPARE, "--set", "learning_rate=1e300"], "numbers up to 1e+09"),
        ([*COMPARE, "--set", "batch_size=4294967296"], "numbers up to 1,048,576"),
        ([*COMPARE, "--set", "lr_schedule=constant", "--set", "final_learning_rate=1e-5"], "has no effect with lr_sch"),
        ([*COMPARE, "--steps", "20", "--set", "warmup_steps=21"], "warmup_steps=21 is above steps=20"),
        ([*COMPARE, "--out", ""], "argument --out: '': a name is missing"),
        (["verify", ""], "argument FOLDER: '': a name is missing"),
        (["audit", "m", "--tokenizer="], "argument --tokenizer: '': a name is missing"),
        (["check", "loop", "--lines", ""], "an empty name between commas"),
        ([*COMPARE, "--config=--"], "--config '--': not a value"),
        ([*COMPARE, "--set=--"], "--set '--': not a value"),
        ([*COMPARE, "--config", os.devnull], "no ordinary file"),
        ([*COMPARE, "--data", "caf\udce9.txt"], "its bytes are not UTF-8"),
        (["compare", "--routers", "smoe:capacity=1e30"], "numbers up to 1e+06"),
        (["compare", "--routers", f"hyperrouter:hyper_dim={2**70}"], "numbers up to 65,536"),
        (["finetune", "run", "--task", "sst2", "--epochs", "1e300"], "numbers from 0 to 1e+06"),
        ([*COMPARE, "--top-k", "0"], "whole numbers from 1"),
        ([*COMPARE, "--top-k", "1,9"], "from 1 to 8"),
        ([*COMPARE, "--top-k", "two"], "whole numbers from 1"),
        ([*COMPARE, "--train-top-k", "0:N"], "outside 1 to 8"),
        ([*COMPARE, "--train-top-k", "N:2"], "above the last"),
        ([*COMPARE, "--k-schedule", "linnear"], "did you mean 'linear'"),
        ([*COMPARE, "--train-top-k", "2", "--k-schedule", "cosine"], "no effect: k is 2 all along; --train-top-k 2:N"),
        ([*COMPARE, "--eval-tokens", "some"], "whole numbers from 1"),
        ([*COMPARE, "--set", "learning_rte=1"], "did you mean 'learning_rate'"),
        ([*COMPARE, "--set", "learning_rate"], "KEY=VALUE"),
        ([*COMPARE, "--set", "learning_rate=fast"], "a number"),
        ([*COMPARE, "--set", "seed=5"], "--set seed has no effect: --seeds and --routers say it"),
        ([*COMPARE, "--set", "model.router=xmoe"], "--set model.router has no effect"),
        ([*COMPARE, "--tune", "seed=5,6"], "--tune seed: all rows share it"),
        ([*COMPARE, "--tune", "eval_tokens=5,6"], "--tune eval_tokens: all rows share it"),
        ([*COMPARE, "--preset", "tiny-mlm", "--tune", "mask_rate=0.1,0.2"], "--tune mask_rate: all rows share it"),
        ([*COMPARE, "--device", "tpu9"], "cpu, cuda"),
        ([*COMPARE, "--device", "meta"], "allowed here is cpu"),
        (["train", "hyperrouter-enwik8-smal"], "did you mean 'hyperrouter-enwik8-small'"),
        (["train", "hyperrouter-enwik8-small", "--preset", "tiny"], "brings its own preset"),
        (["routers", "hyperouter"], "did you mean 'hyperrouter'"),
        (["evaluate", "nowhere"], "no run directory"),
        (["evaluate"], "RUN"),
        (["report", "nowhere"], "no such directory"),
        (["export", "nowhere"], "no run directory"),
        (["hf", "repace"], "did you mean 'replace'"),
        (["hf", "replace", "model", "--out", "o"], "--router is missing"),
        (["hf", "replace", "model", "--out", "o", "--router", "hyperouter"], "did you mean 'hyperrouter'"),
        (["hf", "upcycle", "model", "--experts", "0"], "whole numbers from 1"),
        (["hf", "materialize", "nowhere", "--out", "o"], "there is no such folder here"),
        (["evaluate", "run", "--attack-rate", "0.1"], "--attack-rate has no effect without --attack"),
        (["evaluate", "run", "--attack-seed", "1"], "--attack-seed has no effect without --attack"),
        ([*COMPARE, "--task-steps", "3"], "--task-steps has no effect without --task"),
        ([*COMPARE, "--task", "sst2", "--task-set", "epochs=1"], "unknown setting 'epochs'"),
        ([*COMPARE, "--task", "sst2", "--task-set", "model.dim=8"], "model.dim cannot be set"),
        ([*COMPARE, "--task", "sst2", "--task-set", "eval_split=valid"], "eval_split cannot be set: no fine-tuning"),
        ([*COMPARE, "--task", "sst2", "--task-steps", "3", "--task-epochs", "1"], "--task-epochs exclude each other"),
        ([*COMPARE, "--freeze", "router"], "--freeze has no effect without --task"),
        (["compare", "--task", "sst2", "--out", "c", "--steps", "3"], "--steps has no effect without --routers"),
        ([*COMPARE, "--task", "bankin77"], "did you mean 'banking77'"),
        (["finetune", "run", "--task", "sst2", "--balance", "inf"], "allowed are numbers from 0"),
        (["report", "run", "--paper", "x-moe", "--map", "none"], "--map has no effect with --paper"),
        (["report", "run", "--figures", "gif"], "allowed: pdf, png, svg"),
        (["audit", "model", "--set", "x=1"], "unknown flag --set"),
        (["submit", "entry", "--routr", "smoe"], "unknown flag --routr: did you mean '--router'"),
        (["train", "smoe"], "--router smoe"),
        (["train", "vmoe-s32-last2"], "--preset vmoe-s32-last2"),
        (
            ["compare", "--task", "sst2", "--out", "c", "--tokenizer", "pieces:500"],
            "--tokenizer has no effect without --routers",
        ),
        (
            ["routers", "--cost", "--preset", "tiny-vit", "--vocabulary", "7"],
            "--vocabulary has no effect with --preset",
        ),
        (["routers", "--cost", "--set", "steps=7"], "--set steps has no effect on a cost"),
        (["plan", "--preset", "tiny", "--gpus", "8,2000000000"], "whole numbers from 1 to 1,048,576"),
        (["plan", "--preset", "tiny-vit", "--vocabulary", "7"], "--vocabulary has no effect with --preset tiny-vit"),
        (["routers", "smoe", "--vocabulary", "7"], "--vocabulary has no effect without --cost"),
        (["routers", "smoe+similarty"], "did you mean 'similarity'"),
        (["routers", "--device", "tpu9"], "cpu, cuda"),
        (["export", "run", "--device", "tpu9"], "cpu, cuda"),
        (["report", "run", "--device", "tpu9"], "cpu, cuda"),
    ],
)
def test_mistakes_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *words)
    assert not any(tmp_path.iterdir())


def test_routers_are_listed_where_python_leaves_docstrings_out() -> None:
    code = "from pointsman_lab.cli.main import main; print(*[main(['routers', *more]) for more in ([], ['smoe'])])"
    done = subprocess.run([sys.executable, "-OO", "-B", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 0"


def test_routers_explains_names_mixers_and_specs(capsys: pytest.CaptureFixture[str]) -> None:
    for words, heads in (("smoe", ["smoe"]), ("+similarity", ["+similarity"]), ("similarity", ["+similarity"])):
        assert main(["routers", words]) == 0
        assert capsys.readouterr().out.splitlines()[:1] == heads
    assert main(["routers", "xmoe:gate=sigmoid+attention"]) == 0
    text = capsys.readouterr().out
    assert "X-MoE" in text
    assert "Attention-Inform" in text
    assert "balance: weight of the balance loss" in text
    assert main(["routers"]) == 0
    scores, choice = " ".join(capsys.readouterr().out.split()).split("as scores, ")[1].split(" as choice, ")
    assert "hyperrouter" in scores
    assert "loss-free" not in scores
    assert "hyperrouter" in choice
    assert "sigma" not in choice


def test_data_that_cannot_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty, short, binary = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "binary.txt"
    empty.write_bytes(b"")
    short.write_text("too short")
    binary.write_bytes(b"good text " * 50 + b"\xff\xfe" + b"more text " * 50)
    out = tmp_path / "out"
    assert "empty" in refused(capsys, *COMPARE, "--data", str(empty), "--out", str(out))
    assert "short" in refused(capsys, *COMPARE, "--data", str(short), "--out", str(out))
    line = refused(capsys, *COMPARE, "--data", f"{binary}:level=word", "--out", str(out))
    assert "UTF-8" in line
    assert "500" in line  # the offset
    assert not (out / "runs").exists() or not list((out / "runs").rglob("config.json"))


def test_a_row_that_cannot_be_built_is_told_before_any_is_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a short text, again and again\n" * 2000)
    out = tmp_path / "out"
    words = ["compare", "--data", str(tmp_path / "text.txt"), "--eval-tokens", "100", "--steps", "1", "--out", str(out)]
    for spec, says in [
        ("xmoe:tau0=-1", "allowed are numbers above 0"),
        ("smoe:balance=-1", "option balance=-1.0: allowed are numbers from 0"),
        ("smoe:z_loss=-0.5", "option z_loss=-0.5: allowed are numbers from 0"),
        ("smoe:capacity=0", "allowed are numbers above 0"),
        ("smoe+attention:heads=lowest-entropy-sequence", "later tokens"),
        ("expert-choice", "--set model.allow_non_causal=true"),
        ("thor:renormalize=false", "thor has its own rule for renormalize"),
    ]:
        assert says in refused(capsys, *words, "--routers", f"smoe,{spec}")
        assert not out.exists()


def test_folders_that_are_no_place_for_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, letters, comparison = tmp_path / "text.txt", tmp_path / "letters", tmp_path / "comparison"
    text.write_text("a short text, again and again\n" * 2000)
    letters.mkdir()
    (letters / "letter.txt").write_text("not ours")
    comparison.mkdir()
    (comparison / "comparison.json").write_text("{}")
    for folder in (letters, comparison):
        for resume in ([], ["--resume"]):
            words = ["train", "--data", str(text), "--out", str(folder), *resume]
            assert "not empty and holds no run" in refused(capsys, *words)
        assert len(list(folder.iterdir())) == 1
    assert "this is a file; allowed is a folder" in refused(capsys, "train", "--out", str(text))
    (tmp_path / "link").symlink_to("nowhere")
    for none in (tmp_path / "link", Path(os.devnull)):
        assert f"{none}: this is no folder; allowed is a folder" in refused(capsys, "train", "--out", str(none))
    for words in ([], ["--paper", "hyperrouter"]):
        assert "this is no folder; allowed" in refused(capsys, "report", "a", "--out", str(tmp_path / "link"), *words)
        assert "this is a file; allowed is a folder" in refused(capsys, "report", "a", "--out", str(text), *words)
    (tmp_path / "page.html").mkdir()
    for name in ("report", "share"):
        told = refused(capsys, name, "a", "--out", str(tmp_path / "page.html"))
        assert "this is a folder; allowed is a file" in told
    assert "name one of its runs" in refused(capsys, "evaluate", str(comparison))
    assert "leave --against out" in refused(capsys, "diagnose", str(comparison), "--against", str(letters))


def test_no_training_part(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    for part in ("valid", "test"):
        (folder / f"wiki.{part}.tokens").write_text(" = Title = \n a few words \n" * 50)
    monkeypatch.setenv("POINTSMAN_DATA", str(tmp_path / "data"))
    assert "train" in refused(capsys, *COMPARE, "--data", "wikitext-2", "--out", str(tmp_path / "out"))


def test_no_network(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "https_proxy": "http://127.0.0.1:9"}
    environment |= {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    environment.pop("POINTSMAN_DATA", None)
    words = [*COMPARE, "--data", "text8", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "pointsman_lab", *words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "text8" in done.stderr


def test_an_output_folder_that_is_something_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("not ours")
    assert "holds no comparison" in refused(capsys, *COMPARE, "--out", str(tmp_path))
    assert (tmp_path / "letter.txt").read_text() == "not ours"
    (tmp_path / "comparison.json").write_text('{"format": 1, "settings"')
    assert "not readable as JSON" in refused(capsys, *COMPARE, "--out", str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "no permission" in refused(capsys, *COMPARE, "--out", str(closed / "out"))


def test_errors_of_the_system_are_one_line() -> None:
    from pointsman_lab.cli.main import describe

    assert "no space left" in describe(OSError(28, "No space left on device", "/x/y"))
    assert "no permission: /x/y" in describe(PermissionError(13, "Permission denied", "/x/y"))


def test_config_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text('routers = "smoe"\nsteppps = 3\n')
    assert "did you mean 'steps'" in refused(capsys, "compare", "--config", str(file))
    file.write_text("routers = \n")
    assert "flags.toml" in refused(capsys, "compare", "--config", str(file))
    file.write_text('routers = "smoo"\nsteps = 3\n[set]\nlearning_rate = 0.1\n')
    assert "unknown router 'smoo'" in refused(capsys, "compare", "--config", str(file))
    file.write_text('routers = "smoe"\n[set]\nlearning_rate = "x"\n')
    assert "learning_rate" in refused(capsys, "compare", "--config", str(file))
    assert "No such file" in refused(capsys, "compare", "--config", str(tmp_path / "none.toml"))
    file.write_text('router = "smoe"\n')
    (tmp_path / "empty.toml").write_text("")
    assert "holds no" in refused(capsys, "submit", str(tmp_path), "--config", str(file)), "a flag that is needed"
    assert "required: --router" in refused(capsys, "submit", str(tmp_path))
    assert "required: --router" in refused(capsys, "submit", str(tmp_path), "--config", str(tmp_path / "empty.toml"))
    with pytest.raises(SystemExit):
        main(["submit", "--help"])
    assert " --router ROW" in capsys.readouterr().out.split("\n\n")[0], "not optional"


def test_a_command_does_without_the_streams_that_are_closed() -> None:
    for closed in ("1>&-", "2>&-", "0<&- 1>&- 2>&-"):
        script = f'exec "$0" -m pointsman_lab --help {closed}'
        done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert bool(done.stdout) == ("1>&-" not in closed)


def test_a_character_that_the_output_cannot_show_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    monkeypatch.setattr("pointsman_lab.cli.routers.run", lambda words: print("0.017 \u00b1 0.002") or 0)
    assert main(["routers"]) == 0
    assert shown.getvalue() == b"0.017 ? 0.002\n"


def test_a_reader_that_has_enough_ends_a_command_quietly() -> None:
    for words, unbuffered in ((["--help"], "1"), (["routers"], "1"), (["routers"], ""), (["train", "--help"], "")):
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        command = [sys.executable, "-m", "pointsman_lab", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as run:
            assert run.stdout is not None
            assert run.stderr is not None
            run.stdout.close()
            assert run.stderr.read() == b""
        assert run.returncode == 141


@pytest.mark.parametrize(
    ("command", "content", "says"),
    [
        ("compare", '{"steps": 0}', "--steps: '0'"),
        ("compare", '{"steps": null}', "whole numbers from 1"),
        ("compare", '["steps"]', "not a list"),
        ("compare", '{"routers": ["smoe"], "set": ["learning_rate"]}', "KEY=VALUE"),
        ("compare", '{"routers": ["smoe"], "set": {"model": {"dimm": 8}}}', "unknown setting 'model.dimm'"),
        ("compare", '{"tensorboard": "no"}', "true and false"),
        ("compare", '{"config": "other.json"}', "unknown flag 'config'"),
        ("export", '{"format": "pickle"}', "allowed: hf, safetensors"),
    ],
)
def test_values_in_config_files_are_checked_as_flags_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, content: str, says: str
) -> None:
    file = tmp_path / "flags.json"
    file.write_text(content)
    assert says in refused(capsys, command, *(["run"] if command == "export" else []), "--config", str(file))


def test_settings_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'eval_memory_length'" in refused(capsys, "evaluate", "run", "--set", "memory_length=8")
    assert "unknown flag --set" in refused(capsys, "report", "run", "--set", "x=1")


def test_help_is_there_for_every_command_and_loads_no_torch() -> None:
    for command in ([], *([name] for name in COMMANDS)):
        code = (
            f"import sys; sys.argv = ['pointsman', *{command!r}, '--help']\n"
            "from pointsman_lab.cli.main import main\n"
            "try: code = main()\n"
            "except SystemExit as exit: code = exit.code\n"
            "assert not code, code\n"
            "assert 'torch' not in sys.modules, 'torch was imported'\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        assert "usage" in done.stdout


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("Unable to allocate 9 TiB"), "Unable to allocate 9 TiB"),
        (MemoryError(), "a smaller model"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA out of memory."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 40 bytes"), "40 bytes"),
    ],
)
def test_out_of_memory_is_one_line(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(words: list[str]) -> int:
        raise error

    monkeypatch.setattr("pointsman_lab.cli.routers.run", run)
    line = refused(capsys, "routers")
    assert "out of memory" in line
    assert says in line


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("transformers.models", "pip install 'pointsman[hf]'"),
        ("jinja2", "pip install 'pointsman[report]'"),
        ("x", "pip install x"),
    ],
)
def test_a_missing_package_names_its_extra_alone(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(words: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("pointsman_lab.cli.audit.run", run)
    assert refused(capsys, "audit", "model").endswith(says)


def test_an_interrupt_in_a_destructor_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dropped:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def run(_: object) -> int:
        Dropped()
        for _ in range(3000):  # a sleep is not cut short by an interrupt that came before it
            time.sleep(0.01)
        return 0

    monkeypatch.setattr("pointsman_lab.cli.verify.run", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of xdist ignore it
    try:
        assert main(["verify", "x"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str]) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr("pointsman_lab.cli.routers.run", run)
    with pytest.raises(RuntimeError, match="ours"):
        main(["routers"])


@pytest.mark.parametrize("command", [*COMMANDS, "trace diff", "trace place", "hf replace", "hf upcycle"])
def test_help_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        main([*command.split(), "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_a_wrong_router_is_told_before_an_exam_reads_its_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_lab.exam.scores.tasks", None)
    assert "did you mean 'hyperrouter'" in refused(capsys, "exam", "hyperouter")
