"""`pointsman submit DIR`: one row of a comparison, or of an exam, as a file for the leaderboard."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab.cli.options import Parser

EPILOG = """examples:
  pointsman submit runs/mine --router mine --name "Mine, tuned"
  pointsman submit runs/exam --router mine

The file has settings, source of the router, log, evaluation and environment.
Send it as a pull request: leaderboard/TRACK/NAME.json. docs/leaderboard.md has
the rules; a workflow trains seeds of it again and compares.
"""


def parser() -> Parser:
    flags = Parser("submit", "Write one row of a comparison or an exam as an entry of the leaderboard.", EPILOG)
    flags.add("target DIR", "the directory of a comparison or exam, the row finished")
    flags.add("--router ROW", "which row", required=True)
    flags.add("--name", "what the leaderboard calls it (default: the row)")
    flags.common("the file to write (default: entry.json)", settings="", folder=False)
    return flags


def run(words: Sequence[str]) -> int:
    values = parser().read(words)
    from pointsman_lab._files import read_whole_json, write_whole
    from pointsman_lab.exam.entry import exam_entry, unlike_track
    from pointsman_lab.exam.exam import PLAN
    from pointsman_lab.runs.sharing import entry_of
    from pointsman_lab.training.compare import check_runs

    folder, out = Path(values.target), values.out or Path("entry.json")
    if out.exists() and "sha256" not in (read_whole_json(out.resolve()) or {}):
        raise RunError(f"pointsman submit: {out}: it exists and is no entry; choose another --out")
    exam = (folder / PLAN).is_file()
    if not exam:
        check_runs(folder)
    entry = (exam_entry if exam else entry_of)(folder, values.router, values.name or values.router)
    if exam and (told := unlike_track(entry)):
        print(f"pointsman: the exam's track will refuse this entry: {told}", file=sys.stderr)
    if not exam:
        settings, seeds = entry["settings"], len(entry["runs"])
        told = f"data {settings.get('data')}, seeds {seeds}, eval_tokens {settings.get('eval_tokens')}, "
        told += f"{settings['model'].get('num_experts')} experts"
        print(f"pointsman: {told}: a track takes its own alone (docs/leaderboard.md)", file=sys.stderr)
    print(write_whole(out, json.dumps(entry, sort_keys=True) + "\n"))
    return 0
