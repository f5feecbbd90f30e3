"""`pointsman COMMAND …`: runs a command; a user error becomes one line and exit code 2."""

from __future__ import annotations

import _thread
import errno
import importlib
import io
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any, TextIO

from pointsman._errors import RunError, Stopped, did_you_mean
from pointsman.parallel import STORE
from pointsman_lab._values import name_fault, printable
from pointsman_lab.cli.allocator import keep_freed_memory
from pointsman_lab.processes import PATIENCE, Interrupted, end_with_launcher, ending_signals, out_of_memory

COMMANDS = {
    "compare": "train several routers with equal settings and compare them",
    "train": "train one model, from flags or from a paper's recipe",
    "exam": "examine routers on tasks whose best routing is known",
    "evaluate": "evaluate a run at every k",
    "finetune": "fine-tune a run on a task",
    "diagnose": "routing diagnostics of a run or a model",
    "audit": "routing statistics and loss at every k of a Hugging Face MoE",
    "submit": "write a row of a comparison as an entry of the leaderboard",
    "compress": "prune or merge a Hugging Face MoE's experts; held-out text decides",
    "report": "write the page, the figures and the papers' tables of runs",
    "routers": "list and explain the routers; show their cost",
    "plan": "count what each of several GPUs will hold, gather and exchange",
    "export": "write a run's weights for use elsewhere",
    "generate": "continue prompts with a run's language model, at any k",
    "verify": "say whether a folder is whole, and what in it would be refused",
    "check": "say what a trainer does to the router of a mixture of experts",
    "share": "pack a run, a comparison or an audit into one file",
    "open": "open a shared file; code in it is never run",
    "trace": "compare recorded routings; simulate serving one",
    "hf": "change the routers of a Hugging Face model",
    "completion": "write a script by which a shell completes these words",
}
OVER_RANKS = ("train",)
"""The commands that torchrun may start on several ranks."""
EXTRAS = {
    "hf": ("transformers", "datasets", "tokenizers", "accelerate", "peft"),
    "report": ("matplotlib", "jinja2"),
    "track": ("tensorboard", "wandb", "trackio"),
    "vision": ("PIL", "scipy"),
    "text": ("sentencepiece",),
    "completion": ("shtab",),
    "cluster": ("ray", "submitit"),
}
"""The packages of each extra of pyproject.toml that commands import."""
_LOADERS = (ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__)
USAGE = """usage: pointsman COMMAND [options]

routing for sparse mixtures of experts

commands:
{commands}

options:
  -h, --help     this text; `pointsman COMMAND --help` explains a command
  --version      the version

start here: pointsman compare --routers smoe,hyperrouter --data stdlib
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 `verify` or `check` found faults or a router crashed in an exam, 2 user
    error, 130 interrupted (by Ctrl-C, SIGTERM or a terminal that closes), 141 nobody reads the output.
    """
    ready_streams()
    if STORE in os.environ:
        end_with_launcher()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _main(words)
        finally:
            sys.stdout.flush()
    except OSError as error:  # whoever read the output has enough of it, or it cannot be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else fail(describe(error))


def ready_streams() -> None:
    """Nothing goes where a stream was closed, and a character that standard output cannot show is "?" there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # else the next file that is opened would get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 - until the end
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if os.name == "posix" and isinstance(stream, io.TextIOWrapper) and stream.isatty():
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _Terminal(io.FileIO):
    """A terminal. Once it has closed, what is written goes nowhere: an error would end the command unsaved, since a
    write may fail before the signal comes."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return super().write(data)


def _main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())), end="")
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"pointsman {version('pointsman')}")
        return 0
    for word in words:
        if fault := name_fault(word):
            return fail(f"argument {word!r}: {fault}")
    name = words[0]
    if name not in COMMANDS:
        return fail(f"unknown command {name!r}: {did_you_mean(name, COMMANDS)}")
    if name not in OVER_RANKS and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        other = "start compare with --processes N" if name == "compare" else "this command runs in one process"
        return 2 if os.environ.get("RANK", "0") != "0" else fail(f"torchrun starts `pointsman train` only; {other}")
    came = list[int]()
    try:
        with interrupts_kept() as came:
            warnings.formatwarning = one_line
            keep_freed_memory()
            _check_folder()
            command = importlib.import_module(f"pointsman_lab.cli.{name}")
            from pointsman_lab.cli.options import at_end  # late: --help needs no command

            with at_end:
                return int(command.run(words[1:]))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and not _has_reader(sys.stdout):
            raise
        told = explain(Interrupted(came[0]) if came else error)
        if told is None:
            raise
        code, line = told
        if os.environ.get("RANK", "0") == "0":  # of ranks that all read the same flags, one says so
            print(line, file=sys.stderr)
        return code


