"""`pointsman submit DIR`: one row of a comparison as a file for the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pointsman_lab.cli.options import Parser

EPILOG = """examples:
  pointsman submit runs/mine --router mine --name "Mine, tuned"

The file has settings, source of the router, log, evaluation and environment.
Send it as a pull request: leaderboard/TRACK/NAME.json. docs/leaderboard.md has
the rules; a workflow trains one seed again and compares.
"""


def parser() -> Parser:
    flags = Parser("submit", "Write one row of a comparison as an entry of the leaderboard.", EPILOG)
    flags.add_argument("target", metavar="DIR", help="a comparison directory, all seeds of the row finished")
    flags.add_argument("--router", required=True, metavar="ROW", help="which row")
    flags.add_argument("--name", help="what the leaderboard calls it (default: the row)")
    flags.common("the file to write (default: entry.json)", settings="", folder=False)
    return flags


def run(words: Sequence[str]) -> int:
    values = parser().read(words)
    from pointsman_lab._files import write_whole
    from pointsman_lab.runs.entry import entry_of

    entry = entry_of(Path(values.target), values.router, values.name or values.router)
    print(write_whole(values.out or Path("entry.json"), json.dumps(entry, sort_keys=True) + "\n"))
    return 0
