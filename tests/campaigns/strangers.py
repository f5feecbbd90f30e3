"""Strangers and damage: a folder of every family, spoiled, and read by the commands that read such a folder.

Each command ends with exit code 0 (`verify`: 1) or 2. Nothing outside --out is written, nothing outside the folder and
its named data is read, no code of it runs, no program starts, and neither disk nor memory takes more than ten times the
folder, beyond what any folder takes. `observer.py` sees what is opened; files are compared before and after.

Of damage, `verify` says more: what it calls whole no command refuses; what is refused is named; and what is computed
from a damaged checkpoint is what a whole one gives, the last or one before it.
"""

import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import fixtures
from frame import Campaign, Program, Wrong
from observer import Seen, observed
from spoil import DAMAGE, HOSTILE, MARK, THEIRS, Spoil

PAGE, OUT = ["--map", "none", "--out", "@out/page.html"], ["--out", "@out"]
FEW = ["--eval-tokens", "32", *OUT]
TEXT = ["generate", "@of", "--prompt", "ab", "--tokens", "4", "--out", "@out/texts.jsonl"]
SHARE = ["share", "@of", "--out", "@out/one.pointsman"]
ALL: list[list[str]] = [["evaluate", "@of", *OUT], ["export", "@of", *OUT], ["diagnose", "@of", *FEW],
                        ["report", "@of", *PAGE], ["verify", "@of", *OUT]]  # fmt: skip
READERS: dict[str, list[list[str]]] = {
    "run": [
        *ALL, ["report", "@of", "--out", "@out/page.html"], TEXT, SHARE,
        ["finetune", "@of", "--task", "task.tsv", "--steps", "1", "--length", "8", *OUT],
        ["finetune", "@of", "--task", "task.tsv", "--steps", "2", "--length", "8", "--set", "batch_size=2"],
        ["evaluate", "@of/finetune/task.tsv/seed-0", *OUT], ["report", "@of/finetune/task.tsv/seed-0", *PAGE],
        ["diagnose", "@of", "--against", "@of/checkpoints/step-2", *FEW],
        ["train", "--config", "small.toml", "--data", "text.txt", "--router", "xmoe", "--resume", "--out", "@of"],
    ],
    "decoder": [
        *ALL, ["export", "@of", "--format", "hf", *OUT], TEXT,
    ],
    "masked": [*ALL, ["report", "@of", "--out", "@out/page.html"]],
    "translated": [*ALL, ["report", "@of", "--out", "@out/page.html"]],
    "pictures": ALL,
    "ranks": [*ALL, TEXT, SHARE],
    "cmp": [
        ["report", "@of", *PAGE], ["report", "@of", "--out", "@out/page.html"], ["verify", "@of", *OUT],
        ["report", "@of", "--paper", "hyperrouter", *OUT], ["report", "@of", "--figures", "png", *PAGE[:2], *OUT],
        ["diagnose", "@of", *FEW], ["evaluate", "@of/runs/smoe/seed-0", *OUT], ["evaluate", "@of", "--attack", "word"],
        ["compare", "--config", "small.toml", "--data", "text.txt", "--routers", "smoe", "--jobs", "1", "--out", "@of"],
        SHARE, ["submit", "@of", "--router", "smoe", "--out", "@out/entry.json"],
    ],
    "shared": [["open", "@of/run.pointsman", "--out", "@out/run"]],
    "hf": [
        ["audit", "@of", "--data", "text.txt", *FEW], ["diagnose", "@of", "--data", "text.txt", *FEW],
        ["audit", "@of", "--against", "@of", "--data", "text.txt", *FEW],
        ["hf", "replace", "@of", "--router", "xmoe", *OUT], ["verify", "@of", *OUT],
        ["compress", "@of", "--data", "text.txt", "--eval-tokens", "64", "--length", "16", "--random", "1", *OUT],
        ["train", "--from", "@of", "--data", "text.txt", "--steps", "1", *OUT],
    ],
    "replaced": [
        ["audit", "@of", "--data", "text.txt", *FEW], ["hf", "materialize", "@of", *OUT], ["verify", "@of", *OUT],
    ],
    "audited": [["report", "@of", *PAGE], ["verify", "@of", *OUT], SHARE],
    "exam": [
        ["verify", "@of", *OUT], SHARE,
        ["exam", "smoe", "--tasks", "clusters", "--seeds", "1", "--jobs", "1", "--out", "@of"],
    ],
    "traces": [
        ["trace", "diff", "@of/a", "@of/b", *OUT], ["trace", "place", "@of/a", "--devices", "2", "--cache", "2", *OUT],
        ["verify", "@of/a", *OUT],
    ],
}  # fmt: skip
"""Family -> commands; @of is the folder, @out the one for results."""
NEVER_READ = (".html", ".csv", ".md", ".tex", ".txt")
SPARE_MEMORY, SPARE_DISK = 200 << 20, 6 << 20


