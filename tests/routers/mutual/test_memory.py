"""Mixers take memory linear in the number of tokens: resident pages, counted in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, sys
import torch
from pointsman import build_router

torch.set_num_threads(1)
router = build_router("smoe+similarity", dim=64, num_experts=8)

def step(tokens):
    router(torch.randn(1, tokens, 64, requires_grad=True)).weights.square().sum().backward()

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1024

step(300)  # kernels are chosen
ctypes.CDLL("libc.so.6").malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted anew
before = status("VmRSS")
step(int(sys.argv[1]))
print(status("VmHWM") - before)
"""


def peak(tokens: int) -> float:
    """MiB that one forward and backward add to the resident memory."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tokens)], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_resident_memory_grows_linearly() -> None:
    half, whole = peak(8192), peak(16384)
    assert half < 100
    assert whole < 2.2 * half
