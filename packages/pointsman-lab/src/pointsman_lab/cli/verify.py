"""`pointsman verify FOLDER`: whether a folder is whole, and what in it would be refused."""

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import open_named, read_json, read_lines, within, write_whole
from pointsman_lab._shapes import shape_of
from pointsman_lab._values import printable
from pointsman_lab.cli.options import Parser
from pointsman_lab.runs import paths
from pointsman_lab.runs.compact import RECORD, packed, read_record
from pointsman_lab.runs.comparison import read
from pointsman_lab.runs.record import is_model, read_metrics

EPILOG = """examples:
  pointsman verify runs/mine
  pointsman verify downloads/theirs && pointsman report downloads/theirs

A line for each thing that a command would refuse, or that is missing. Exit
code 0: none; 1: some; 2: no such folder, or nothing in it that pointsman
reads. Checksums are compared and weights of runs are loaded; a Hugging Face
model's are compared with its index, not with its class. Code is never read.
"""
MOST_ENTRIES = 1_000_000
INDEX = (".safetensors.index.json", ".bin.index.json")
"""How the names of transformers' lists of shards end."""
WORTH: dict[Any, Callable[[float], float]] = {"bits_per_character": lambda n: n / math.log(2), "perplexity": math.exp}
"""Metric -> what it makes of nats."""
Check = tuple[Path, Callable[[], object]]


def parser() -> Parser:
    flags = Parser("verify", "Say whether a folder is whole, and what in it would be refused.", EPILOG)
    told = "a run, comparison, exam, audit, checkpoint, export, Hugging Face model, or a routing trace"
    flags.add("folder FOLDER", told, type=Path)
    flags.common("a folder for the lines, as verify.txt", settings="")
    return flags


def run(arguments: Sequence[str]) -> int:
    values = parser().read(arguments)
    root = values.folder
    kind = kind_of(root)
    found = list(faults(root, kind))
    files = 1 if root.is_file() else sum(1 for place in entries(root) if place.is_file())
    state = f"{len(found):,} would be refused or are missing" if found else "whole"
    text = printable("\n".join([*found, f"{root}: {kind}, {files:,} files: {state}"]))
    if values.out:
        write_whole(values.out / "verify.txt", text + "\n")
    print(text)
    return 1 if found else 0


def kind_of(root: Path) -> str:
    """What a folder or file is, by the names in it."""
    if not root.exists():
        raise RunError(f"{root}: no such folder")
    if root.is_file():
        from pointsman.traces.trace import FORMAT

        with open_named(root) as file:
            if FORMAT.encode() not in file.read(1 << 20):  # which every trace's header says
                raise RunError(f"{root}: no routing trace; of anything else give the folder")
        return "a routing trace"
    if not os.access(root, os.R_OK | os.X_OK):
        raise RunError(f"{root}: no permission to read this folder")
    if root.name.startswith("step-") and not os.path.lexists(root / paths.CONFIG):
        return "a checkpoint"
    for name, kind in ((paths.COMPARISON, "a comparison"), ("exam.json", "an exam"), (paths.AUDIT, "an audit")):
        if os.path.lexists(root / name):
            return kind
    if os.path.lexists(root / paths.CONFIG):
        exported = "exported weights" if os.path.lexists(root / "model.safetensors") else "a run"
        return "a Hugging Face model" if is_model(root) else exported
    raise RunError(f"{root}: no run, comparison, exam, audit, checkpoint, Hugging Face model or routing trace")


def faults(root: Path, kind: str) -> Iterator[str]:
    """A line for each fault; what comes from one file is told once."""
    told: list[str] = []
    for place, check in checks(root, kind):
        try:
            check()
        except OSError as error:
            line = f"{error.filename or place}: {error.strerror or error}"
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            line = " ".join((str(error) if isinstance(error, ValueError) else f"damaged: {error!r}").split())
            line = line if str(place) in line else f"{place}: {line}"
        else:
            continue
        if not any(line.startswith(one) for one in told):
            told.append(line)
            yield line


