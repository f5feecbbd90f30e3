"""Flags that commands share, configuration files, and one-line errors."""

import argparse
import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import parse_json, read_ordinary
from pointsman_lab._values import flattened, most, printable, upper
from pointsman_lab.registry import entries
from pointsman_lab.runs.paths import is_page

WIDTH = 78
"""Columns of a help text."""
at_end = ExitStack()
"""What `main` closes when a command ends."""


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the most similar flag; flags may also come from a --config file."""

    only_cpu = ""  # why no other device is taken

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"pointsman {command}",
            description=fill(description, WIDTH),
            epilog="".join([epilog, *(entry.epilog(command) for entry in entries())]),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """argparse's, with the type and the metavar that a flag of this name has in every command (`USUAL`)."""
        return super().add_argument(*names, **{**USUAL.get(names[0], {}), **how})

    def add(self, name: str, told: str | None = None, **how: Any) -> None:
        """`add_argument` of a name with its metavar, as "--steps N" or "run RUN", and of its help."""
        name, _, metavar = name.partition(" ")
        given = {"metavar": metavar or None, "help": told}
        self.add_argument(name, **{key: value for key, value in given.items() if value}, **how)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string and (action.type is Path or action.dest in ("tokenizer", "against", "model", "name")):
            raise argparse.ArgumentError(action, "'': a name is missing")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r}: {did_you_mean(str(value), action.choices)}")

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{self.prog}: {message}")

    def common(
        self, out: str, settings: str = "any setting of the run, e.g. learning_rate=1e-3", *, folder: bool | None = True
    ) -> None:
        """--out, --device, --config, --import, --set. `folder`: what --out is; None: a page, or the folder for it."""
        self.add("--out DIR" if folder else "--out FILE", out, type=Path)
        self.add("--device NAME", "cpu, cuda, cuda:1, … (default: cuda if there is one)")
        self.add("--config FILE", "flags from a TOML or JSON file; flags here win", type=Path)
        told = "import routers of your own; a run records it (may be repeated)"
        many: Any = {"action": "append", "default": []}
        self.add("--import MODULE|FILE.py", told, dest="imports", **many)
        if settings:
            self.add("--set KEY=VALUE", settings, **many)
        self.out_is_folder = folder

    def flags(self) -> list[str]:
        return [word for action in self._actions for word in action.option_strings if word.startswith("--")]

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The parsed flags: command line over --config file over defaults."""
        for word in words:
            flag, equals, value = word.partition("=")
            if flag.startswith("--") and equals and value == "--":  # argparse takes it for the end of the flags
                raise RunError(f"{self.prog}: {flag} '--': not a value")
        self.defaults = {action.dest: action.default for action in self._actions}
        shows = not {"-h", "--help"}.isdisjoint(words)  # what is needed, too
        needed = [action for action in self._actions if not shows and action.required and action.option_strings]
        for action in needed:  # a file may have them, and an unknown flag is told first
            action.required = False
        values, unknown = self.parse_known_args(list(words))
        if unknown:
            flag = unknown[0].partition("=")[0]
            if flag.startswith("-"):
                raise RunError(f"{self.prog}: unknown flag {flag}: {did_you_mean(flag, self.flags())}")
            raise RunError(f"{self.prog}: unexpected argument {flag!r}")
        if getattr(values, "config", None) is not None:
            self.set_defaults(**self._from_file(values.config))
            values = self.parse_args(list(words))
        if missing := [action.option_strings[0] for action in needed if getattr(values, action.dest) is None]:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        if getattr(values, "imports", None):
            from pointsman_lab.runs.imports import import_named

            values.imports = [import_named(name) for name in values.imports]
        if getattr(values, "out", None) is not None:
            self._check_out(values.out)
        if values.device is not None and getattr(values, "cluster", None) is None:  # of other machines
            if self.only_cpu and values.device != "cpu":
                raise RunError(f"{self.prog}: --device {values.device}: {self.only_cpu}")
            choose_device(values.device)
        return values

    def _check_out(self, out: Path) -> None:
        folder = not is_page(out) if self.out_is_folder is None else self.out_is_folder
        if folder and os.path.lexists(out) and not out.is_dir():
            what = "a file" if out.is_file() else "no folder"
            raise RunError(f"{self.prog}: --out {out}: this is {what}; allowed is a folder, new or not")
        if not folder and out.is_dir():
            raise RunError(f"{self.prog}: --out {out}: this is a folder; allowed is a file")

    def without_effect(self, values: argparse.Namespace, flags: Sequence[str], unless: str) -> None:
        """Raises RunError if one of `flags` was given; `unless` says when it has no effect, as "without --task"."""
        for action in self._actions:
            for flag in set(action.option_strings).intersection(flags):
                if getattr(values, action.dest) != self.defaults[action.dest]:
                    raise RunError(f"{self.prog}: {flag} has no effect {unless}")

    def _from_file(self, path: Path) -> dict[str, Any]:
        where = f"{self.prog}: --config {path}"
        try:
            text = read_ordinary(path).decode("utf-8")
            table = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
        except RunError as error:
            raise RunError(f"{self.prog}: --config {error}") from None
        except RecursionError:
            raise RunError(f"{where}: nested too deeply") from None
        except OSError as error:
            raise RunError(f"{where}: {error.strerror}") from None
        except ValueError as error:
            raise RunError(f"{where}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
        if not isinstance(table, dict):
            raise RunError(f"{where}: allowed is a table of flags and values, not a {type(table).__name__}")
        actions = {word[2:]: action for action in self._actions for word in action.option_strings if word[:2] == "--"}
        actions = {flag: action for flag, action in actions.items() if flag not in ("help", "config")}
        values: dict[str, Any] = {}
        for key, value in table.items():
            flag = key.replace("_", "-")
            if flag not in actions:
                raise RunError(f"{where}: unknown flag {key!r}: {did_you_mean(flag, actions)}")
            try:
                values[actions[flag].dest] = self._file_value(actions[flag], value)
            except argparse.ArgumentError as error:
                raise RunError(f"{where}: {error}") from None
        return values

    def _file_value(self, action: argparse.Action, value: Any) -> Any:
        """A flag's value from a file, with the checks of the command line."""
        if isinstance(action, argparse._StoreTrueAction):
            if not isinstance(value, bool):
                raise argparse.ArgumentError(action, f"{value!r}: allowed are true and false")
            return value
        if isinstance(action, argparse._AppendAction):
            return [f"{name}={one}" for name, one in flattened(value)] if isinstance(value, dict) else _texts(value)
        converted = self._get_value(action, ",".join(_texts(value)))
        self._check_value(action, converted)
        for one in value if isinstance(value, list) else [value]:
            if one is None or isinstance(one, bool | dict | list):
                raise argparse.ArgumentError(action, f"{one!r}: allowed are text and numbers")
        return converted


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def whole(least: int = 0, name: str = "") -> Callable[[str], int]:
    """A flag's value as a whole number from `least` to the `most` of `name`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most(name):
            largest = f" to {upper(most(name))}" if number > least else ""
            raise argparse.ArgumentTypeError(f"{text!r}: allowed are whole numbers from {least}{largest}")
        return number

    return convert


def number_from(least: float, largest: float | None = None, name: str = "") -> Callable[[str], float]:
    """A flag's value as a number from `least` to `largest`, by default the `most` of `name`."""
    largest = most(name, float) if largest is None else largest

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= largest:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed are numbers from {least:g} to {largest:g}")
        return number

    return convert


