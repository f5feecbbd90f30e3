"""The recorded command of a comparison that grew: one that makes the whole table anew."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise


def whole_commands(commands: Sequence[str], asked: Mapping[str, str], seeds: int) -> str:
    """The last command that tunes, with the rows that it was asked for, and the last that does not, with the others.

    Args:
        asked: row -> what `--tune` was asked for; "" for a row that was not tuned.
    """
    named = dict.fromkeys(one for command in commands for one in _imports(command))
    more = [[word for one in named if one not in _imports(of) for word in ("--import", one)] for of in commands]
    commands = [shlex.join(_words(of) + words) if of else of for of, words in zip(commands, more, strict=True)]
    tuned, others = [row for row in asked.values() if row], [row for row, of in asked.items() if not of]
    last = {any(word.partition("=")[0] == "--tune" for word in _words(one)): one for one in commands}
    if len(last) == 2 and tuned and others:
        return "\n".join((_whole_command(last[True], tuned, seeds), _whole_command(last[False], others, seeds))).strip()
    if True not in last or not tuned:
        return _whole_command(commands[-1], list(asked), seeds)
    return _whole_command(last[True], [of or row for row, of in asked.items()], seeds)


def _whole_command(command: str, routers: Sequence[str], seeds: int) -> str:
    """The command with all rows and seeds of the directory, so that it makes the whole table anew."""
    words = _words(command)
    for flag, value in (("--routers", ",".join(routers)), ("--seeds", str(seeds))):
        if flag in words[:-1]:
            words[words.index(flag) + 1] = value
        elif any(word.startswith(f"{flag}=") for word in words):
            words = [f"{flag}={value}" if word.startswith(f"{flag}=") else word for word in words]
        elif words and value != "1":
            words += [flag, value]
    return shlex.join(words)


def _imports(command: str) -> list[str]:
    words = [*_words(command), ""]
    return [one.partition("=")[2] or two for one, two in pairwise(words) if one.partition("=")[0] == "--import"]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quotation mark without its second, in a plan that somebody edited
        return command.split()
