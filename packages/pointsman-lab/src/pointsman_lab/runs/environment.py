"""environment.json: versions, machine and kernels of a run."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DECIDES_BITS = ("packages", "machine", "processor", "threads", "device", "device_name", "ranks", "layout")
"""Entries that must agree for a resumed run to equal an uninterrupted one bit for bit."""


def environment(
    kernels: Mapping[str, str], *, device: str = "cpu", device_name: str | None = None, threads: int = 1
) -> dict[str, Any]:
    """The content of environment.json, for the process that calls it."""
    packages: dict[str, str | None] = {}
    for name in ("pointsman", "torch", "numpy", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "format": 1,
        "python": sys.version.split()[0],
        "packages": packages,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "device_name": device_name,
        "kernels": dict(kernels),
        "commit": commit(),
    }


def differing_bits(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The entries of `DECIDES_BITS` that differ, in words; [] where results must agree bit for bit."""
    pairs = [(key, there.get(key), here.get(key)) for key in DECIDES_BITS]
    return [f"{key} ({before} there, {now} here)" for key, before, now in pairs if before != now]


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def commit() -> str | None:
    """The commit of the source that runs, with "-dirty" if the source differs from it; None outside a checkout."""
    git, own = ["git", "-C", str(Path(__file__).parent)], ["ls-files", "--error-unmatch", Path(__file__).name]
    words = ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        subprocess.run([*git, *own], capture_output=True, timeout=5, check=True)  # not installed into another checkout
        return subprocess.run([*git, *words], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
