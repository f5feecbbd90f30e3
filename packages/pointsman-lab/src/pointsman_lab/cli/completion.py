"""`pointsman completion SHELL`: a script by which a shell completes commands, flags, choices and files."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pointsman_lab._files import write_whole
from pointsman_lab.cli.main import COMMANDS
from pointsman_lab.cli.options import Parser

EPILOG = """examples:
  pointsman completion bash > ~/.pointsman.bash    # source it in ~/.bashrc
  pointsman completion zsh > ~/.zsh/_pointsman     # in a folder of $fpath
"""


def parser() -> Parser:
    flags = Parser("completion", "Write a script by which a shell completes pointsman's words.", EPILOG)
    flags.add("shell SHELL", "bash, zsh or tcsh", choices=("bash", "zsh", "tcsh"))
    flags.common("a folder for the script (default: it is printed)", settings="")
    return flags


def run(words: Sequence[str]) -> int:
    values = parser().read(words)
    import shtab  # type: ignore[import-not-found, unused-ignore]

    script = shtab.complete(every_command(shtab.FILE), shell=values.shell)
    if values.out:
        print(write_whole(values.out / f"pointsman.{values.shell}", script), file=sys.stderr)
    else:
        print(script)
    return 0


def every_command(file: object) -> argparse.ArgumentParser:
    """One parser of all commands and their actions; `file` marks the arguments that are paths."""
    whole = argparse.ArgumentParser("pointsman")
    commands = whole.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, told in COMMANDS.items():
        module = importlib.import_module(f"pointsman_lab.cli.{name}")
        if actions := getattr(module, "ACTIONS", None):
            inner = commands.add_parser(name, help=told).add_subparsers(parser_class=argparse.ArgumentParser)
            for action, what in actions.items():
                _add(inner, action, what, module.parser(action), file)
        else:
            _add(commands, name, told, module.parser(), file)
    return whole


def _add(among: argparse._SubParsersAction, name: str, told: str, flags: Parser, file: object) -> None:  # type: ignore[type-arg]
    for action in flags._actions:
        if action.type is Path or action.dest in ("data", "task", "target", "model"):
            action.complete = file  # type: ignore[attr-defined]
    among.add_parser(name, help=told, parents=[flags], add_help=False)
