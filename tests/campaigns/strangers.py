"""Strangers: a folder of every family with something hostile in it, read by every command that reads such a folder.

Each command ends with exit code 0 (`verify`: 1) or 2. Nothing outside --out is written, nothing outside the folder and
its named data is read, no code of it runs, no program starts, and neither disk nor memory takes more than ten times the
folder, beyond what any folder takes. `observer.py` sees what is opened; files are compared before and after.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fixtures
from damage import NEVER_READ, changed
from frame import Campaign, Program, Wrong
from observer import Seen, observed

PAGE, OUT = ["--map", "none", "--out", "@out/page.html"], ["--out", "@out"]
FEW = ["--eval-tokens", "32", *OUT]
TEXT = ["generate", "@of", "--prompt", "ab", "--tokens", "4", "--out", "@out/texts.jsonl"]
ALL: list[list[str]] = [["evaluate", "@of", *OUT], ["export", "@of", *OUT], ["diagnose", "@of", *FEW],
                        ["report", "@of", *PAGE], ["verify", "@of", *OUT]]  # fmt: skip
READERS: dict[str, list[list[str]]] = {
    "run": [
        *ALL, ["report", "@of", "--out", "@out/page.html"], TEXT,
        ["finetune", "@of", "--task", "task.tsv", "--steps", "1", "--length", "8", *OUT],
        ["evaluate", "@of/finetune/task.tsv/seed-0", *OUT], ["report", "@of/finetune/task.tsv/seed-0", *PAGE],
        ["diagnose", "@of", "--against", "@of/checkpoints/step-2", *FEW],
        ["train", "--config", "small.toml", "--data", "text.txt", "--router", "xmoe", "--resume", "--out", "@of"],
    ],
    "decoder": [
        *ALL, ["export", "@of", "--format", "hf", *OUT], [*TEXT, "--show-experts"],
    ],
    "masked": [*ALL, ["report", "@of", "--out", "@out/page.html"]],
    "translated": [*ALL, ["report", "@of", "--out", "@out/page.html"]],
    "pictures": ALL,
    "ranks": [*ALL, TEXT],
    "cmp": [
        ["report", "@of", *PAGE], ["report", "@of", "--out", "@out/page.html"], ["verify", "@of", *OUT],
        ["report", "@of", "--paper", "hyperrouter", *OUT], ["report", "@of", "--figures", "png", *PAGE[:2], *OUT],
        ["diagnose", "@of", *FEW], ["evaluate", "@of/runs/smoe/seed-0", *OUT],
        ["compare", "--config", "small.toml", "--data", "text.txt", "--routers", "smoe", "--jobs", "1", "--out", "@of"],
    ],
    "hf": [
        ["audit", "@of", "--data", "text.txt", *FEW], ["diagnose", "@of", "--data", "text.txt", *FEW],
        ["hf", "replace", "@of", "--router", "xmoe", *OUT], ["verify", "@of", *OUT],
        ["train", "--from", "@of", "--data", "text.txt", "--steps", "1", *OUT],
    ],
    "replaced": [
        ["audit", "@of", "--data", "text.txt", *FEW], ["hf", "materialize", "@of", *OUT], ["verify", "@of", *OUT],
    ],
    "audited": [["report", "@of", *PAGE], ["verify", "@of", *OUT]],
    "exam": [
        ["verify", "@of", *OUT],
        ["exam", "smoe", "--tasks", "clusters", "--seeds", "1", "--jobs", "1", "--out", "@of"],
    ],
    "traces": [
        ["trace", "diff", "@of/a", "@of/b", *OUT], ["trace", "place", "@of/a", "--devices", "2", "--cache", "2", *OUT],
        ["verify", "@of/a", *OUT],
    ],
}  # fmt: skip
"""Family -> commands; @of is the folder, @out the one for results."""
THEIRS = ("hf", "replaced")
"""Folders that transformers reads: what it makes of links, numbers and sizes is its own."""
NAMED = ("data", "task", "path", "name")
"""Keys of JSON whose value names data that a command may read, wherever they are."""
MARK = "<script>alert(1)</script>"
SPARE_MEMORY, SPARE_DISK = 200 << 20, 6 << 20
CODE = "open({!r}, 'w').write('run')\n"


class Strangers(Campaign):
    name, unit, usual, limit = "strangers", "hostile folders", 40, 90.0

    def prepare(self, folder: Path) -> None:
        self.fixtures = folder
        sys.modules["umap"] = None  # type: ignore[assignment] - compiles for half a minute
        self.made = fixtures.make_all(folder, families=True)  # runs name their data there
        self.files = {
            of: sorted(
                file.relative_to(folder).as_posix() for file in (folder / of).rglob("*")
                if file.is_file() and file.name != ".lock" and file.suffix not in NEVER_READ
            )
            for of in READERS
        }  # fmt: skip
        import matplotlib.font_manager  # noqa: F401 - it starts programs when it is imported
        import torch._inductor.config  # noqa: F401 - so does it

        environment, trial = dict(os.environ), folder.parent / "trial"
        for of, readers in READERS.items():  # imports what is imported late
            step = {"of": of, "file": self.files[of][0], "how": "nothing", "seed": 0}
            for words in readers:
                if self._read(step, words, trial) != "read":
                    raise Wrong(f"{of}: pointsman {' '.join(words)} refuses the folder as it was made")
                os.chdir(folder)
                shutil.rmtree(trial)
        os.environ.update(environment)

    def draw(self, random: Random) -> Program:
        of = random.choice(list(READERS))
        kinds = [kind for kind in KINDS if not (of in THEIRS and kind in ("number", "bomb"))]  # transformers reads it
        return [{
            "of": of, "file": random.choice(self.files[of]), "how": random.choice(kinds),
            "seed": random.randrange(10**6), "by": random.sample(range(len(READERS[of])), 2),
        }]  # fmt: skip

    def check(self, program: Program, folder: Path) -> Counter[str]:
        counts = Counter[str]()
        for step in program:
            for number, reader in enumerate(step["by"]):
                place = folder / str(number)
                counts[self._read(step, READERS[step["of"]][reader], place)] += 1
                shutil.rmtree(place)
            counts[self.unit] += 1
            counts[step["how"]] += 1
        return counts

    def simpler(self, step: Any) -> Iterator[Any]:
        if len(step["by"]) > 1:
            for reader in step["by"]:
                yield {**step, "by": [reader]}

    def _read(self, step: dict[str, Any], words: list[str], root: Path) -> str:
        stranger, mine, work, out = (root / name for name in ("stranger", "mine", "work", "out"))
        shutil.copytree(self.fixtures / step["of"], stranger / step["of"], symlinks=True)
        shutil.copytree(stranger, mine / "copy")
        (mine / "secret.txt").write_text("not ours: " + "x" * 100)
        for name in ("home", "empty"):
            (mine / name).mkdir()
        work.mkdir()
        for name in ("text.txt", "task.tsv", "small.toml"):
            shutil.copy(self.fixtures / name, work)
        (root / "tmp").mkdir()
        named = KINDS[step["how"]](stranger / step["file"], Random(step["seed"]), mine)
        words = [word.replace("@of", str(stranger / step["of"])).replace("@out", str(out)) for word in words]
        ways = [(place, *place.parents) for word in words if (place := Path(word)).is_relative_to(stranger)]
        named |= any(one.is_symlink() for way in ways for one in way if one.is_relative_to(stranger))  # the user's way
        os.environ |= {"HOME": str(mine / "home"), "TMPDIR": str(root / "tmp")}
        tempfile.tempdir = None
        os.chdir(work)
        size = _size(stranger)
        writes_in = stranger / step["of"] if str(out) not in " ".join(words) else out
        before, line = _state(root, writes_in), f"pointsman {' '.join(words)}"
        Path("/proc/self/clear_refs").write_text("5")
        at_first = _peak()
        with observed(mine) as seen:
            try:
                code, told, err = fixtures.called(words)
            except BaseException:
                raise Wrong(f"{line}\n{traceback.format_exc()}") from None
        grown = _peak() - at_first
        self.told = told + err
        if code not in (0, 1 if words[0] == "verify" else 0, 2):
            raise Wrong(f"{line}\nexit code {code}: {err}")
        if "\x1b" in told + err:
            raise Wrong(f"{line}\nit prints what a terminal obeys: {told + err!r}")
        after = _state(root, writes_in)
        if wrong := sorted(str(one) for one in before.keys() | after.keys() if before.get(one) != after.get(one)):
            raise Wrong(f"{line}\nwrites outside --out: {wrong[:5]}")
        self._judge(seen, root, stranger, writes_in, named, line)
        if grown > SPARE_MEMORY + 10 * size:
            raise Wrong(f"{line}\n{size:,} bytes take {grown:,} bytes of memory")
        if (made := _size(out) + _size(root / "tmp")) > SPARE_DISK + 10 * size:
            raise Wrong(f"{line}\n{size:,} bytes take {made:,} bytes of disk")
        for page in out.rglob("*.html") if out.is_dir() else ():
            if MARK in page.read_text():
                raise Wrong(f"{line}\nthe page runs a stranger's script")
        return "refused" if code == 2 else "found" if code == 1 else "read"

    def _judge(self, seen: Seen, root: Path, stranger: Path, out: Path, named: bool, line: str) -> None:
        if seen.started:
            raise Wrong(f"{line}\nstarts {seen.started[:3]}")
        ours = (stranger, out, root / "work", root / "tmp", Path(os.environ["XDG_CACHE_HOME"]), *SYSTEM, self.made)
        read = {file for file in seen.read | seen.opened if not any(file.is_relative_to(one) for one in ours)}
        if read and not named:
            raise Wrong(f"{line}\nreads outside the folder: {sorted(map(str, read))[:5]}")
        wrote = {file for file in seen.written if not any(file.is_relative_to(one) for one in (out, *ours[2:5]))}
        if wrote - {Path(os.devnull)}:
            raise Wrong(f"{line}\nwrites outside --out: {sorted(map(str, wrote))[:5]}")
        if code := [file for file in seen.read if file.suffix == ".py" and file.is_relative_to(stranger)]:
            raise Wrong(f"{line}\nreads the folder's code: {code[:3]}")


SYSTEM = tuple(
    Path(one).resolve() for one in
    (sys.prefix, sys.base_prefix, Path(__file__).parents[2], "/usr", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev")
)  # fmt: skip


def _state(root: Path, but: Path) -> dict[Path, Any]:
    """Kind, size and time of everything below a folder, itself included, but for temporary files and one folder."""
    found = {}
    for place in (root, *root.rglob("*")):
        if (
            place in (but, root, root / "tmp", but.parent)
            or place.is_relative_to(but)
            or place.is_relative_to(root / "tmp")
        ):
            continue
        about = place.lstat()
        found[place] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def _peak() -> int:
    """The most resident memory since `clear_refs` was written, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _texts(mine: Path) -> list[str]:
    secret, copy = str(mine / "secret.txt"), str(mine / "copy")
    return [
        secret, copy, f"file://{secret}", "../../mine/secret.txt", "../../../mine/secret.txt", f"{mine}/new/file",
        "~/.bashrc", "~/new", "..", ".", "/dev/zero", "/proc/self/environ", "a\0b", "x" * 300,
        "\x1b]0;owned\x07\x9b31m", MARK, "=HYPERLINK(1)", "javascript:alert(1)", "evil", f"{copy}/evil.py",
        "http://127.0.0.1:9/x", "org/model",
        "__import__('os').system('touch x')", "{{ 7 * 7 }}", "%s%n", "\u202e", "smoe|" * 2000, "N" * 10**6,
    ]  # fmt: skip


