"""The leaderboard: checks entries that `pointsman submit` wrote, by training seeds again, and makes the page.

python -m tools.leaderboard check ENTRY     # of leaderboard/TRACK: the rules, then seeds again; needs the track's data
python -m tools.leaderboard page            # docs/leaderboard.md

An entry brings code: check it where there are no secrets. The same bits are asked for on a machine of the same kind
(commit, versions, processor, threads), else figures within the track's tolerance and a log that begins alike.
"""

import math
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pointsman._errors import RunError
from pointsman.routers.frame.registry import BASELINES
from pointsman_lab._files import read_json, write_whole
from pointsman_lab._grid import NONE, Grid, wrapped
from pointsman_lab._shapes import check_shape
from pointsman_lab._values import finite
from pointsman_lab.cli.progress import Display
from pointsman_lab.exam.cell import VERSION
from pointsman_lab.exam.entry import SHAPE as EXAM_SHAPE
from pointsman_lab.exam.entry import consistent
from pointsman_lab.exam.exam import record
from pointsman_lab.exam.run import run as examined
from pointsman_lab.exam.scores import QUICK, TASKS, scores
from pointsman_lab.exam.student import ROWS
from pointsman_lab.models.config import build_model
from pointsman_lab.models.cost import inference_flops
from pointsman_lab.report.cell import Cell, squared_variation
from pointsman_lab.runs.comparison import required_plan
from pointsman_lab.runs.environment import differing_bits
from pointsman_lab.runs.imports import import_named
from pointsman_lab.runs.sharing import ENTRY, entry_of, read_entry
from pointsman_lab.training.compare import Plan, compare
from pointsman_lab.training.config import RunConfig

ROOT = Path(__file__).parents[1]
RULES = {"title!": str, "text!": str, "data!": str, "fingerprint!": str, "seconds!": float, "seeds!": int,
         "eval_tokens!": int, "num_experts": int, "threads": int, "tolerance!": float}  # fmt: skip
EXAM_RULES = {"title!": str, "text!": str, "tasks!": [str], "seeds!": int, "tolerance!": float}
FIRST_STEPS, FIRST_LOSS = 5, 1e-3
"""The losses of so many logged steps are the same on any machine, this far: errors of rounding have not grown yet."""
FIRST_POINT = 0.1
"""How far the first point of an exam's curve may lie from that of the training again, after a tenth of the steps."""
FASTEST = 10
"""How many times as fast as here an entry may have trained: machines differ, and its seconds are its own word."""
UNEVEN = {"rel_tol": 0.5, "abs_tol": 0.1}
"""How far the loads' squared variation may lie from that of the training again, on another machine."""
KNOWN = record()


def rules_of(file: Path) -> dict[str, Any]:
    """The rules of the track in whose folder an entry lies."""
    rules = read_json(file.parent / "track.json")
    if rules is None:
        raise RunError(f"{file.parent} is no track: it has no track.json")
    check_shape(rules, EXAM_RULES if "tasks" in rules else RULES, str(file.parent / "track.json"))
    return rules


def opened(file: Path, rules: Mapping[str, Any]) -> dict[str, Any]:
    return read_entry(file, EXAM_SHAPE if "tasks" in rules else ENTRY)


def follow_exam(entry: Mapping[str, Any], rules: Mapping[str, Any], where: str) -> None:
    """RunError where an entry of the exam breaks a rule, is of no router, or has a run that diverged."""
    if entry["router"] in ROWS:
        raise RunError(f"{where}: {entry['router']!r} is a row to compare with, and no router")
    if entry["version"] != VERSION or set(entry["cells"]) != set(rules["tasks"]):
        shown = ", ".join(rules["tasks"])
        raise RunError(f"{where}: the track has version {VERSION} of the exam and the tasks {shown}")
    wanted = set(map(str, range(rules["seeds"])))
    for task, cell in entry["cells"].items():
        if set(cell["runs"]) != wanted:
            raise RunError(f"{where}, {task}: seeds {', '.join(cell['runs'])}; the track has 0 to {rules['seeds'] - 1}")
        for seed, one in cell["runs"].items():
            if one["value"] is None:
                raise RunError(f"{where}, {task}, seed {seed}: it diverged; a row with such a run has no score")
    if not entry["sources"]:  # else its router is known in `examined_again`
        consistent(entry, where)


