"""Ways to spoil a folder: what happens to files by accident (DAMAGE), and what a stranger puts into them (HOSTILE).

Each is given a file below `…/stranger/FAMILY`, a generator, and a folder `…/mine` of the user's, with a whole copy of
the stranger's in `mine/copy`; it returns whether what the folder then names may be read.
"""

import base64
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Spoil = Callable[[Path, Random, Path], bool]
VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 2**70, 1e308, "", "x", "\ud800", [], {}, [1, "x"], {"a": 1}, [[]], "1", 10**400,
]  # fmt: skip
MARK = "<script>alert(1)</script>"
CODE = "open({!r}, 'w').write('run')\n"
NAMED = ("data", "task", "path", "name")
"""Keys of JSON whose value names data that a command may read, wherever they are."""
THEIRS = ("hf", "replaced")
"""Folders that transformers reads: what it makes of links, numbers and sizes is its own."""


def changed(file: Path, random: Random, change: Callable[[Any, Any], None]) -> None:
    """Calls `change` with a list or object somewhere in the JSON, most often far inside, and a place in it."""
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


def _shared(file: Path, random: Random, change: Callable[[Any, Any], None]) -> None:
    """The same in what a shared file holds, or in the record therein."""
    told = json.loads(zlib.decompress(file.read_bytes()))
    inner = random.random() < 0.6
    part = file.with_name("part.jsonl" if inner else "part.json")
    part.write_text(told["record"] if inner else json.dumps(told))
    changed(part, random, change)
    text = json.dumps({**told, "record": part.read_text()}) if inner else part.read_text()
    file.write_bytes(zlib.compress(text.encode()))
    part.unlink()


def _json(file: Path, random: Random, change: Callable[[Any, Any], None]) -> None:
    """The same in this file, or in the nearest one that is JSON."""
    if file.suffix == ".pointsman":
        _shared(file, random, change)
        return
    if file.suffix not in (".json", ".jsonl"):
        others = sorted(other for other in file.parent.rglob("*.json*") if other.is_file())
        others = others or sorted(other for other in file.parents[1].rglob("*.json*") if other.is_file())
        if not others:
            return
        file = random.choice(others)
    changed(file, random, change)


def nothing(file: Path, random: Random, mine: Path) -> bool:
    """The folder is harmless."""
    return False