def nothing(file: Path, random: Random, mine: Path) -> bool:
    """The folder is harmless."""
    return False


def text(file: Path, random: Random, mine: Path) -> bool:
    """A text in it names another file, or is an order to a terminal, a page, a shell."""
    value, named = random.choice(_texts(mine)), []

    def change(holder: Any, key: Any) -> None:
        holder[key] = value
        named.append(key in NAMED)

    _json(file, random, change)
    return any(named)


def key(file: Path, random: Random, mine: Path) -> bool:
    value = random.choice(_texts(mine))

    def change(holder: Any, name: Any) -> None:
        if isinstance(holder, dict):
            holder[value] = holder.pop(name)

    _json(file, random, change)
    return False


def number(file: Path, random: Random, mine: Path) -> bool:
    value = random.choice([2**20, 10**6, 10**7, 2**31 - 1, 10**9, 2**63, 10**30, 1e300, -(2**31)])
    _json(file, random, lambda holder, name: holder.__setitem__(name, value))
    return False


def _json(file: Path, random: Random, change: Callable[[Any, Any], None]) -> None:
    """Changes a value, most often a leaf, of this file, or of the nearest one that is JSON."""
    if file.suffix not in (".json", ".jsonl"):
        others = sorted(other for other in file.parent.rglob("*.json*") if other.is_file())
        others = others or sorted(other for other in file.parents[1].rglob("*.json*") if other.is_file())
        if not others:
            return
        file = random.choice(others)
    changed(file, random, change)


