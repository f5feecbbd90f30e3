"""One file of a run, a comparison, an audit or an exam for somebody else: compressed JSON, no weights, no data.

Its records are those of `compact`, of an exam its cells, read back through the same checks. Python files that the
sender imported routers from are carried as text, under `sources/` of the receiver's folder, and are executed by nobody
unasked.

An entry of the leaderboard is one row of a comparison in one file, with all that it takes to train it again: `sources`
has the text of the files that the row's router comes from, `runs` each seed's environment, evaluation and log: the loss
of every step that was logged. `sha256` is that of the rest: a file that was damaged on its way is refused. Whoever
deceives can make it anew: an entry is believed once a seed was trained again (`tools.leaderboard`).
"""

import hashlib
import json
import re
import shlex
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import checksum, may_fill, parse_json, read_ordinary, read_whole_json, within, write_whole
from pointsman_lab._shapes import MOST_LINE, MOST_OTHERS, check_shape, inflated, shape_of
from pointsman_lab.runs.checkpoints import STATE, steps_of
from pointsman_lab.runs.compact import RECORD, entries_of, line_of, packed, record_of, written
from pointsman_lab.runs.comparison import read_comparison, required_plan
from pointsman_lab.runs.imports import SOURCE, imports_of, left_out, origin_of, sources_of
from pointsman_lab.runs.paths import CHECKPOINTS, COMPARISON, CONFIG, ENVIRONMENT, EVALUATION
from pointsman_lab.runs.record import RunRecord, read_object

FORMAT, VERSION = "pointsman-share", 1
EXAM, SOURCES = "exam.json", "sources"
HERE = "@shared@"
"""Stands for the receiver's folder in recorded paths."""
SMALL, MOST_PACKED = 2**22, 20
"""A file becomes at most so many bytes and so many times its own size. Records of grids: 4 to 10 times."""
SHAPE = {
    "kind!": str, "name!": str, "comparison!": dict | None, "record!": str, "sources!": {"*": str}, "modules!": [str],
    "data!": {"name!": str, "fingerprint": str, "bytes": int, "sha256": str, "about": str}, "papers!": str,
}  # fmt: skip
ENTRY_FORMAT = 1
ENTRY: dict[str, Any] = {
    "format!": int, "name!": str, "router!": str, "settings!": dict, "tuned!": dict, "data!": str,
    "sources!": {"*": str}, "sha256!": str,
    "runs!": {"*": {"environment!": dict, "evaluation!": {"results!": [dict]}, "step_seconds!": float,
                    "log!": {"step!": [int], "loss!": [float]}}},
}  # fmt: skip
_CELL = re.compile(r"cells/[A-Za-z0-9_-]+/exam-[^/\\:\x00-\x1f]+\.json")


@dataclass(frozen=True)
class Opened:
    """What `open_shared` wrote: the folder, the sources in it, modules that the sender imported, data and papers."""

    folder: Path
    sources: tuple[Path, ...]
    modules: tuple[str, ...]
    data: Mapping[str, Any]
    papers: str


def share(folder: Path, out: Path, papers: str = "", cells: Mapping[str, Any] | None = None) -> list[str]:
    """Writes the file; returns what routers come from and the file lacks: modules, and packages with their version."""
    plan = read_whole_json(folder / COMPARISON)
    if plan is not None:
        plan = {key: value for key, value in plan.items() if key != "nodes"}  # names of the sender's machines
        record, settings = record_of(folder), plan.get("settings") or {}
        if not record:
            raise RunError(f"{folder}: no run of this comparison is finished: there is nothing to share")
    elif cells is not None:
        settings = read_whole_json(folder / EXAM) or {}
        record = json.dumps({"plan": settings, "cells": cells})
        if not cells:
            raise RunError(f"{folder}: no run of this exam is finished: there is nothing to share")
    else:
        if not (folder / CONFIG).is_file() or not (folder / EVALUATION).is_file():
            raise RunError(f"{folder}: no finished run, comparison or audit: there is nothing to share")
        files = packed(folder)
        settings = files[CONFIG]
        record = line_of({"path": "runs/shared/seed-0", "files": files}) + "\n"
    runs = [] if cells else list(entries_of(record.encode().splitlines(), folder))
    imports = dict.fromkeys(one for of in (settings, *(run["files"][CONFIG] for run in runs)) for one in imports_of(of))
    sources, names = sources_of(imports)
    moved = {path: f"{HERE}/{SOURCES}/{name}" for path, name in names.items()}
    origins = settings.get("origins", {}) if cells else {}
    for run in runs:
        here = run["files"].get(ENVIRONMENT, {})
        check_shape(here, shape_of(ENVIRONMENT), f"{folder}, {run['path']}: {ENVIRONMENT}")
        origins[run["path"]] = here.get("origin", {})
    left = [one for where, origin in origins.items() for one in left_out(where, origin, sources)]
    modules = list(dict.fromkeys([*(one for one in imports if not one.endswith(".py")), *left]))
    data, places = _data(str(settings.get("data") or ("the exam's tasks" if cells else "")), plan or {})
    moved |= {place: Path(place).name for place in places}
    if cells is None:
        data |= _moved(_read_as(folder, runs[0]["files"]), moved)
    plan = _moved(plan, moved)
    if plan is not None and "command" in plan:
        plan["command"] = _without_folders(plan["command"])
    told = {
        "format": FORMAT, "version": VERSION, "kind": "exam" if cells else "run" if plan is None else "comparison",
        "name": folder.resolve().name, "comparison": plan, "record": _moved(record, moved),
        "sources": sources, "modules": modules, "data": data, "papers": papers,
    }  # fmt: skip
    content = json.dumps(told, allow_nan=False).encode()
    line = max(map(len, record.encode().splitlines())) if plan is not None else 0
    try:  # as `open` will
        raw = zlib.compress(content, 9)
        for size, most in ((len(content), _most(raw)), (line, MOST_LINE)):
            if size > most:
                raise ValueError(f"{size:,} bytes; at most {most:,} are read")
        parse_json(content.decode())
    except ValueError as error:
        raise RunError(f"{folder}: too large for one file ({error}); share single runs") from None
    write_whole(out, raw)
    return modules


