"""Mixers and our attention take memory linear in the number of tokens: resident pages of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, sys
import torch
from pointsman import AttentionTrace, RoutingContext, build_router
from pointsman.ops.attention import traced_attention

torch.set_num_threads(1)
what = sys.argv[1]
router = build_router("smoe" + what, dim=64, num_experts=8) if what else None

def own_attention(tokens):
    query = torch.randn(4, 1, tokens, 16, requires_grad=True)
    key_value, positions = torch.randn(2, 4, 1, tokens, 16), torch.randn(4, tokens, 16)
    output, _ = traced_attention(query, key_value, positions, *torch.randn(2, 4, 16), scale=0.25)
    output.square().sum().backward()

def mixed(tokens):
    hidden, trace = torch.randn(1, tokens, 64, requires_grad=True), None
    if what == "+attention":
        query, key, value = torch.randn(3, 1, 4, tokens, 16)
        trace = AttentionTrace(query, key, value, torch.randn(4, 16, 64), torch.randn(1, tokens, 64), 0.25)
    router(hidden, RoutingContext(attention=trace)).weights.square().sum().backward()

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1024

step = mixed if what else own_attention
step(300)  # kernels are chosen
ctypes.CDLL("libc.so.6").malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted anew
before = status("VmRSS")
step(int(sys.argv[2]))
print(status("VmHWM") - before)
"""


def peak(what: str, tokens: int) -> float:
    """MiB that one forward and backward add to the resident memory."""
    command = [sys.executable, "-c", SCRIPT, what, str(tokens)]
    few = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}  # oneDNN keeps a kernel for each shape
    return float(subprocess.run(command, env=os.environ | few, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("what", ["+similarity", "+attention", ""])
def test_resident_memory_grows_linearly(what: str) -> None:
    half, whole = peak(what, 8192), peak(what, 16384)
    assert half < 100
    assert whole < 2.2 * half + 4  # MB by which equal runs differ