def link(file: Path, random: Random, mine: Path) -> bool:
    """It is a link to a whole copy outside, or to nothing there, or a hard link."""
    relative = file.relative_to(mine.parent / "stranger")
    file.unlink()
    how = random.choice(["copy", "copy", "new", "relative"])
    target = mine / "copy" / relative if how != "new" else mine / "empty" / file.name
    file.symlink_to(os.path.relpath(target, file.parent) if how == "relative" else target)
    return relative.parts[0] in THEIRS and how != "new"  # the hub's cache is made of links


def folder_link(file: Path, random: Random, mine: Path) -> bool:
    """A folder above it is a link to a whole copy outside, or to an empty folder there."""
    stranger = mine.parent / "stranger"
    parts = file.relative_to(stranger).parts
    above = [stranger.joinpath(*parts[:depth]) for depth in range(2, len(parts))]
    folder = random.choice(above) if above else None
    if folder is None:
        return link(file, random, mine)
    shutil.rmtree(folder)
    folder.symlink_to(random.choice([mine / "copy" / folder.relative_to(stranger), mine / "empty"]))
    return False


def added(file: Path, random: Random, mine: Path) -> bool:
    """Names that a command writes, or that Python or transformers would look for, are links or code."""
    for name in (".lock", "report.html", "explorer.json", "diagnostics.json", "evaluation-x.json", "record.jsonl",
                 "checkpoints", "runs", f".{file.name}.writing-1-x+", "results.csv", "verify.txt"):  # fmt: skip
        place = file.parent / name
        if not os.path.lexists(place) and random.random() < 0.4:
            place.symlink_to(random.choice([mine / "secret.txt", mine / "empty", mine / "new"]))
    for name in ("evil.py", "sitecustomize.py", "torch.py", "modeling_evil.py", "conftest.py"):
        (file.parent / name).write_text(CODE.format(str(mine / "new")))
    for config in [
        one for one in (file.parent / "config.json", file.parent / "tokenizer_config.json") if one.is_file()
    ]:
        values = json.loads(config.read_text())
        own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", "evil.T"]}
        evil = [str(file.parent / "evil.py"), str(mine / "copy" / "evil.py"), "evil"]
        values |= {"auto_map": own, "imports": evil} if random.random() < 0.7 else {"imports": evil}
        config.write_text(json.dumps(values))
    return False


