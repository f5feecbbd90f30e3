"""Command lines from a grammar of every command's flags: each ends with exit code 0, or 2 and one line, in seconds.

The flags are read from the commands' own parsers, so that a new flag is tried without a change here; router options and
settings come from their registries. Values are good and hostile. A program is some command lines in a folder with a
run, a comparison, a model and odd files. Training stops before its first step, but for one line in twenty.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import sysconfig
import traceback
from argparse import Action
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import fixtures
from frame import Campaign, Program, Wrong

from pointsman_lab.cli.main import COMMANDS

LINES = 50  # a program
PATIENCE, HANG = 1.0, 25.0  # seconds until a line is interrupted, and until it must have ended
NUMBERS = [
    "0", "1", "2", "4", "8", "-1", "1.5", "1e3", "1e-9", "1e30", "1e-320", "nan", "inf", "-inf", "2147483647",
    "2147483648", str(2**63), str(2**70), "9" * 5000, "0x10", "１", "1_0", " 3", "", "two", "1,2,4", "4,4", "1,,2", ",",
    "N", "2:N", "N/2:N", "0:N", "N:1", "N/0:N", "all", "none", "None", "true", "[1]", "{}", "0,0.01", "1e400", "--",
]  # fmt: skip
PATHS = [
    "run", "run", "cmp", "cmp", "hf", "text.txt", "text.txt", "task.tsv", "empty.txt", "binary.bin", "letters",
    "nowhere", "nowhere/deep/er", "run/config.json", "run/checkpoints", "run/checkpoints/step-4", "run/finetune",
    "run/checkpoints/step-9", "run/finetune/task.tsv/seed-0", "cmp/runs/smoe/seed-0", "cmp/record.jsonl", "cmp/runs",
    ".", "", "/dev/null", "/dev/full", "pipe", "loop", "x" * 300, "a\nb", "ü", "-", "--", "text.txt/x", "out", "out/2",
    "stdlib", "enwik8", "wikitext-2", "sst2", "text.txt:level=word", "text.txt:level=char", "text.txt:level=",
    "task.tsv:text=text:label=label", "task.tsv:text=x", "multilingual:letters", "multilingual:nowhere", "cifar10-10k",
    "http://x/y", "own.py", "small.toml", "bad.toml", "deep.json", "list.json", "nul.json", "org/model", "a/b/c", ":",
    "none", "\udce9", "run:x=1", "%s{}", "text.txt::", "chats.jsonl", "odd.jsonl",
]  # fmt: skip
OUTS = [
    "out", "out", "out/2", "run", "cmp", "text.txt", "letters", "hf", "", "x" * 300, "/dev/null", "pipe", "loop", "é",
]  # fmt: skip
WORDS = [
    "softmax", "sigmoid", "true", "false", "none", "full", "all", "lower-entropy", "unit", "input", "attention",
    "auto", "cpu", "lowest-entropy", "lowest-entropy-sequence", "batch", "sequence", "step", "scores", "linear",
    "cosine", "float32", "bfloat16", "last", "mean", "router", "experts", "router,experts", "word", "char",
    "test", "valid", "train", "png", "gif", "png,svg", "hyperrouter", "x-moe", "mutual-inform",
    "pca", "tiny", "small", "tinny", "tiny-decoder", "safetensors", "hf", "pickle", "relu", "ffn", "base",
    "every:2:1", "last:2", "after:6", "cuda",
]  # fmt: skip
ODD = ["\n", "é", "%", "{", "'", '"', "=", ",", ":", "|", "+", " ", "\\", "0", "-", "\x1b", "\u202e", "𝟙", "\0"]
DEVICES = ["cpu", "cpu", "cpu", "cuda", "cuda:1", "meta", "mps", "tpu9", "", "cpu:0", "cpu:99", "xla", "cpu,cuda"]
IMPORTS = ["own.py", "own.py", "nowhere.py", "json", "no.such.module", "text.txt", "binary.bin", "", ".", "letters"]
TEMPLATES: dict[str, list[str]] = {
    "compare": ["--config", "small.toml", "--data", "text.txt", "--routers", "smoe,xmoe", "--jobs", "1", "--out", "c"],
    "train": ["--config", "small.toml", "--data", "text.txt", "--out", "t"],
    "evaluate": ["run"],
    "finetune": ["run", "--task", "task.tsv", "--steps", "1", "--length", "8", "--out", "f"],
    "diagnose": ["run", "--eval-tokens", "32"],
    "audit": ["hf", "--data", "text.txt", "--eval-tokens", "32"],
    "compress": ["hf", "--data", "text.txt", "--eval-tokens", "64", "--length", "16", "--random", "1", "--out", "half"],
    "report": ["run", "--map", "none"],
    "routers": ["smoe"],
    "export": ["run", "--out", "e"],
    "generate": ["run", "--prompt", "ab", "--tokens", "2"],
    "plan": ["--preset", "tiny", "--gpus", "2"],
    "verify": ["run"],
    "share": ["run", "--out", "packed.pointsman"],
    "open": ["run.pointsman", "--out", "opened"],
    "submit": ["cmp", "--router", "smoe", "--out", "entry.json"],
    "completion": ["bash"],
    "exam": ["smoe", "--tasks", "clusters", "--seeds", "1", "--out", "x"],
    "trace diff": ["traces/a", "traces/b"],
    "trace place": ["traces/a", "--devices", "2"],
    "hf replace": ["hf", "--router", "smoe:bias=false", "--out", "h"],
}
"""Command -> words that it accepts."""
GOOD: dict[str, list[str]] = {
    "seed": ["0", "3"], "top_k": ["1", "2", "1,2"], "eval_tokens": ["32", "64"], "device": ["cpu"], "steps": ["2", "4"],
    "router": ["smoe", "xmoe:gate=sigmoid", "hyperrouter:hyper_dim=4+similarity"], "routers": ["smoe", "xmoe,switch"],
    "seeds": ["1", "2"], "train_top_k": ["1", "2"], "length": ["8", "16"], "batch_size": ["1", "2"], "split": ["test"],
    "dtype": ["auto", "float32"], "map": ["none"], "config": ["small.toml"], "data": ["text.txt"], "figures": ["png"],
    "imports": ["own.py"], "tokens": ["1", "3"], "greedy": [], "spare": ["0", "2"], "cache": ["2"],
    "temperature": ["0", "1.5"], "top_p": ["0.9"], "balance": ["0", "0.01"], "freeze": ["router"], "attack": ["word"],
    "gpus": ["1", "2,4"], "baseline": ["smoe"],
}  # fmt: skip
"""Flag -> values that most commands accept; one without values has none."""


class Reached(BaseException):
    """The command line was accepted: the work begins."""


class Late(BaseException):
    """A line has not ended when it was interrupted."""


class CommandLines(Campaign):
    name, unit, usual, limit = "commands", "command lines", 1_500, 400.0

    def prepare(self, folder: Path) -> None:
        self.fixtures = folder
        _tiny_stdlib(folder)
        fixtures.make_all(folder)
        with fixtures.inside(folder):
            fixtures.make_traces(folder)
            fixtures.must("share", "run", "--out", "run.pointsman")
            (folder / "bad.toml").write_text("steps = \n")
            (folder / "deep.json").write_text("[" * 100_000)
            (folder / "list.json").write_text("[1, 2]")
            (folder / "nul.json").write_text('{"data": "a\\u0000b", "out": "o\\ud800"}')
            (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "abc"}]}\n{"text": "abc"}\n')
            (folder / "odd.jsonl").write_text('{"text": "\\ud800"}\n{"messages": [1, {"role": 2}]}\nx\n')
            (folder / "loop").symlink_to("loop")
            for command, words in TEMPLATES.items():  # imports what is imported late
                with Patched(checked=False), contextlib.suppress(Reached):
                    fixtures.called([*command.split(), *words])
            for made in ("c", "t", "e", "f", "x", "h", "half", "opened"):
                shutil.rmtree(folder / made, ignore_errors=True)

    def draw(self, random: Random) -> Program:
        return [drawn_line(random) for _ in range(LINES)]

    def check(self, program: Program, folder: Path) -> Counter[str]:
        shutil.copytree(self.fixtures, folder, dirs_exist_ok=True, symlinks=True)
        os.mkfifo(folder / "pipe")
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for all lines
        counts = Counter[str]()
        for number, line in enumerate(program):
            try:
                counts[ended := run_line(line, folder)] += 1
                counts["taken (all but the refused)"] += ended != "refused"
            except Wrong as wrong:
                raise Wrong(f"line {number}: pointsman {' '.join(map(repr, line['words']))}\n{wrong}") from None
        return counts + Counter({self.unit: len(program)})

    def simpler(self, step: Any) -> Iterator[Any]:
        words = step["words"]
        for place in range(1, len(words)):
            yield {**step, "words": words[:place] + words[place + 1 :]}
            if len(words[place]) > 40:
                yield {**step, "words": [*words[:place], words[place][: len(words[place]) // 2], *words[place + 1 :]]}
        if step.get("config") is not None:
            for key in step["config"]:
                yield {**step, "config": {name: value for name, value in step["config"].items() if name != key}}


def _tiny_stdlib(folder: Path) -> None:
    """A few files stand for the standard library: reading all of it takes seconds."""
    from pointsman_lab.data import sources

    real = Path(sysconfig.get_path("stdlib"))
    (folder / "stdlib").mkdir()
    for file in sorted(real.glob("*.py"))[:60]:
        (folder / "stdlib" / file.name).write_text(file.read_text(encoding="utf-8")[:200], encoding="utf-8")
    sources.sysconfig = SimpleNamespace(get_path=lambda _: str(folder / "stdlib"))  # type: ignore[assignment]


class Patched:
    """Nothing trains where `checked`; no worker process ever starts."""

    def __init__(self, *, checked: bool) -> None:
        self.checked = checked

    def __enter__(self) -> None:
        def reached(*_: object, **__: object) -> None:
            raise Reached

        modules = [(importlib.import_module("pointsman_lab.training.jobs"), "_side_by_side")]
        if self.checked:
            modules.append((importlib.import_module("pointsman_lab.training.loop").TrainingLoop, "loop"))
        self.before = [(owner, name, getattr(owner, name)) for owner, name in modules]
        for owner, name in modules:
            setattr(owner, name, reached)

    def __exit__(self, *_: object) -> None:
        for owner, name, value in self.before:
            setattr(owner, name, value)


def run_line(line: dict[str, Any], folder: Path) -> str:
    """Runs a line, and says how it ended. Raises Wrong."""
    words = line["words"]
    if line.get("config") is not None:
        (folder / "drawn.json").write_text(json.dumps(line["config"]))
    os.chdir(folder)
    alarms = iter([HANG])

    def ring(*_: object) -> None:
        seconds = next(alarms, None)
        if seconds is None:
            raise Late
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGALRM, ring)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        with Patched(checked=not line["really"]):
            code, out, err = fixtures.called(words)
    except Reached:
        return "accepted"
    except Late:
        raise Wrong(f"still running {HANG:g} s after an interrupt: a hang") from None
    except BaseException:
        raise Wrong(traceback.format_exc()) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    interrupted = next(alarms, None) is None
    if "Traceback" in out + err:
        raise Wrong(f"a traceback: {err}")
    if code == 0 or (code == 1 and words[0] in ("verify", "check")):
        return "done"
    if code == 130 and interrupted:
        return "interrupted"
    lines = err.rstrip("\n").split("\n")
    if code != 2 or not lines[-1].startswith("pointsman"):
        raise Wrong(f"exit code {code}: {err}")
    return "refused"  # lines before the last are notes of what was done or passed over


IN_TWO_WORDS = ("hf replace", "hf materialize", "hf upcycle", "trace diff", "trace place")


def good_line(random: Random) -> dict[str, Any]:
    """A line that is accepted, most often: what a command needs, and some of its flags with good values."""
    command = random.choice(list(TEMPLATES))
    words = [*command.split(), *TEMPLATES[command]]
    flags = [action for action in _actions(command) if action.dest in GOOD and action.option_strings]
    for action in random.sample(flags, min(random.choice([0, 0, 1, 1, 2]), len(flags))):
        flag = next(word for word in action.option_strings if word.startswith("--"))
        if flag not in words:
            words += [flag, *([random.choice(values)] if (values := GOOD[action.dest]) else [])]
    return {"words": words, "config": None, "really": random.random() < 0.02}


def drawn_line(random: Random) -> dict[str, Any]:
    if random.random() < 0.6:
        return good_line(random)
    first = {name.split()[0] for name in IN_TWO_WORDS}
    command = random.choice([name for name in COMMANDS if name not in first] * 3 + list(IN_TWO_WORDS))
    actions = [a for a in _actions(command) if a.option_strings and "--help" not in a.option_strings]
    words = command.split()
    config = None
    if random.random() < 0.16:
        words += TEMPLATES.get(command, [])
    elif any(not a.option_strings for a in _actions(command)) and random.random() < 0.9:
        words.append(drawn_spec(random) if command == "routers" else random.choice(PATHS))
        words += [random.choice(PATHS)] * (random.random() < 0.05)
    for _ in range(random.choice([0, 1, 1, 1, 2, 2, 3, 5])):
        action = random.choice(actions)
        flag = next(word for word in action.option_strings if word.startswith("--"))
        if action.nargs == 0:
            words.append(flag)
        elif random.random() < 0.1:
            words.append(f"{flag}={drawn_value(random, action)}")
        else:
            words += [flag, drawn_value(random, action)]
    if random.random() < 0.06:
        config = drawn_config(random, actions)
        words += ["--config", "drawn.json"]
    for _ in range(random.choice([0] * 5 + [1, 2])):
        words = mutated(random, words)
    return {"words": words, "config": config, "really": random.random() < 0.05}


def drawn_value(random: Random, action: Action) -> str:
    if action.choices and random.random() < 0.6:
        return str(random.choice(list(action.choices)))
    own = {
        "out": OUTS, "device": DEVICES, "imports": IMPORTS, "data": PATHS, "against": PATHS, "config": PATHS,
        "task": PATHS, "paper": WORDS,
    }.get(action.dest)  # fmt: skip
    if own and random.random() < 0.9:
        return random.choice(own)
    if action.dest in ("router", "routers", "baseline", "task_routers") and random.random() < 0.9:
        sign = "," if action.dest.endswith("routers") else "|"
        return sign.join(drawn_spec(random) for _ in range(random.choice([1, 1, 1, 2, 3])))
    if action.dest in ("set", "task_set") and random.random() < 0.95:
        return f"{random.choice(_settings())}={random.choice(NUMBERS + WORDS)}"
    if action.type is not None and random.random() < 0.8:
        return random.choice(NUMBERS)
    return random.choice(random.choice([NUMBERS, WORDS, PATHS]))


def drawn_spec(random: Random) -> str:
    """A router spec: name, options of its own and common ones, perhaps a mixer."""
    from pointsman.routers.frame.registry import BASELINES, COMMON, ROUTERS, entry, list_mixers, list_routers

    def part(name: str, extra: list[str]) -> str:
        options = [*(entry(name).options if name in ROUTERS or name in list_mixers() else ()), *extra, "nope"]
        pairs = [
            f"{random.choice(options)}={random.choice(NUMBERS + WORDS)}" for _ in range(random.choice([0, 0, 1, 2]))
        ]
        return ":".join([name, *pairs])

    name = random.choice([*list_routers(), *BASELINES, "mine", "smo", ""])
    spec = part(name, list(COMMON.options))
    if random.random() < 0.25:
        spec += "+" + part(random.choice([*list_mixers(), "similarty", ""]), [])
    return spec


def drawn_config(random: Random, actions: list[Action]) -> dict[str, Any]:
    """A configuration file of flags, with values of right and wrong types."""
    config: dict[str, Any] = {}
    for _ in range(random.randint(0, 4)):
        action = random.choice(actions)
        key = next(word for word in action.option_strings if word.startswith("--"))[2:]
        value: Any = drawn_value(random, action)
        config[key] = random.choice(
            [value, value, [value], 3, -1.5, None, True, {}, [], {"a": {"b": 1}}, "a\0b", 1e400]
        )
    if random.random() < 0.3:
        config["set"] = {random.choice(_settings()): random.choice([*NUMBERS, 3, None, [1, 2], {"x": 1}, True])}
    return {key.encode("utf-8", "replace").decode(): value for key, value in config.items()}


def mutated(random: Random, words: list[str]) -> list[str]:
    """The line with one accident of the hand."""
    words = list(words)
    place = random.randrange(len(words))
    word = words[place]
    kind = random.randrange(6)
    if kind == 0 and len(words) > 1:
        del words[place]
    elif kind == 1:
        words.insert(place, word)
    elif kind == 2:
        other = random.randrange(len(words))
        words[place], words[other] = words[other], word
    elif kind == 3:
        words[place] = word[: random.randrange(len(word) + 1)]
    elif kind == 4:
        cut = random.randrange(len(word) + 1)
        words[place] = word[:cut] + random.choice(ODD) + word[cut:]
    else:
        words.insert(place, random.choice(random.choice([NUMBERS, WORDS, PATHS])))
    return words


_CACHE: dict[str, Any] = {}


def _actions(command: str) -> list[Action]:
    if command not in _CACHE:
        name, *action = command.split()
        _CACHE[command] = importlib.import_module(f"pointsman_lab.cli.{name}").parser(*action)._actions
    return list(_CACHE[command])


def _settings() -> list[str]:
    if "settings" not in _CACHE:
        from pointsman_lab.registry import families
        from pointsman_lab.training.config import settings

        names = dict.fromkeys(name for family in families() for name in settings(family))
        _CACHE["settings"] = [*names, "model.seed", "nope", "model", "model.", "", "model.dim.x"]
    found: list[str] = _CACHE["settings"]
    return found