def checks(root: Path, kind: str) -> Iterator[Check]:
    """What each command that reads the folder does, the smallest parts first."""
    from pointsman.traces import RoutingTrace
    from pointsman_lab.report.page import render
    from pointsman_lab.runs.checkpoints import open_checkpoint
    from pointsman_lab.training.compare import check_runs
    from pointsman_lab.training.directory import RunDirectory

    if kind == "a routing trace":
        yield root, partial(RoutingTrace.load, root)
        return
    if kind == "an exam":
        yield root, partial(_examined, root)
    theirs, exported = kind == "a Hugging Face model", kind == "exported weights"
    places = list(entries(root))
    safe = any(place.suffix == ".safetensors" for place in places)  # transformers reads these alone then
    for place in places:
        yield place, partial(_entry, root, place, theirs)
    for place in places:
        if (theirs or exported) and place.suffix == ".safetensors" and place.is_file():
            yield place, partial(_tensors, place)
        elif theirs and place.name.endswith(INDEX[:1] if safe else INDEX):
            yield place, partial(_shards, place)
        elif place.name == paths.CONFIG and (place.parent / paths.CHECKPOINTS).is_dir() and not theirs:
            yield place.parent, partial(_opened, place.parent)
        elif place.name.startswith("step-") and place.parent.name == paths.CHECKPOINTS and place.is_dir():
            yield place, partial(open_checkpoint, place)
        elif place.name == paths.FINETUNE and place.parent != root and not theirs:
            yield place.parent, partial(_finished, place.parent)
            yield place.parent, partial(_logged, place.parent)
        elif place.name == paths.CHECKPOINTS and not os.path.lexists(place.parent / paths.CONFIG):
            yield place.parent, partial(_refuse, f"{place.parent}: checkpoints without {paths.CONFIG}")
    if theirs and not safe and not any(place.suffix == ".bin" and "model" in place.name for place in places):
        yield root, partial(_refuse, f"{root}: no weights")
    names = {place.name for place in places if place.parent == root}
    parts = any(fnmatchcase(name, "model-*-of-*.safetensors") for name in names)
    if theirs and parts and not names & {"model.safetensors", f"model{INDEX[0]}"}:
        yield root, partial(_refuse, f"{root}: model{INDEX[0]} is missing, which lists its parts")
    if exported:
        yield root, RunDirectory(root).config
        yield root, RunDirectory(root).vocabulary
    if kind == "a checkpoint":
        yield root, partial(open_checkpoint, root)
    elif kind in ("a run", "an audit", "a comparison"):
        yield root, lambda: render(read(root))
        yield root, partial(_finished, root)
        yield root, partial(_logged, root)
    if kind == "a comparison":
        yield root, partial(check_runs, root)
        yield root, partial(_as_recorded, root)


def entries(root: Path) -> Iterator[Path]:
    """All that is in a folder, not through links."""
    count = 0
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            count += 1
            if count > MOST_ENTRIES:
                raise RunError(f"{root}: more than {MOST_ENTRIES:,} files")
            yield Path(folder, name)


def _entry(root: Path, place: Path, theirs: bool) -> None:
    """The entry as such, and what a reader of files of this name makes of it."""
    if place.is_dir() and not os.access(place, os.R_OK | os.X_OK):
        raise RunError(f"{place}: no permission to read this folder")
    if theirs:  # the cache of the hub is made of links; transformers reads the files
        if not place.exists():
            raise RunError(f"{place}: a link to nothing")
        return
    within(root, *place.relative_to(root).parts)
    mode = place.lstat().st_mode
    known = shape_of(place.name) is not None or place.name in (paths.VOCABULARY, paths.METRICS, RECORD)
    if stat.S_ISDIR(mode) and not known:
        return
    if stat.S_ISLNK(mode) and known:
        raise RunError(f"{place}: a link; files of a run directory are not opened through links")
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise RunError(f"{place}: no ordinary file")
    if place.name == paths.VOCABULARY:
        from pointsman_lab.training.directory import RunDirectory

        RunDirectory(place.parent).vocabulary()
    elif place.name == paths.METRICS:
        _metrics(place)
    elif place.name == RECORD:
        for _ in read_record(place.parent):
            pass
    elif known:
        from pointsman_lab.report.inside import readable

        found = read_json(place) or {}
        for result in found.get("results", ()) if fnmatchcase(place.name, "evaluation*.json") else ():
            nats, value, worth = result.get("nats"), result.get("value"), WORTH.get(result.get("metric"))
            if worth and None not in (nats, value) and not math.isclose(worth(nats), value, rel_tol=1e-6):
                raise RunError(f"{place}: a value of {value} at k = {result['top_k']}, its nats say {worth(nats)}")
        if place.name == paths.EXPLORER and not readable(found):
            raise RunError(f"{place}: no whole sample; `report` makes it anew or leaves it out")