def numbers(least: float = 0, largest: float | None = None) -> Callable[[str], tuple[float, ...]]:
    """A flag's value as numbers: `0.01,0.025`."""
    return lambda text: tuple(dict.fromkeys(number_from(least, largest)(part) for part in text.split(",")))


def k_list(text: str, name: str = "") -> tuple[int, ...]:
    """`1,2,4` as numbers up to the `most` of `name`."""
    return tuple(dict.fromkeys(whole(1, name)(part.strip()) for part in text.split(",")))


def words(text: str) -> list[str]:
    """`a,b,c` as a list without repetitions; empty names are an error."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: an empty name between commas")
    return list(dict.fromkeys(parts))


USUAL: dict[str, dict[str, Any]] = {
    "--data": {"metavar": "NAME|PATH"},
    "--top-k": {"type": k_list, "metavar": "K,K"},
    "--eval-tokens": {"type": lambda text: text if text == "all" else whole(1)(text), "metavar": "N|all"},
    "--steps": {"type": whole(1), "metavar": "N"},
    "--seeds": {"type": whole(1, "seeds"), "default": 1, "metavar": "S", "help": "how many seeds (default: 1)"},
    "--preset": {"metavar": "NAME"},
    "--router": {"metavar": "SPEC"},
    "--dtype": {"choices": ("auto", "float32", "bfloat16"), "default": "auto", "help": "default: as saved"},
}
"""What flags of these names have in every command; a command may have another."""


def overrides(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` pairs of --set as a dictionary."""
    values: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise RunError(f"--set {pair!r}: allowed is KEY=VALUE")
        values[key.strip()] = value.strip()
    return values


def action_of(command: str, words: Sequence[str], actions: Mapping[str, str], usage: str) -> str | None:
    """Which of a command's actions its first word names; None where that asks for help, which is printed."""
    if not words:
        raise RunError(f"pointsman {command}: the action is missing; allowed: {', '.join(actions)}")
    if words[0] in ("-h", "--help"):
        width = max(map(len, actions))
        print(usage.format(actions="\n".join(f"  {name:<{width}}  {text}" for name, text in actions.items())), end="")
        return None
    if words[0] not in actions:
        raise RunError(f"pointsman {command}: unknown action {words[0]!r}: {did_you_mean(words[0], actions)}")
    return words[0]


def note(message: str) -> None:
    """Tells the user something beside a command's output."""
    print(printable(message), file=sys.stderr)


def choose_device(name: str | None) -> str:
    """The device, checked; by default CUDA if available, else the CPU."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"--device {name!r}: allowed are cpu, cuda, cuda:0, mps, …") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"--device {name}: this machine has no CUDA device; allowed here is cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise RunError(f"--device {name}: PyTorch cannot use it on this machine; allowed here is cpu") from None
    return str(device)
