"""Runs a function of `tests/parallel/worker.py` on several ranks, each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


def on_ranks(function: str, count: int, folder: Path, **arguments: Any) -> list[Any]:
    """What `function(ranks, **arguments)` returns on each rank, as JSON; a rank that fails fails the test."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), function, str(rank), str(count), str(store), json.dumps(arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    results, failed = [], []
    try:
        for rank, process in enumerate(started):
            out, err = process.communicate(timeout=240)
            if process.returncode:
                failed.append(f"rank {rank}: {err[-3000:]}")
            else:
                results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
    assert not failed, "\n".join(failed)
    return results