def _opened(run: Path) -> None:
    from pointsman_lab.finetuning.run import open_run

    passed_over: list[str] = []
    open_run(run, note=passed_over.append)
    if passed_over:
        raise RunError(passed_over[0])


def _metrics(file: Path) -> None:
    lines, rows = sum(1 for _ in read_lines(file)), sum(1 for _ in read_metrics(file))
    if rows < lines:
        raise RunError(f"{file}: {lines - rows:,} of {lines:,} lines are no whole rows and are passed over")


def _refuse(line: str) -> None:
    raise RunError(line)


def _tensors(file: Path) -> None:
    from pointsman_lab.training.checkpoint import open_tensors

    with open_tensors(file.resolve()):
        pass


def _shards(file: Path) -> None:
    weights = (read_json(file) or {}).get("weight_map")
    if not isinstance(weights, dict):
        raise RunError(f"{file}: no weight_map")
    from pointsman_lab.training.checkpoint import open_tensors

    for name in sorted(set(map(str, weights.values()))):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RunError(f"{file}: {name} is in another folder")
        if not (file.parent / name).is_file():
            raise RunError(f"{file}: {name} is missing")
        if name.endswith(".safetensors"):
            with open_tensors((file.parent / name).resolve()) as opened:
                held = set(opened.keys())
            if lost := {one for one, where in weights.items() if where == name} - held:
                raise RunError(f"{file}: {name} lacks {min(lost)}")


def _as_recorded(root: Path) -> None:
    for entry in read_record(root):
        run, recorded = within(root, *entry["path"].split("/")), entry["files"]
        found = packed(run)
        for name in (paths.EVALUATION, paths.METRICS):
            if name in found and name in recorded and _rows(found[name]) != _rows(recorded[name]):
                raise RunError(f"{run / name}: not what {RECORD} has of this run")


def _rows(content: Any) -> list[str]:
    """An object, or rows of metrics in whatever order; NaN equals itself."""
    return sorted(json.dumps(row) for row in (content if isinstance(content, list) else [content]))


def _examined(root: Path) -> None:
    from pointsman_lab.exam.cell import is_whole
    from pointsman_lab.exam.exam import collect, plan_in

    plan = plan_in(root)
    cells = collect(plan, root)
    if lack := [one for one in plan.cells if one not in cells or not is_whole(cells[one], plan.seeds)]:
        raise RunError(f"{root}: not finished: {lack[0][1]}, task {lack[0][0]} ({len(lack)} cells)")


def _finished(root: Path) -> None:
    if missing := read(root).missing():
        names = ", ".join(f"{router} (seed {seed})" for router, seed in missing[:4])
        raise RunError(f"{root}: not finished: {names}{', …' if len(missing) > 4 else ''}")


def _logged(root: Path) -> None:
    """A finished run's metrics reach its last step; of fine-tunings in old records there are none."""
    for run in read(root).runs.values():
        last = run.last_step()
        if run.done and last < (run.steps or 0) and (last or (run.path / paths.CHECKPOINTS).is_dir()):
            raise RunError(f"{run.path / paths.METRICS}: it ends at step {last} of {run.steps}: lines are lost")
