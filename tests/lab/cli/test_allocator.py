"""Freed memory that stays: counted in page faults, in a process of its own."""

import platform
import subprocess
import sys

import pytest

from pointsman_lab.cli.allocator import keep_freed_memory

FAULTS = """
import resource, sys
import torch
from pointsman_lab.cli.allocator import keep_freed_memory
kept = sys.argv[1] == "keep" and keep_freed_memory()
def step():
    return [torch.ones(10 << 20, dtype=torch.float32) for _ in range(2)]  # 40 MiB each: always given back by default
for _ in range(12):
    step()  # the heap takes its shape
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(6):
    step()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str) -> tuple[bool, int]:
    done = subprocess.run([sys.executable, "-c", FAULTS, word], capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return bool(int(kept)), int(count)


@pytest.fixture(autouse=True, scope="module")
def glibc() -> None:
    if not faults("keep")[0] or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35):
        pytest.skip("not a recent glibc with its own settings")


@pytest.mark.slow
def test_blocks_are_used_again_without_a_fault() -> None:
    fresh, kept = faults("leave")[1], faults("keep")[1]
    assert fresh > 1000  # huge pages could lessen it, not to this
    assert kept < fresh / 4


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=131072" if name.startswith("G") else "131072")
    assert keep_freed_memory() is False


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