class Strangers(Campaign):
    name, unit, usual, limit = "strangers", "hostile folders", 40, 90.0
    kinds: Mapping[str, Spoil] = HOSTILE

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
        os.environ.update(environment)

    def draw(self, random: Random) -> Program:
        of = random.choice(list(READERS))
        kinds = [
            kind for kind in self.kinds if not (of in THEIRS and kind in ("number", "bomb"))
        ]  # transformers reads it
        return [{
            "of": of, "file": random.choice(self.files[of]), "how": random.choice(kinds),
            "seed": random.randrange(10**6), "by": random.sample(range(len(READERS[of])), min(2, len(READERS[of]))),
        }]  # fmt: skip

    def check(self, program: Program, folder: Path) -> Counter[str]:
        counts = Counter[str]()
        for step in program:
            for reader in step["by"]:
                counts[self._read(step, READERS[step["of"]][reader], folder / "place")] += 1
            counts[self.unit] += 1
            counts[step["how"]] += 1
        return counts

    def simpler(self, step: Any) -> Iterator[Any]:
        if len(step["by"]) > 1:
            for reader in step["by"]:
                yield {**step, "by": [reader]}

    def _read(self, step: dict[str, Any], words: list[str], root: Path) -> str:
        """How a command ended on a spoiled copy of the folder in `root`, which is made anew. Raises Wrong."""
        shutil.rmtree(root, ignore_errors=True)
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
        named = {**HOSTILE, **DAMAGE}[step["how"]](stranger / step["file"], Random(step["seed"]), mine)
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
        self.told, self.error = told, err
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


class Damage(Strangers):
    name, unit, usual, limit = "damage", "damaged files", 60, 120.0
    kinds = DAMAGE

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.good: dict[str, set[str]] = {}
        for of in (of for of, readers in READERS.items() if readers[:5] == ALL):
            step = {"of": of, "file": self.files[of][0], "how": "nothing", "seed": 0}
            last = max((folder / of / "checkpoints").iterdir(), key=lambda one: int(one.name.partition("-")[2]))
            for aside in (None, last.with_name("aside")):  # what evaluate says of the last checkpoint, and without it
                if aside:
                    last.rename(aside)
                self._read(step, ALL[0], folder.parent / "trial")
                self.good.setdefault(of, set()).add(self.told)
            last.with_name("aside").rename(last)
        os.chdir(folder)

    def check(self, program: Program, folder: Path) -> Counter[str]:
        counts = Counter[str]()
        for step in program:
            of, file = step["of"], Path(step["file"])
            verify = next((words for words in READERS[of] if words[0] == "verify"), READERS[of][0])
            whole = self._read(step, verify, folder / "place") == "read"
            whole &= file.is_relative_to(verify[1].replace("@of", of))
            counts["found by verify"] += not whole
            lines = [("verify", self.told + self.error)] if not whole else []
            for words in (READERS[of][reader] for reader in step["by"] if READERS[of][reader] is not verify):
                outcome = self._read(step, words, folder / "place")
                counts[outcome] += 1
                if outcome == "refused" and whole and of not in THEIRS:
                    raise Wrong(f"pointsman {' '.join(words)}: refused, and verify called it whole: {self.error}")
                weights = "checkpoints" in file.parts or file.name == "vocabulary.json"
                if outcome == "refused":
                    lines.append((" ".join(words), self.error.rstrip("\n").rpartition("\n")[2]))
                elif words is ALL[0] and weights and self.told not in self.good[of]:
                    raise Wrong(f"evaluate gives other figures than those of a whole checkpoint:\n{self.told}")
            for words_, line in lines:
                if not any(name in line for name in (file.name, str(file.parent), "step-", f"/{of}")):
                    raise Wrong(f"pointsman {words_}: the line names neither the file nor its folder: {line}")
            counts[self.unit] += 1
            counts[step["how"]] += 1
        return counts


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
