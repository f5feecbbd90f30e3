"""Worker processes, forked from a server process that has imported everything but computed nothing.

Importing torch and the peers takes several seconds, and a benchmark starts more than a hundred processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from tools.bench.implementations import MODULES
from tools.bench.worker import serve

Request = tuple[str, Any]


@cache
def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.bench.worker", *MODULES])
    return context


def _work(target: Callable[[Connection], None], pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what libraries print
        os.dup2(nowhere, stream)
    target(pipe)


class Process:
    """A worker process that answers requests.

    Args:
        name: of the implementation.
        target: the function that it runs, with its end of the pipe; must be importable.
    """

    def __init__(self, name: str, target: Callable[[Connection], None] = serve) -> None:
        self.name = name
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(target, theirs), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    def ask(self, request: str, value: Any) -> dict[str, Any]:
        """The answer to (request, value); {"error": why} if the process has ended."""
        self.send(request, value)
        return self.receive()

    def send(self, request: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # the process has ended; `receive` returns the error
            self._pipe.send((request, value))

    def receive(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return {"error": f"the process ended with code {self._process.exitcode}"}
        return answer

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def ask_all(requests: Mapping[Process, Request]) -> dict[Process, dict[str, Any]]:
    """Each process's answer; the processes run at the same time."""
    for process, request in requests.items():
        process.send(*request)
    return {process: process.receive() for process in requests}