def cut(file: Path, random: Random, mine: Path) -> bool:
    size = file.stat().st_size
    os.truncate(file, random.choice([0, min(1, size), size // 2, max(size - 1, 0), random.randrange(size + 1)]))
    return False


def flipped(file: Path, random: Random, mine: Path) -> bool:
    content = bytearray(file.read_bytes() or b"x")
    for _ in range(random.choice([1, 1, 8])):
        content[random.randrange(min(len(content), random.choice([16, 200, 10**9])))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    return False


def noise(file: Path, random: Random, mine: Path) -> bool:
    file.write_bytes(random.randbytes(random.choice([1, 100, 5000])))
    return False


def swapped(file: Path, random: Random, mine: Path) -> bool:
    """The content of another file of the folder."""
    root = mine.parent / "stranger"
    shutil.copyfile(random.choice(sorted(one for one in root.rglob("*") if one.is_file() and one != file)), file)
    return True  # another file's names mean other things


def of_another_kind(file: Path, random: Random, mine: Path) -> bool:
    file.unlink()
    how = random.choice(["folder", "pipe", "gone", "full folder"])
    if how == "pipe":
        os.mkfifo(file)
    elif how != "gone":
        file.mkdir()
        if how == "full folder":
            (file / "x").write_text("x")
    return False


def types(file: Path, random: Random, mine: Path) -> bool:
    """One value somewhere in the JSON, or all of it, is another."""
    _json(file, random, lambda holder, key: holder.__setitem__(key, random.choice(VALUES)))
    return False


def missing(file: Path, random: Random, mine: Path) -> bool:
    """One key somewhere is missing, or twice as long."""

    def change(holder: Any, name: Any) -> None:
        value = holder.pop(name)
        if isinstance(holder, dict) and random.random() < 0.5:
            holder[f"{name}{name}"] = value

    _json(file, random, change)
    return False


def huge(file: Path, random: Random, mine: Path) -> bool:
    """Deep, sparse, or a header that promises much."""
    if file.suffix == ".safetensors" and random.random() < 0.7:
        file.write_bytes(random.choice([2**63 - 1, 2**40, 10**8]).to_bytes(8, "little") + b"{" * 100)
    elif random.random() < 0.5:
        opening = random.choice(["[", '{"a":', '{"model":[', '[{"a":', '{"x": ' + "9" * 1000])
        file.write_text(opening * random.choice([500, 100_000 // len(opening)]) + random.choice(["", "1"]))
    else:
        file.write_bytes(b"")
        os.truncate(file, 1 << 26)
    return False


def _texts(mine: Path) -> list[str]:
    secret, copy = str(mine / "secret.txt"), str(mine / "copy")
    return [
        secret, copy, f"file://{secret}", "../../mine/secret.txt", "../../../mine/secret.txt", f"{mine}/new/file",
        "~/.bashrc", "~/new", "..", ".", "/dev/zero", "/proc/self/environ", "a\0b", "x" * 300,
        "\x1b]0;owned\x07\x9b31m", MARK, "=HYPERLINK(1)", "javascript:alert(1)", "evil", f"{copy}/evil.py",
        "http://127.0.0.1:9/x", "org/model",
        "__import__('os').system('touch x')", "{{ 7 * 7 }}", "%s%n", "\u202e", "smoe|" * 2000, "N" * 10**6,
    ]  # fmt: skip


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


def link(file: Path, random: Random, mine: Path) -> bool:
    """It is a link to a whole copy outside, to nothing there, to a device or to itself."""
    relative = file.relative_to(mine.parent / "stranger")
    file.unlink()
    how = random.choice(["copy", "copy", "new", "relative", "device"])
    target = mine / "copy" / relative if how != "new" else mine / "empty" / file.name
    if how == "device":
        target = Path(random.choice(["/dev/zero", "/dev/full", "/proc/self/mem", file.name]))
    file.symlink_to(os.path.relpath(target, file.parent) if how == "relative" else target)
    return relative.parts[0] in THEIRS and how != "new"  # the hub's cache is made of links


def folder_link(file: Path, random: Random, mine: Path) -> bool:
    """A folder above it is a link to a whole copy outside, or to an empty folder there."""
    stranger = mine.parent / "stranger"
    parts = file.relative_to(stranger).parts
    above = [stranger.joinpath(*parts[:depth]) for depth in range(2, len(parts))]
    if not above:
        return link(file, random, mine)
    folder = random.choice(above)
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
    for config in [one for one in map(file.with_name, ("config.json", "tokenizer_config.json")) if one.is_file()]:
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
    elif file.suffix == ".pointsman" and kind < 3:
        file.write_bytes(zlib.compress(bytes(1 << 28), 9))
    elif kind == 1:
        file.write_text("[" + "0," * 2_000_000 + "0]")
    elif kind == 2:
        file.write_text('{"a":' * 200_000)
    elif file.name == "record.jsonl":
        entry = json.loads(file.read_text().splitlines()[0])
        steps = list(range(20_000))
        group = {"fields": ["step", "kind", "t"], "same": {"kind": "a", "t": "x" * 20_000}, "each": {"step": steps}}
        entry["path"], entry["files"]["metrics.jsonl"] = "runs/new/seed-0", [group]
        if random.random() < 0.5:
            deep: Any = [0] * 200_000
            for _ in range(random.choice([20, 500])):
                deep = [deep]
            entry["files"] |= {"metrics.jsonl": [], "environment.json": {"deep": deep}}
        file.write_text(json.dumps(entry) + "\n")
    elif kind == 3:
        mapped = {"method": "", "top_k": 1, "tokens": [], "layers": {}, "first": {}}
        sample = {"format": 3, "tokens": ["a"] * 2000, "top_k": [1], "num_experts": 200, "layers": ["x"], "usage": {},
                  "routing": content, "map": mapped}  # fmt: skip
        (file.parent / "explorer.json").write_text(json.dumps(sample))
    elif kind == 4:
        rows = '{"kind": "routing", "step": 1, "layer": "a", "load": [1]}\n' * 40_000
        (file.parent / "metrics.jsonl").write_text(rows)
    else:
        changed_text = random.choice(['"' + "x" * (1 << 22) + '"', "9" * 10**6])
        _json(file, random, lambda holder, name: holder.__setitem__(name, changed_text))
    return False


DAMAGE: dict[str, Spoil] = {
    "cut": cut, "flipped": flipped, "noise": noise, "swapped": swapped, "of another kind": of_another_kind,
    "types": types, "missing": missing, "huge": huge,
}  # fmt: skip
HOSTILE: dict[str, Spoil] = {
    "nothing": nothing, "text": text, "key": key, "number": number, "link": link, "folder link": folder_link,
    "added": added, "bomb": bomb,
}  # fmt: skip
