"""Commands over ranks: --processes, --parallel, --timeout, --restarts, and how a rank that fails ends the job."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from pointsman._errors import RunError
from pointsman.parallel import STORE
from pointsman_lab.cli.main import explain
from pointsman_lab.cli.options import Parser, whole
from pointsman_lab.processes import LOST, available_cores, launch

if TYPE_CHECKING:
    from pointsman.parallel.layout import Layout
    from pointsman.ranks import Ranks

FLAGS = ("--parallel", "--timeout", "--restarts")
RANKS_A_CORE = 4
"""More on a CPU only wait for each other; so many let a layout be tried on a small machine."""


def add_rank_flags(flags: Parser) -> None:
    flags.add("--processes N", "train on N processes of this machine", type=whole(1))
    flags.add("--parallel LAYOUT", "how they divide the model: experts=8,replicas=2")
    flags.add("--timeout SECONDS", "how long one waits for another (default: 600)", type=whole(1), default=600)
    flags.add("--restarts N", "how often they start again if one ends (default: 3)", type=whole(0), default=3)


def launched(
    parser: Parser,
    values: argparse.Namespace,
    device: str,
    command: str,
    words: Sequence[str],
    check: Callable[[int, Layout], None],
    again: Sequence[str] = ("--resume",),
) -> int | None:
    """The exit code of the ranks that --processes asks for; None in a rank, and where there is one process only.

    Args:
        check: called with the number of ranks and their layout before any rank starts; raises what the ranks would.
        again: the words that the command needs to go on after a rank was killed.
    """
    from pointsman.parallel.layout import Layout

    if in_a_rank():
        return None
    inside = "WORLD_SIZE" in os.environ
    if inside and values.processes:
        raise RunError(f"{parser.prog}: --processes starts the ranks itself: under torchrun leave it out")
    if inside:
        return None
    if (values.processes or 1) == 1:
        parser.without_effect(values, FLAGS, "in one process: give --processes N, or start it with torchrun")
        return None
    _check_number(values.processes, device)
    check(values.processes, Layout.parse(values.parallel or "", values.processes))
    here = {"", os.getcwd()} & {*sys.path}  # `python -m`; else no rank looks for modules in this folder either
    ranks = [sys.executable, *([] if here else ["-P"]), "-m", "pointsman_lab", command, *words]
    return launch(ranks, values.processes, values.restarts, again)


def in_a_rank() -> bool:
    """Whether this process is one that --processes started."""
    return STORE in os.environ


def _check_number(count: int, device: str) -> None:
    import torch

    if device.startswith("cuda"):
        if torch.cuda.device_count() < count:
            raise RunError(f"--processes {count}: this machine has {torch.cuda.device_count()} CUDA devices")
    elif count > (largest := RANKS_A_CORE * available_cores()):
        raise RunError(
            f"--processes {count}: allowed are 1 to {largest}, {RANKS_A_CORE} for each core of this machine; "
            "torchrun starts any number"
        )


@contextmanager
def joined(values: argparse.Namespace, device: str) -> Iterator[tuple[Ranks, Layout | None, str]]:
    """This process's place among the ranks, their layout, and its device; an error inside ends the whole job."""
    from pointsman.ranks import ALONE

    if "WORLD_SIZE" not in os.environ:
        yield ALONE, None, device
        return
    from pointsman.parallel.layout import Layout
    from pointsman.parallel.start import start

    ranks = ALONE
    try:
        if device.startswith("cuda"):
            import torch

            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        kind = device.partition(":")[0]
        ranks = start(kind, timeout=timedelta(seconds=values.timeout))
        layout = Layout.parse(values.parallel or "", ranks.count)
        yield ranks, layout, device
    except BaseException as error:
        _leave(ranks, error)
    else:
        if ranks.count > 1:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()


def _leave(ranks: Ranks, error: BaseException) -> None:
    """Says why, once among all ranks, and ends this process at once, so that none waits for it."""
    from pointsman_lab.processes import first_to_tell, is_lost, let_others_ask, lost_ranks

    # the launcher hands SIGINT on as SIGTERM: a rank does not say which it was
    told = explain(KeyboardInterrupt() if isinstance(error, KeyboardInterrupt) else error)
    if ranks.count == 1:  # the ranks have not met: rank 0 says it for all
        if os.environ.get("RANK", "0") != "0":
            os._exit(2)
        raise error
    if is_lost(error):
        silent = lost_ranks(ranks)
        names = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
        who = f"{names} ended or hangs" if len(silent) < 2 else f"{names} ended or hang"
        why = str(error).splitlines()[0]
        if first_to_tell(ranks):
            print(f"pointsman: {who if silent else 'the connection between ranks broke'}: {why}", file=sys.stderr)
        code = LOST
    elif told is None:
        print(f"rank {ranks.rank}:", file=sys.stderr)
        traceback.print_exception(error)
        code = 1
    else:
        code, line = told
        if first_to_tell(ranks):
            start = "" if ranks.first or line.startswith("pointsman: rank") else f"rank {ranks.rank}: "
            print(line.replace("pointsman: ", f"pointsman: {start}", 1), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    let_others_ask(ranks)
    os._exit(code)
