"""Jobs on the nodes of a cluster: a task each, on Ray or Slurm; one whose node is lost goes on on another.

A task connects back to the command and is then a worker as any other (`jobs.serve`). Command and nodes share the folder
in which the command runs; the run directories in it hold what a task on another node goes on from.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pointsman._errors import RunError, Stopped
from pointsman_lab._files import write_whole
from pointsman_lab.progress import Progress
from pointsman_lab.training.jobs import POLL, STOP, Work, Worker, serve

ATTEMPTS = 4
"""Nodes on which a job is tried."""
LOOK_EVERY = 1.0  # seconds between two looks at tasks that have not connected
GOES_ON = "what is saved is kept: the same command goes on"


class Nodes:
    """A cluster as `jobs.Hosts`: a worker for each job, as many at a time as the cluster has room for.

    Args:
        scheduler: of the cluster: `start` makes a task of a call, `fault` says why one has ended (None: it has not),
            `cancel` ends one; `address` is this machine's, as the nodes see it.
        out: in the folder that all nodes share; takes the traceback of a task that failed.
    """

    def __init__(self, scheduler: Ray | Slurm, out: Path) -> None:
        self.scheduler, self.out = scheduler, out

    def begin(self, setup: Callable[[], Work], titles: Sequence[str], progress: Progress) -> Sequence[Worker]:
        self._key, self._looked = secrets.token_bytes(32), 0.0
        self._arrived: SimpleQueue[tuple[Any, int, str]] = SimpleQueue()
        listener = connection.Listener((self.scheduler.address, 0), backlog=1024)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        call = partial(on_node, partial(_in_folder, setup, str(Path.cwd())), listener.address, self._key)
        return [_Task(self, number, title, call, progress) for number, title in enumerate(titles)]

    def ready(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        tasks = [worker for worker in workers if isinstance(worker, _Task)]
        while not self._arrived.empty():
            pipe, number, node = self._arrived.get()
            task = next((one for one in tasks if one.number == number), None)
            pipe.close() if task is None else task.connected(pipe, node)
        pipes = [task.pipe for task in tasks if task.pipe]
        found = connection.wait(pipes, POLL)
        if not pipes:
            time.sleep(POLL)
        late = []
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._looked = time.monotonic()
            late = [task for task in tasks if task.pipe not in found and task.looked()]
        return [task for task in tasks if task.pipe in found or task in late]

    def _accept(self, listener: connection.Listener) -> None:
        while True:
            with suppress(OSError):
                threading.Thread(target=self._greet, args=(listener.accept(),), daemon=True).start()

    def _greet(self, pipe: Any) -> None:
        """Takes a connection that knows the key; one that says nothing waits in this thread, and nobody for it."""
        try:
            connection.deliver_challenge(pipe, self._key)
            connection.answer_challenge(pipe, self._key)
            self._arrived.put((pipe, *pipe.recv()))
        except (EOFError, OSError, AuthenticationError):
            pipe.close()


class _Task(Worker):
    """A task that does one job."""

    def __init__(self, nodes: Nodes, number: int, title: str, call: Callable[[int], None], progress: Progress) -> None:
        super().__init__(progress.line(), None)
        self.number, self.places = number, list[str]()
        self._nodes, self._title, self._call = nodes, title, partial(call, number)
        self._stopping, self._left, self._gone, self._fault = False, True, False, ""
        self._tries, self._task = 1, nodes.scheduler.start(title, self._call)

    def connected(self, pipe: Any, node: str) -> None:
        """Its worker has connected from this node, perhaps in place of one that was lost without a word."""
        if self.pipe is not None:
            self.pipe.close()
        self.pipe, self.node = pipe, node
        self.places.append(node)

    def looked(self) -> bool:
        """Whether its task has ended without saying so."""
        fault = self._nodes.scheduler.fault(self._task)
        self._gone = fault is not None and (self.pipe is None or not self.pipe.poll())
        self._fault = fault or ""
        return self._gone

    def pick(self, todo: Mapping[int, Any]) -> int | None:
        return self.number if self._left else None

    def send(self, message: Any) -> None:
        self._stopping = self._stopping or message == STOP
        if self.pipe is None and self._stopping:
            self._nodes.scheduler.cancel(self._task)
            self.done = True
        super().send(message)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        kind, values = self.lost() if self._gone else super().receive()
        self._left = self._left and kind != "ended"
        return (kind, (self._told(values[0]),)) if kind == "failed" else (kind, values)

    def lost(self) -> tuple[str, tuple[Any, ...]]:
        self._nodes.scheduler.cancel(self._task)
        if self.pipe is not None:
            self.pipe.close()
        connected, self.pipe, self._gone = self.pipe is not None, None, False
        if self._stopping or not self._left:
            self.done = True
            return "finished", ()
        if self._tries == ATTEMPTS:
            self.done = True
            what = f"lost on {', '.join(self.places)}" if connected else self._fault
            return "failed", (RunError(f"{what}; {GOES_ON}"),)
        self._tries, self._task = self._tries + 1, self._nodes.scheduler.start(self._title, self._call)
        where = self.node if connected else "its node"  # lost before it could say so
        return "note", (f"{self._title}: {where} was lost; it goes on on another node",)

    def end(self) -> None:
        if not self.done:
            self._nodes.scheduler.cancel(self._task)
        if self.pipe is not None:
            self.pipe.close()

    def _told(self, error: Exception) -> Exception:
        """A failure in one line, with the run's name."""
        if isinstance(error, Stopped):
            return error
        text = str(error).strip()
        if type(error) is RuntimeError:  # of the program: the text is the traceback
            file = self._nodes.out / ".error.txt"  # the folder is still a new comparison's
            write_whole(file, text + "\n")
            text = f"{text.splitlines()[-1]} (traceback in {file})"
        return RunError(f"{self._title}{f', on {self.node}' if self.node else ''}: {' '.join(text.split())}")


