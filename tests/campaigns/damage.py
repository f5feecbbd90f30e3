"""Damage: one file of a run, a comparison, a fine-tuning or a model is damaged, then two commands that read it run.

`verify` goes first: what it calls whole no command may refuse.

Each command ends with exit code 0 (the file was passed over, or the damage harms nobody) or 2 and one line, which names
a file or folder of what is damaged. Weights are checksummed: what is computed from a damaged checkpoint must be what
an older, whole one gives. Nothing outside the damaged folder changes, whatever a link in it says.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fixtures
from frame import Campaign, Program, Wrong

READERS: dict[str, list[list[str]]] = {
    "run": [
        ["evaluate", "run", "--out", "out"],
        ["export", "run", "--out", "exported"],
        ["diagnose", "run", "--eval-tokens", "32", "--out", "out"],
        ["report", "run", "--map", "none", "--out", "page.html"],
        ["train", "--config", "small.toml", "--data", "text.txt", "--router", "xmoe", "--out", "run", "--resume"],
        ["finetune", "run", "--task", "task.tsv", "--steps", "1", "--length", "8", "--out", "ft"],
    ],
    "cmp": [
        ["report", "cmp", "--map", "none", "--out", "page.html"],
        ["compare", "--config", "small.toml", "--data", "text.txt", "--routers", "smoe", "--jobs", "1", "--out", "cmp"],
        ["evaluate", "cmp", "--attack", "word"],
        ["diagnose", "cmp", "--eval-tokens", "32", "--out", "out"],
    ],
    "run/finetune": [
        ["evaluate", "run/finetune/task.tsv/seed-0", "--out", "out"],
        ["finetune", "run", "--task", "task.tsv", "--steps", "2", "--length", "8", "--set", "batch_size=2"],
        ["report", "run/finetune/task.tsv/seed-0", "--map", "none", "--out", "page.html"],
    ],
    "hf": [
        ["audit", "hf", "--data", "text.txt", "--eval-tokens", "32", "--out", "out"],
        ["audit", "good", "--against", "hf", "--data", "text.txt", "--eval-tokens", "32", "--out", "out"],
        ["diagnose", "hf", "--data", "text.txt", "--eval-tokens", "32", "--out", "out"],
    ],
}  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**70,
    1e308,
    "",
    "x",
    "\ud800",
    [],
    {},
    [1, "x"],
    {"a": 1},
    [[]],
    "1",
    10**400,
]
OF = {"run/finetune": "run/finetune/task.tsv/seed-0"}
NEVER_READ = (".html", ".csv", ".md", ".tex", ".txt")
MINE = "not ours: must stay"


class Damage(Campaign):
    name, unit, usual, limit = "damage", "damaged files", 120, 60.0

    def prepare(self, folder: Path) -> None:
        self.fixtures = folder
        fixtures.make_all(folder)
        shutil.copytree(folder / "hf", folder / "good")
        self.files = {
            what: sorted(
                file.relative_to(folder).as_posix()
                for file in (folder / what).rglob("*")
                if file.is_file() and file.name != ".lock" and file.suffix not in NEVER_READ
                and not (what == "run" and "finetune" in file.parts)
            )
            for what in READERS
        }  # fmt: skip
        trial = folder.parent / "trial"
        shutil.copytree(folder, trial)
        self.good: dict[str, set[str]] = {}
        with fixtures.inside(trial):
            for commands in READERS.values():  # imports what is imported late
                for words in commands:
                    fixtures.called(words)
        for step in ("step-4", "step-2"):  # what evaluate says of either checkpoint
            shutil.rmtree(trial)
            shutil.copytree(folder, trial)
            with fixtures.inside(trial):
                if step == "step-2":
                    shutil.rmtree("run/checkpoints/step-4")
                self.good.setdefault("evaluate", set()).add(fixtures.must(*READERS["run"][0]))
        shutil.rmtree(trial)

    def draw(self, random: Random) -> Program:
        what = random.choices(list(READERS), [4, 3, 2, 3])[0]
        file = random.choice(self.files[what])
        kinds = [*KINDS, *(["types", "types", "types", "key"] if file.endswith((".json", ".jsonl")) else [])]
        readers = random.sample(range(len(READERS[what])), 2)
        return [{"of": what, "file": file, "how": random.choice(kinds), "seed": random.randrange(10**6), "by": readers}]

    def check(self, program: Program, folder: Path) -> Counter[str]:
        shutil.copytree(self.fixtures, folder, dirs_exist_ok=True)
        counts = Counter[str]()
        for damage in program:
            what, file = damage["of"], folder / damage["file"]
            mine = folder.parent / f"{folder.name}-mine.txt"
            mine.write_text(MINE)
            KINDS_ALL[damage["how"]](file, Random(damage["seed"]), mine)
            whole = self._read(["verify", OF.get(what, what)], what, folder, damage) == "passed over or harmless"
            counts["found by verify"] += not whole
            for words in [READERS[what][place] for place in damage["by"]]:
                outcome = self._read(words, what, folder, damage)
                counts[outcome] += 1
                if outcome == "refused" and whole and what != "hf":  # transformers reads that
                    raise Wrong(f"pointsman {' '.join(words)}: refused, and verify called it whole")
                if mine.read_text() != MINE:
                    raise Wrong(f"pointsman {' '.join(words)}: wrote through a link to a file outside")
            mine.unlink()
            counts[self.unit] += 1
        return counts

    def _read(self, words: list[str], what: str, folder: Path, damage: dict[str, Any]) -> str:
        os.chdir(folder)
        for left in ("out", "exported", "ft", "page.html"):
            shutil.rmtree(left, ignore_errors=True)
        line = f"pointsman {' '.join(words)}"
        try:
            code, out, err = fixtures.called(words)
        except BaseException:
            raise Wrong(f"{line}\n{traceback.format_exc()}") from None
        if code not in (0, 1 if words[0] == "verify" else 0, 2) or "Traceback" in out + err:
            raise Wrong(f"{line}\nexit code {code}: {err}")
        if code == 1:
            if Path(damage["file"]).name not in out and str(Path(damage["file"]).parent) not in out:
                raise Wrong(f"{line}\nno line names the file or its folder: {out}")
            return "refused"
        if code == 2:
            last = err.rstrip("\n").split("\n")[-1]
            named = [Path(damage["file"]).name, what, "step-", "good"]
            if not last.startswith("pointsman") or not any(name in last for name in named):
                raise Wrong(f"{line}\nthe line does not name the file or its folder: {err}")
            return "refused"
        weights = "checkpoints/" in damage["file"] or damage["file"].endswith("vocabulary.json")
        if words == READERS["run"][0] and weights and out not in self.good["evaluate"]:
            raise Wrong(f"{line}\nother figures than those of a whole checkpoint:\n{out}")
        return "passed over or harmless"

    def simpler(self, step: Any) -> Iterator[Any]:
        if len(step["by"]) > 1:
            for reader in step["by"]:
                yield {**step, "by": [reader]}


def cut(file: Path, random: Random, mine: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(
        content[
            : random.choice([0, 1, len(content) // 2, max(len(content) - 1, 0), random.randrange(len(content) + 1)])
        ]
    )


def flipped(file: Path, random: Random, mine: Path) -> None:
    content = bytearray(file.read_bytes() or b"x")
    for _ in range(random.choice([1, 1, 8])):
        content[random.randrange(min(len(content), random.choice([16, 200, 10**9])))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def noise(file: Path, random: Random, mine: Path) -> None:
    file.write_bytes(random.randbytes(random.choice([1, 100, 5000])))


def swapped(file: Path, random: Random, mine: Path) -> None:
    """The content of another file of the same folder tree."""
    root = next(parent for parent in file.parents if (parent / "small.toml").is_file())
    others = sorted(
        other for other in root.rglob("*") if other.is_file() and other != file and "cache" not in other.parts
    )
    shutil.copyfile(random.choice(others), file)


def deep(file: Path, random: Random, mine: Path) -> None:
    opening = random.choice(["[", '{"a":', '{"model":[', '[{"a":'])
    file.write_text(opening * random.choice([500, 100_000]) + random.choice(["", "1"]))


def huge(file: Path, random: Random, mine: Path) -> None:
    """A sparse gigabyte, or very many bytes of one value."""
    if file.suffix == ".safetensors" and random.random() < 0.7:
        file.write_bytes(random.choice([2**63 - 1, 2**40, 10**8]).to_bytes(8, "little") + b"{" * 100)
    elif random.random() < 0.5:
        file.write_text('{"x": ' + "9" * 100_000 + "}")
    else:
        with file.open("wb") as opened:
            opened.truncate(1 << 26)


def linked_out(file: Path, random: Random, mine: Path) -> None:
    file.unlink()
    file.symlink_to(
        random.choice([mine, mine.parent / "nowhere", "/dev/zero", "/dev/full", file.name, "/proc/self/mem"])
    )


def folder_linked_out(file: Path, random: Random, mine: Path) -> None:
    """The folder of the file leads elsewhere."""
    elsewhere = mine.parent / f"{mine.name}-folder"
    shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.copytree(file.parent, elsewhere)
    shutil.rmtree(file.parent)
    file.parent.symlink_to(elsewhere)


def of_another_kind(file: Path, random: Random, mine: Path) -> None:
    file.unlink()
    how = random.choice(["folder", "pipe", "gone", "full folder"])
    if how == "pipe":
        os.mkfifo(file)
    elif how != "gone":
        file.mkdir()
        if how == "full folder":
            (file / "x").write_text("x")


def lock_linked_out(file: Path, random: Random, mine: Path) -> None:
    for name in (".lock", f".{file.name}.writing-1-x"):
        (file.parent / name).unlink(missing_ok=True)
        (file.parent / name).symlink_to(mine)


def types(file: Path, random: Random, mine: Path) -> None:
    """One value somewhere in the JSON, or all of it, is another."""
    changed(file, random, lambda holder, key: holder.__setitem__(key, random.choice(VALUES)))


def key(file: Path, random: Random, mine: Path) -> None:
    """One key somewhere is missing, or twice as long."""

    def change(holder: Any, name: Any) -> None:
        value = holder.pop(name)
        if isinstance(holder, dict) and random.random() < 0.5:
            holder[f"{name}{name}"] = value

    changed(file, random, change)


def changed(file: Path, random: Random, change: Callable[[Any, Any], None]) -> None:
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    place = random.randrange(len(lines)) if lines else 0
    holder: Any = [json.loads(lines[place])] if lines else [None]
    whole = holder
    name: Any = 0
    while isinstance(holder[name], dict | list) and holder[name] and random.random() < 0.85:
        holder = holder[name]
        name = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    change(holder, name)
    lines[place : place + 1] = [json.dumps(one) for one in whole[:1]]
    file.write_text("\n".join(lines) + "\n", errors="surrogatepass")


KINDS = {
    "cut": cut, "flipped": flipped, "noise": noise, "swapped": swapped, "deep": deep, "huge": huge,
    "linked out": linked_out, "folder linked out": folder_linked_out, "of another kind": of_another_kind,
    "lock linked out": lock_linked_out,
}  # fmt: skip
KINDS_ALL = {**KINDS, "types": types, "key": key}