def examined_again(entry: Mapping[str, Any], folder: Path, where: str) -> dict[tuple[str, str], Any]:
    """(task, seed) -> the run trained again as the entry chose, from its sources alone: seed 0, and one that the
    entry's checksum picks. RunError where the entry contradicts itself.
    """
    imported(entry["sources"], folder)
    consistent(entry, where)
    found: dict[tuple[str, str], Any] = {}
    for task, cell in entry["cells"].items():
        for seed in {0, random.Random(f"{entry['sha256']} {task}").randrange(len(cell["runs"]))}:
            found[task, str(seed)] = examined(TASKS[task], cell["chosen"]["spec"], seed, cell["chosen"]["rate"])
    return found


def compared_exam(entry: Mapping[str, Any], ours: Mapping[tuple[str, str], Any], tolerance: float, where: str) -> str:
    """What was found; RunError where curves begin otherwise, or the mean score is not that of the training again."""
    theirs = {(task, seed): entry["cells"][task]["runs"][seed] for task, seed in ours}
    for (task, seed), again in ours.items():
        if seed != "0" and "curve" not in theirs[task, seed]:
            continue  # the record keeps that of seed 0
        first, own = (run["curve"][0][-1] if run.get("curve") else None for run in (theirs[task, seed], again))
        if first is None or own is None or not math.isclose(first, own, rel_tol=FIRST_POINT):
            raise RunError(f"{where}, {task}, seed {seed}: its curve begins with {first}, trained again {own}")
    told, found = (
        fmean(mean_score(task, entry["router"], {seed: run}) for (task, seed), run in runs.items())
        for runs in (theirs, ours)
    )
    if abs(told - found) > tolerance:
        raise RunError(f"{where}: of {len(ours)} runs a mean score of {told:.3f}, trained again {found:.3f}")
    return f"of {len(ours)} runs a mean score of {told:.3f}, trained again {found:.3f} (tolerance {tolerance:g})"


def mean_score(task: str, router: str, runs: Mapping[str, Any]) -> float:
    """Mean score of these runs, by the record's oracle and plain; 0 where a training again diverged."""
    cells = {**{(task, row): KNOWN[task, row] for row in ("oracle", "plain")}, (task, router): {"runs": runs}}
    return fmean(scores(cells, task, router).values() or [0.0])


def follow(entry: Mapping[str, Any], rules: Mapping[str, Any], where: str) -> None:
    """RunError where the entry breaks a rule of the track."""
    settings = entry["settings"]
    seeds = sorted(map(int, entry["runs"]))
    if settings.get("data") != rules["data"] or entry["data"] != rules["fingerprint"]:
        raise RunError(f"{where}: trained on other data than the track's ({rules['data']})")
    if seeds != list(range(rules["seeds"])):
        raise RunError(f"{where}: seeds {seeds}; the track has 0 to {rules['seeds'] - 1}")
    if (experts := settings["model"].get("num_experts")) != rules.get("num_experts", experts):
        raise RunError(f"{where}: {experts} experts; the track has {rules['num_experts']}")
    for seed, run in entry["runs"].items():
        if (threads := run["environment"].get("threads")) != rules.get("threads", threads):
            raise RunError(f"{where}, seed {seed}: {threads} threads; the track has {rules['threads']}")
        ks = [result["top_k"] for result in run["evaluation"]["results"]]
        asked = settings.get("eval_top_k", [])
        if 2 not in ks and (len(ks) != 1 or 2 not in asked):  # a row of one k has that one, whatever is asked
            shown = ", ".join(map(str, ks))
            raise RunError(f"{where}, seed {seed}: evaluated at k = {shown}; the track asks for k = 2")
        if (steps := len(run["log"]["step"])) != (losses := len(run["log"]["loss"])):
            raise RunError(f"{where}, seed {seed}: its log has {steps} steps and {losses} losses")
        if any(finite(result.get("value")) is None for result in run["evaluation"]["results"]):
            raise RunError(f"{where}, seed {seed}: a figure of its evaluation is missing")
        if any(result.get("split") != "test" for result in run["evaluation"]["results"]):
            raise RunError(f"{where}, seed {seed}: evaluated on another split than test")
        if (used := run["step_seconds"] * settings["steps"]) > rules["seconds"]:
            raise RunError(f"{where}, seed {seed}: {used:.0f} s of training; the track allows {rules['seconds']:.0f}")
    if settings.get("eval_tokens") != rules["eval_tokens"]:
        raise RunError(f"{where}: eval_tokens={settings.get('eval_tokens')}; the track has {rules['eval_tokens']}")


