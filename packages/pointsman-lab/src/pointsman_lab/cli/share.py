"""`pointsman share DIR` and `pointsman open FILE`: a run, a comparison, an audit or an exam as one file."""

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import read_text
from pointsman_lab._values import printable
from pointsman_lab.cli.options import Parser
from pointsman_lab.cli.runs import write_page
from pointsman_lab.data.catalog import CORPORA
from pointsman_lab.registry import entries, presets
from pointsman_lab.runs.comparison import read, read_comparison
from pointsman_lab.runs.imports import names_in
from pointsman_lab.runs.paths import COMPARISON
from pointsman_lab.runs.sharing import EXAM, Opened, is_shared, open_shared, share

ENDING = ".pointsman"
EPILOG = """examples:
  pointsman share runs/mine
  pointsman open mine.pointsman

The file has settings, figures, thinned curves, the routers' source files and
the papers; neither weights nor data. `pointsman open` makes the folder, its
tables and its page again, and shows the source. It runs none of it.
"""


def parser() -> Parser:
    flags = Parser("share", "Write one file of a run, a comparison, an audit or an exam.", EPILOG)
    flags.add("folder DIR", "a run, a comparison, an audit or an exam", type=Path)
    flags.common("the file to write (default: NAME.pointsman)", settings="", folder=False)
    return flags


def run(words: Sequence[str]) -> int:
    values = parser().read(words)
    from pointsman_lab.training.compare import check_runs

    out = values.out or Path(f"{values.folder.resolve().name}{ENDING}")
    if out.is_dir():
        raise RunError(f"pointsman share: {out}: this is a folder; name a file with --out")
    if out.exists() and not is_shared(out):
        raise RunError(f"pointsman share: {out}: it exists and is no file of `pointsman share`; choose another --out")
    cells = None
    if (values.folder / EXAM).is_file():
        from pointsman_lab.exam.cell import path_of
        from pointsman_lab.exam.exam import collect, plan_in

        plan = plan_in(values.folder)
        paths = {path_of(values.folder, *place): cell for place, cell in collect(plan, values.folder).items()}
        cells = {path.relative_to(values.folder).as_posix(): cell for path, cell in paths.items()}
        routers: Sequence[str] = plan.rows
    else:
        routers = read(values.folder).routers
        if (values.folder / COMPARISON).is_file():
            check_runs(values.folder)
    for name in share(values.folder, out, bibtex(routers), cells):
        print(printable(f"routers came from {name!r}, which is not in the file"), file=sys.stderr)
    print(out)
    return 0


def bibtex(routers: Sequence[str]) -> str:
    """An entry for the paper of each router and mixer that is known here."""
    from pointsman.routers.frame.registry import MIXERS, ROUTERS

    names = dict.fromkeys(name for spec in routers for name in names_in(spec))
    told: dict[str, str] = {}
    for name in names:
        paper = (ROUTERS | MIXERS)[name].paper if name in ROUTERS | MIXERS else ""
        for part in paper.split("; "):
            number = re.search(r"arXiv (\d{4}\.\d{4,5})", part)
            year = re.search(r"\b(19|20)\d\d\b", part)
            if number or year:
                rows = [f"  title = {{{part}}}", f"  note = {{router {name} of pointsman}}"]
                rows += [f"  year = {{{year[0]}}}"] if year else []
                rows += [f"  eprint = {{{number[1]}}}", "  archiveprefix = {arXiv}"] if number else []
                key = f"{re.sub('[^a-z0-9]', '', name)}-{number[1] if number else (year or [''])[0]}"
                told[key] = f"@misc{{{key},\n" + ",\n".join(rows) + "\n}\n"
    return "\n".join(told.values())


def open_parser() -> Parser:
    flags = Parser("open", "Open a file of `pointsman share`.", EPILOG)
    flags.add("file FILE", "a file of `pointsman share`", type=Path)
    flags.common("the folder to make (default: the file's name without its ending)", settings="")
    return flags


def run_open(words: Sequence[str]) -> int:
    values = open_parser().read(words)
    out = values.out or Path(values.file.name.removesuffix(ENDING))
    if out == values.file:
        raise RunError(f"pointsman open: {values.file}: --out is missing: the file's name has no ending {ENDING}")
    before = list(out.iterdir()) if out.is_dir() else None
    found = open_shared(values.file, out)
    try:
        return _shown(found)
    except ValueError as error:  # refused when its tables or its page are made
        if before:
            raise
        for entry in out.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if before is None:
            out.rmdir()
        raise RunError(f"{values.file}: nothing of it is kept: {error}") from None


def _shown(found: Opened) -> int:
    """Prints what a file brought, and makes its tables and its page."""
    from pointsman_lab.report.results import write_tables, write_task_tables

    out = found.folder
    for source in found.sources:
        print(f"--- {source}, as the sender had it; nothing of it was run")
        for number, line in enumerate(read_text(source).splitlines(), 1):  # numbered: no line of it passes for ours
            print(f"{number:4} | {printable(line)}")
        print(f"--- end of {source}; read it, then name it with --import {source} to train with it\n")
    for module in found.modules:
        print(printable(f"routers came from {module!r}, which is not in the file: get it from the sender"))
    if not (out / EXAM).is_file():  # whose tasks come with pointsman
        told_of_data(found.data)
    if (out / COMPARISON).is_file():
        print(write_tables(out))
        write_task_tables(out)
        for table in (each for entry in entries() for each in entry.tables(read_comparison(out))):
            table.write(out)
    if (out / EXAM).is_file():
        from pointsman_lab.exam.card import Card, told_card
        from pointsman_lab.exam.exam import collect, plan_in

        plan = plan_in(out)
        card = Card(plan.tasks, collect(plan, out), plan.rows)
        card.print()
        print(told_card(card, out), file=sys.stderr)
    else:
        print(write_page(out), file=sys.stderr)
    print(out)
    return 0


def told_of_data(data: Mapping[str, Any]) -> None:
    """Prints what is known of the sender's data, which the file lacks."""
    size = f", {data['bytes']:,} bytes, sha256 {data['sha256']}" if "sha256" in data else ""
    mark = f", fingerprint {data['fingerprint']}" if data.get("fingerprint") else ""
    print(printable(f"data: {data.get('about') or data['name']}{size}{mark}"))
    public = {*CORPORA, *(str(of.get("data", "")).partition(":")[0] for of in presets().values())}
    found = data["name"].partition(":")[0] in public and "sha256" not in data
    known = f"docs/data.md says where {data['name']} comes from" if found else "name yours with --data"
    print(printable(f"they are not in the file: {known}"))
