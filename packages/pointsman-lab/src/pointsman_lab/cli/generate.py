"""`pointsman generate RUN --prompt TEXT`: text from a run, at any k, in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab.cli.options import Parser, choose_device
from pointsman_lab.registry import entries

EPILOG = """examples:
  pointsman generate runs/decoder --prompt "def main(" --top-k 2
  pointsman generate runs/decoder --prompt "The " --prompt "A " --greedy
"""


def parser() -> Parser:
    flags = Parser("generate", "Continue prompts with a run's language model.", EPILOG)
    flags.add("run RUN", "a run directory", type=Path)
    for entry in entries():
        entry.add_flags("generate", flags)
    flags.common("a file for prompts and texts, a JSON object a line", settings="", folder=False)
    return flags


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    device = choose_device(values.device)
    for entry in entries():
        if (code := entry.run("generate", flags, values, device)) is not None:
            return code
    raise RunError(f"{values.run}: models of its family continue no text")