def imported(sources: Mapping[str, str], folder: Path) -> list[str]:
    """The files of an entry's sources, written into a folder and imported."""
    names = [str(write_whole(folder / Path(name).name, text)) for name, text in sources.items()]
    for name in names:
        import_named(name)
    return names


def trained_again(entry: Mapping[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """The entry's run of one seed, from its settings and sources alone; in a process of its own, which imports them."""
    names = imported(entry["sources"], folder)
    given = {**entry["settings"], "imports": [], "track": [], "tensorboard": False}
    model = {**given["model"], "router": "smoe", "vocab_size": given["model"].get("vocab_size", 10**9)}
    base = replace(RunConfig.from_dict({**given, "model": model}, "the entry"), imports=tuple(names))
    tuned = {entry["router"]: entry["tuned"]} if entry["tuned"] else {}
    with Display() as display:
        compare(Plan(base, (entry["router"],), (seed,), tuned=tuned), folder / "run", jobs=1, progress=display)
    if required_plan(folder / "run")["data"] != entry["data"]:
        raise RunError("the track's data here is not what the entry was trained on")
    return entry_of(folder / "run", entry["router"], entry["name"])["runs"][str(seed)]  # type: ignore[no-any-return]


def compared(theirs: Mapping[str, Any], ours: Mapping[str, Any], tolerance: float, where: str) -> str:
    """What was found; RunError where the entry's figures are not those of its settings."""
    differing = differing_bits(theirs["environment"], ours["environment"])
    if theirs["environment"].get("commit") != ours["environment"]["commit"]:
        differing.append(f"commit {theirs['environment'].get('commit')}")
    exact = not differing
    losses = dict(zip(ours["log"]["step"], ours["log"]["loss"], strict=True))
    pairs = list(zip(theirs["log"]["step"], theirs["log"]["loss"], strict=True))
    for step, loss in pairs if exact else pairs[:FIRST_STEPS]:
        if step not in losses or abs(loss - losses[step]) > (0 if exact else FIRST_LOSS):
            raise RunError(f"{where}: the log has a loss of {loss} at step {step}, trained again {losses.get(step)}")
    if not pairs:
        raise RunError(f"{where}: its log is empty")
    figures, again = ({one["top_k"]: one for one in of["evaluation"]["results"]} for of in (theirs, ours))
    if figures.keys() != again.keys():
        raise RunError(f"{where}: figures at k = {[*figures]}, trained again at k = {[*again]}")
    for k in figures:
        value, own = figures[k]["value"], again[k]["value"]
        if abs(value - own) > (0 if exact else tolerance):
            raise RunError(f"{where}: {value} at k = {k}, trained again {own}")
        load, load_again = uneven([figures[k]]), uneven([again[k]])
        near = load_again is not None and load is not None and math.isclose(load, load_again, **UNEVEN)
        if load != load_again and (exact or not near):
            raise RunError(f"{where}: loads of squared variation {load} at k = {k}, trained again {load_again}")
    if theirs["step_seconds"] * FASTEST < ours["step_seconds"]:
        raise RunError(f"{where}: {theirs['step_seconds']:.2g} s a step, trained again {ours['step_seconds']:.2g} s")
    return "the same bits" if exact else f"within {tolerance} (not on the same machine or code: {'; '.join(differing)})"


def check(file: Path, seed: int = 0) -> str:
    """Checks one entry; of the exam the seeds of `examined_again`."""
    rules = rules_of(file)
    entry, exam = opened(file, rules), "tasks" in rules
    (follow_exam if exam else follow)(entry, rules, str(file))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, context) as alone:
        if exam:
            again = alone.submit(examined_again, entry, Path(folder), str(file)).result()
            return compared_exam(entry, again, rules["tolerance"], str(file))
        ours = alone.submit(trained_again, entry, seed, Path(folder)).result()
    return compared(entry["runs"][str(seed)], ours, rules["tolerance"], f"{file}, seed {seed}")


def uneven(results: Iterable[Mapping[str, Any]]) -> float | None:
    """Squared coefficient of variation of the experts' loads, mean over layers; None without loads."""
    layers = (layer for result in results for layer in (result.get("routers") or {}).values())
    found = [value for layer in layers if (value := squared_variation(layer)) is not None]
    return sum(found) / len(found) if found else None


def called(entry: Mapping[str, Any]) -> str:
    """Name and router in Markdown; the name makes no link, picture, HTML or code."""
    name = entry["name"].translate({ord(one): f"&#{ord(one)};" for one in r"&<>:\`*_[]!#~"})
    return f"{name} (`{entry['router'].replace('`', chr(39))}`)"


def row_of(entry: Mapping[str, Any]) -> list[str]:
    """name, bits at k = 1, 2 and N, the load's unevenness at k = 2, GFLOPs of its model at k = 2, seconds."""
    results = [{one["top_k"]: one for one in run["evaluation"]["results"]} for run in entry["runs"].values()]
    ks = [1, 2, entry["settings"]["model"]["num_experts"]]
    results = [of if len(of) > 1 else dict.fromkeys(ks, *of.values()) for of in results]  # a dense model has one k
    bits = [Cell({seed: of[k]["value"] for seed, of in enumerate(results) if k in of}).text(3) for k in ks]
    seconds = max(run["step_seconds"] for run in entry["runs"].values()) * entry["settings"]["steps"]
    counted = entry["router"] if entry["router"] in BASELINES else "smoe"  # a router's own cost is not counted
    shape = {**entry["settings"]["model"], "router": counted, "vocab_size": 256}
    model = RunConfig.from_dict({**entry["settings"], "model": shape, "imports": []}, "the entry").model
    flops = inference_flops(build_model(model), min(2, model.num_experts))
    load = uneven(of.get(2, {}) for of in results)
    shown = NONE if load is None else f"{load:.3f}"
    return [called(entry), *bits, shown, f"{flops / 1e9:.2f}", f"{seconds:.0f}"]


def exam_row(entry: Mapping[str, Any]) -> list[str]:
    """name, mean score over the tasks, mean score on each quick task, and the task with the least."""
    found = {task: mean_score(task, entry["router"], cell["runs"]) for task, cell in entry["cells"].items()}
    worst = min(found, key=found.__getitem__)
    shown = [f"{value:.2f}" for value in (fmean(found.values()), *(found[task] for task in QUICK if task in found))]
    return [called(entry), *shown, f"{worst} {found[worst]:.2f}"]


def page(folder: Path) -> str:
    """All tracks, each with its rules and its entries, the best at k = 2 (of the exam: on average) first."""
    parts = ["# Leaderboard", (folder / "README.md").read_text(encoding="utf-8").strip()]
    for track in sorted(folder.glob("*/track.json")):
        rules = rules_of(track)
        entries = [opened(file, rules) for file in sorted(track.parent.glob("*.json")) if file != track]
        if "tasks" in rules:
            header = ["entry", "mean score", *(task for task in QUICK if task in rules["tasks"]), "least"]
            rows = sorted(map(exam_row, entries), key=lambda row: -float(row[1]))
        else:
            header = ["entry", "k = 1", "k = 2", "k = N", "load, CV²", "GFLOPs", "seconds"]
            rows = sorted(map(row_of, entries), key=lambda row: float("inf" if row[2] == NONE else row[2].split()[0]))
        parts += [f"## {rules['title']}", wrapped(rules["text"]), Grid(header, rows, code=False).markdown()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["check", entry]:
                print(check(Path(entry).absolute()))
            case ["page"]:
                print(write_whole(ROOT / "docs" / "leaderboard.md", page(ROOT / "leaderboard")))
            case _:
                raise RunError(str(__doc__))
    except (RunError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