def _data(name: str, plan: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What is known of the data, and the paths of the sender's files and folders in it, as PATH:…, KIND:PATH or A,B."""
    path = Path(name.partition(":")[0])
    parts = [path] if path.is_file() else [Path(part) for part in re.split("[:,]", name)]
    files = [one for one in parts if one.is_file()]
    places = files + [one for one in parts if one.is_absolute() and one.name and one.is_dir()]
    found: dict[str, Any] = {"name": name}
    if isinstance(plan.get("data"), str):
        found["fingerprint"] = plan["data"]
    for one in places:
        found["name"] = one.name if one is path else str(found["name"]).replace(str(one), one.name)
    if files:
        sums = [checksum(one.resolve()) for one in files]
        found |= {"bytes": sum(one["bytes"] for one in sums), "sha256": ", ".join(one["sha256"] for one in sums)}
    return found, list(map(str, places))


def _read_as(folder: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """How a run's evaluation describes its data, and the fingerprint that its checkpoints have."""
    evaluation: Mapping[str, Any] = next((of for name, of in files.items() if name.endswith(EVALUATION)), {})
    about = (evaluation.get("protocol") or {}).get("data")
    steps = steps_of(folder / CHECKPOINTS)
    state = (read_whole_json(folder / CHECKPOINTS / f"step-{steps[0]}" / STATE) if steps else None) or {}
    return {name: one for name, one in (("about", about), ("fingerprint", state.get("data"))) if isinstance(one, str)}


def _moved(value: Any, moved: Mapping[str, str]) -> Any:
    """JSON, or lines of JSON, with other paths."""
    text = value if isinstance(value, str) else json.dumps(value)
    for old, new in moved.items():
        for form in {json.dumps(old), json.dumps(old, ensure_ascii=False)}:  # the lines of a record escape no letter
            text = text.replace(form[1:-1], json.dumps(new)[1:-1])
    return text if isinstance(value, str) else parse_json(text)


def _without_folders(command: str) -> str:
    """Command lines whose absolute paths are names."""
    try:
        lines = [shlex.split(line) for line in command.splitlines()]
    except ValueError:
        return ""
    return "\n".join(shlex.join(re.sub(r"(^|[=,:])/(?:[^/=,:]*/)*", r"\1", one) for one in words) for words in lines)


def open_shared(file: Path, out: Path) -> Opened:
    """Writes the run, comparison or exam of a file into a new folder, or one that a killed call of this began."""
    told, most = _read(file)
    begun = out.is_dir() and any(out.iterdir())
    here = str(out.resolve())
    texts = [told["record"], json.dumps(told["comparison"])]
    if sum(len(text) + text.count(HERE) * len(here) for text in texts) > most:
        raise RunError(f"{file}: damaged: it names its folder too often; at most {most:,} bytes are made of it")
    record = _moved(told["record"], {HERE: here})
    if told["kind"] == "exam":
        files = {name: written(content) for name, content in _exam_files(file, record).items()}
    else:
        entries = list(entries_of(record.encode().splitlines(), file))
        if not entries or (told["comparison"] is None and len(entries) > 1):
            raise RunError(f"{file}: damaged: {len(entries)} runs in it")
        if told["comparison"] is None:
            files = {name: written(content) for name, content in entries[0]["files"].items()}
        else:
            files = {RECORD: record, COMPARISON: written(_moved(told["comparison"], {HERE: here}))}
    sources = {f"{SOURCES}/{name}": text for name, text in told["sources"].items()}
    files = {**sources, **({"papers.bib": told["papers"]} if told["papers"] else {}), **files}
    if not may_fill(out, files, "report.html"):
        raise RunError(f"{out}: it exists and is not empty; choose another --out")
    try:
        for name, text in files.items():
            write_whole(within(out, *name.split("/")), text)
    except BaseException:
        if not begun:
            shutil.rmtree(here, ignore_errors=True)
        raise
    return Opened(out, tuple(map(out.joinpath, sources)), tuple(told["modules"]), told["data"], told["papers"])


def _exam_files(file: Path, record: str) -> dict[str, Any]:
    """File of an exam's folder -> its content, checked."""
    try:
        found = parse_json(record)
    except ValueError as error:
        raise RunError(f"{file}: damaged: {error}") from None
    check_shape(found, {"plan!": shape_of(EXAM), "cells!": {"*": shape_of("exam-a.json")}}, str(file))
    if bad := next((name for name in found["cells"] if not _CELL.fullmatch(name)), None):
        raise RunError(f"{file}: damaged: a cell called {bad!r}")
    return {**found["cells"], EXAM: found["plan"]}


def _read(file: Path) -> tuple[dict[str, Any], int]:
    """What the file holds, and how many bytes may be made of it."""
    try:
        raw = read_ordinary(file)
    except FileNotFoundError:
        raise RunError(f"{file}: no such file") from None
    except OSError as error:
        raise RunError(f"{file}: {error.strerror or error}") from None
    try:
        most = _most(raw)
        told = parse_json(inflated(raw, most).decode())
    except ValueError as error:
        raise RunError(f"{file}: not a file of `pointsman share`, or damaged ({error})") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT or told.get("version") != VERSION:
        raise RunError(f"{file}: not a file of `pointsman share` of version {VERSION}")
    check_shape(told, SHAPE, str(file))
    if bad := next((name for name in told["sources"] if not SOURCE.fullmatch(name)), None):
        raise RunError(f"{file}: a source called {bad!r}: only names of Python files are allowed")
    return told, most


def is_shared(file: Path) -> bool:
    """Whether `share` wrote this file."""
    try:
        return bool(_read(file))
    except RunError:
        return False


def _most(raw: bytes) -> int:
    return min(MOST_OTHERS, SMALL + MOST_PACKED * len(raw))


def digest(entry: Mapping[str, Any]) -> str:
    """SHA-256 of everything but `sha256`."""
    rest = {key: value for key, value in entry.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def signed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with its checksum."""
    return {**entry, "sha256": digest(entry)}


def entry_of(folder: Path, router: str, name: str) -> dict[str, Any]:
    """The entry of one row of a comparison."""
    plan, comparison = required_plan(folder), read_comparison(folder)
    if router not in comparison.routers:
        raise RunError(f"{folder} has no row {router!r}: {did_you_mean(router, comparison.routers)}")
    unfinished = [seed for one, seed in comparison.missing() if one == router]
    if unfinished:
        raise RunError(f"{folder}: {router}, seed {unfinished[0]}: not finished; the command of the comparison goes on")
    imports = imports_of(plan["settings"])
    runs = {str(run.seed): _entry_run(run) for run in comparison.of(router)}
    origins = [run["environment"].get("origin", {}) for run in runs.values()]
    sources, names = entry_sources(folder, router, imports, origins)
    return signed({
        "format": ENTRY_FORMAT, "name": name, "router": router,
        "settings": {**plan["settings"], "imports": [names.get(one, one) for one in imports]},
        "tuned": plan.get("tuned", {}).get(router, {}), "data": plan.get("data", ""), "sources": sources, "runs": runs,
    })  # fmt: skip


def entry_sources(
    folder: Path, router: str, imports: Iterable[Any], origins: Iterable[Mapping[str, str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """`sources_of` without modules beside the files; RunError where the router comes from anything else."""
    sources, names = sources_of(imports)
    sources = {name: sources[name] for name in names.values()}
    for origin in origins:
        for name in left_out(folder, origin or origin_of(router), sources):
            told = "which an entry does not carry: only files of --import, without modules beside them"
            raise RunError(f"{folder}: router {router!r} comes from {name}, {told}")
    return sources, names


def _entry_run(run: RunRecord) -> dict[str, Any]:
    rows = list(run.metrics("train"))
    seconds = sorted(float(row.get("step_seconds") or 0.0) for row in rows) or [0.0]
    return {
        "environment": run.environment,
        "evaluation": {"results": run.evaluation["results"]},
        "log": {"step": [row["step"] for row in rows], "loss": [row["loss"] for row in rows]},
        "step_seconds": run.evaluation.get("step_seconds") or seconds[len(seconds) // 2],
    }


def read_entry(file: Path, shape: Mapping[str, Any] = ENTRY) -> dict[str, Any]:
    """An entry's file."""
    if not file.exists():
        raise RunError(f"{file}: no such file")
    entry = read_object(file)
    check_shape(entry, shape, str(file))
    try:
        json.dumps(entry, allow_nan=False)
    except ValueError:
        raise RunError(f"{file}: a figure in it is no finite number") from None
    if entry["format"] != ENTRY_FORMAT:
        raise RunError(f"{file}: no entry of format {ENTRY_FORMAT}")
    if entry["sha256"] != digest(entry):
        raise RunError(f"{file}: it was changed after `pointsman submit` wrote it: its SHA-256 differs")
    return entry