def _check_folder() -> None:
    """Where the current folder was removed, oneMKL ends the process while torch is imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RunError("the current folder was removed: cd to another one") from None


def _has_reader(output: TextIO) -> bool:
    """Whether somebody still reads it."""
    with suppress(OSError, ValueError):  # it is no pipe
        watched = select.poll()
        watched.register(output.fileno(), 0)
        return not watched.poll(0)
    return True


@contextmanager
def interrupts_kept() -> Iterator[list[int]]:
    """Each of `ending_signals` raises `Interrupted`; the list has those that came.

    While native code is loaded (for `PATIENCE` at most), which may lose it, or end in another error or an abort, and in
    a destructor, where Python drops it and prints a traceback, it comes again a moment later. A rank takes Ctrl-C
    alone: what its launcher sends ends it at once, also in native code.
    """
    before, came, late, since = sys.unraisablehook, list[int](), list[threading.Timer](), list[float]()

    def again() -> None:
        late.append(threading.Timer(0.05, _thread.interrupt_main, came[-1:]))  # at once, it would be lost here, too
        late[-1].start()

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        since.append(time.monotonic())
        if since[-1] - since[0] > PATIENCE or not _loads_native_code(frame):
            raise Interrupted(number)
        again()

    def dropped(told: sys.UnraisableHookArgs) -> None:
        again() if issubclass(told.exc_type, KeyboardInterrupt) else before(told)

    numbers = [signal.SIGINT] if "RANK" in os.environ else ending_signals()
    ours = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in numbers if ours}
    found = {number: of for number, of in found.items() if of in (signal.SIG_DFL, signal.default_int_handler)}
    sys.unraisablehook = dropped
    for number in found:
        signal.signal(number, handle)
    try:
        yield came
    finally:
        for timer in late:
            timer.cancel()
        for number, handler in found.items():
            signal.signal(number, handler)
        sys.unraisablehook = before


def _loads_native_code(frame: FrameType | None) -> bool:
    """Whether an extension is being imported, or torch itself, whose native part imports numpy."""
    while frame is not None:
        code, name = frame.f_code, frame.f_globals.get("__name__")
        if code in _LOADERS or (code.co_name == "<module>" and name == "torch"):
            return True
        frame = frame.f_back
    return False


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and line of what the user can do something about; None for a fault of the program."""
    if isinstance(error, KeyboardInterrupt):
        by = [signal.Signals(number).name for number in error.args[:1] if number != signal.SIGINT]
        return 128 + signal.SIGINT, " by ".join(["interrupted", *by])
    if isinstance(error, Stopped):
        return 128 + signal.SIGINT, f"pointsman: {error}"
    if isinstance(error, OSError):
        return 2, as_line(describe(error))
    if isinstance(error, ValueError):
        return 2, as_line(str(error))
    if out_of_memory(error):
        told = "; ".join([*str(error).splitlines()[:1], "a smaller model, batch_size or segment_length takes less"])
        return 2, as_line(f"out of memory: {told}")
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        extra = next((f"'pointsman[{name}]'" for name, of in EXTRAS.items() if package in of), package)
        if package in ("pointsman", "pointsman_lab"):
            return None
        if isinstance(error, ModuleNotFoundError):
            return 2, as_line(f"the package {package!r} is not installed: pip install {extra}")
        fitting = f"; pip install {extra} brings a version that fits" if extra != package else ""
        return 2, as_line(f"an installed package cannot be loaded: {error}{fitting}")
    return None


def one_line(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as one line, without the source location."""
    return f"pointsman: {printable(' '.join(str(message).split()))}\n"


def describe(error: OSError) -> str:
    """An operating-system error as one line: what, where, and how to solve it."""
    place = f": {error.filename}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the disk{place}; nothing already saved is lost; free some space and run it again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        closed = error.filename and os.path.exists(error.filename)  # there, but it may not be read
        within = error.filename and not os.access(os.path.dirname(error.filename) or ".", os.X_OK)
        return f"no permission{place}{'' if closed or within else '; choose another folder with --out'}"
    return f"{error.strerror or error}{place}"


def fail(message: str) -> int:
    print(as_line(message), file=sys.stderr)
    return 2


def as_line(message: str) -> str:
    """An error as one line."""
    line = printable(" ".join(message.split()))
    return line if line.startswith("pointsman ") else f"pointsman: {line}"


if __name__ == "__main__":
    sys.exit(main())