def on_node(setup: Callable[[], Work], address: Any, key: bytes, number: int) -> None:
    """A task: connects to the command, and does what it says."""
    with connection.Client(address, authkey=key) as pipe:
        pipe.send((number, os.environ.get("POINTSMAN_NODE") or socket.gethostname()))
        serve(setup, pipe)


def _in_folder(setup: Callable[[], Work], folder: str) -> Work:
    try:
        os.chdir(folder)
    except OSError as error:
        told = f"{folder}: {error.strerror}; run the command in a folder that all nodes share"
        raise RunError(told) from None
    return setup()


@contextmanager
def cluster(told: str | None, device: str, out: Path) -> Iterator[Nodes | None]:
    """The nodes that --cluster names: ray, ray://HOST:PORT, slurm or slurm://PARTITION; None: there is none."""
    if told is None:
        yield None
        return
    kind, _, where = told.partition("://")
    if kind not in ("ray", "slurm") or where == "" != told.partition(kind)[2]:
        raise RunError(f"--cluster {told!r}: allowed are ray, ray://HOST:PORT, slurm and slurm://PARTITION")
    if device not in ("cpu", "cuda"):
        raise RunError(f"--device {device}: with --cluster, allowed are cpu and cuda, a GPU for each run")
    scheduler = Ray(where, device) if kind == "ray" else Slurm(where, device, out)
    try:
        yield Nodes(scheduler, out)
    finally:
        scheduler.close()


class Ray:
    """Tasks of a Ray cluster."""

    def __init__(self, address: str, device: str) -> None:
        host, _, port = address.rpartition(":")
        try:  # Ray itself would try for minutes
            if address:
                socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError, OverflowError) as error:
            raise RunError(f"--cluster ray://{address}: cannot be reached as HOST:PORT: {error}") from None
        import ray

        self._ray = ray
        printing: Any = import_module("ray._private.worker")
        printing.print_to_stdstream = lambda *_, **__: None  # a screenful about each lost node
        data = {name: value for name, value in os.environ.items() if name.startswith("POINTSMAN_")}
        try:
            ray.init(
                address or None, log_to_driver=False, logging_level="error",
                runtime_env={"env_vars": {**data, "OMP_NUM_THREADS": "1"}},
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            told = " ".join(str(error).split())
            raise RunError(f"--cluster ray{f'://{address}' if address else ''}: {told}") from None
        self.address = ray.util.get_node_ip_address()
        resources = {"num_cpus": 1, "num_gpus": int(device == "cuda")}
        self._remote = ray.remote(max_calls=1, max_retries=0, **resources)(_on_ray)

    def start(self, title: str, call: Callable[[], None]) -> Any:
        return self._remote.options(name=title).remote(call)

    def fault(self, task: Any) -> str | None:
        if not self._ray.wait([task], timeout=0)[0]:
            return None
        try:
            self._ray.get(task)
        except Exception as error:
            return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        return "the task ended without a result"

    def cancel(self, task: Any) -> None:
        self._ray.cancel(task, force=True)

    def close(self) -> None:
        self._ray.shutdown()


def _on_ray(call: Callable[[], None]) -> None:
    import ray

    node = ray.get_runtime_context().get_node_id()
    os.environ["POINTSMAN_NODE"] = f"{ray.util.get_node_ip_address()} ({node[:6]})"
    call()


class Slurm:
    """Jobs of Slurm, by submitit."""

    def __init__(self, partition: str, device: str, folder: Path, cluster: str = "slurm") -> None:
        import submitit

        try:
            self._executor = submitit.AutoExecutor(folder / f".slurm-{secrets.token_hex(8)}", cluster=cluster)
        except RuntimeError as error:
            raise RunError(f"--cluster slurm: {error}") from None
        gpus = {"gpus_per_node": 1} if device == "cuda" else {}
        self._executor.update_parameters(cpus_per_task=1, timeout_min=24 * 60, **gpus)
        if partition:
            self._executor.update_parameters(slurm_partition=partition)
        self.address = socket.gethostbyname(socket.gethostname()) if cluster == "slurm" else "127.0.0.1"

    def start(self, title: str, call: Callable[[], None]) -> Any:
        self._executor.update_parameters(name="".join(one if one.isalnum() else "-" for one in title))
        return self._executor.submit(call)

    def fault(self, task: Any) -> str | None:
        if not task.done():
            return None
        error = task.exception()
        return "the job ended without a result" if error is None else str(error).strip().splitlines()[-1]

    def cancel(self, task: Any) -> None:
        task.cancel(check=False)

    def close(self) -> None:
        return