def bomb(file: Path, random: Random, mine: Path) -> bool:
    """A little that becomes much: packed, repeated, nested, sparse."""
    content = base64.b64encode(zlib.compress(bytes(1 << 28), 9)).decode()
    kind = random.randrange(6)
    if file.suffix == ".safetensors" or kind == 0:
        header = {"x": {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]}}
        packed = json.dumps(header).encode()
        file.write_bytes(len(packed).to_bytes(8, "little") + packed)
    elif kind == 1:
        file.write_text("[" + "0," * 2_000_000 + "0]")
    elif kind == 2:
        file.write_text('{"a":' * 200_000)
    elif file.name == "record.jsonl":
        entry = json.loads(file.read_text().splitlines()[0])
        steps = list(range(20_000))
        group = {"fields": ["step", "kind", "t"], "same": {"kind": "a", "t": "x" * 20_000}, "each": {"step": steps}}
        entry["path"], entry["files"]["metrics.jsonl"] = "runs/new/seed-0", [group]
        file.write_text(json.dumps(entry) + "\n")
    elif kind == 3:
        sample = {"format": 1, "tokens": ["a"] * 2000, "top_k": [1], "num_experts": 200, "layers": ["x"], "usage": {},
                  "routing": content, "map": {"indices": [0], "top_k": 1, "layers": {}}}  # fmt: skip
        (file.parent / "explorer.json").write_text(json.dumps(sample))
    elif kind == 4:
        rows = '{"kind": "routing", "step": 1, "layer": "a", "load": [1]}\n' * 40_000
        (file.parent / "metrics.jsonl").write_text(rows)
    else:
        changed_text = random.choice(['"' + "x" * (1 << 22) + '"', "9" * 10**6])
        _json(file, random, lambda holder, name: holder.__setitem__(name, changed_text))
    return False


KINDS: dict[str, Callable[[Path, Random, Path], bool]] = {
    "nothing": nothing, "text": text, "key": key, "number": number, "link": link, "folder link": folder_link,
    "added": added, "bomb": bomb,
}  # fmt: skip
"""What makes a folder hostile; whether what it then names may be read."""
