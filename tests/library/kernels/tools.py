"""Triton's kernels without a GPU: in the interpreter, with faults put in, and compiled for GPUs that are not there."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

import pointsman

ROOT = Path(__file__).parents[3]
FOLDER = "tests/library/kernels/triton"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is not installed: pip install 'pointsman[gpu]'",
)
FLOAT_ATOMICS = re.compile(r"(?<![\w.])(atom|red)\.[\w.:]*\.(v\d\.)?b?f\d")
"""Sums whose order depends on the run."""

LIMIT = {90: 227 * 1024, 80: 163 * 1024}  # bytes of shared memory a block


def interpreted(*arguments: str, timeout: int = 580, package: Path | None = None) -> subprocess.CompletedProcess[str]:
    """pytest in a process whose kernels are interpreted; `package`: where else pointsman is imported from."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if package is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def with_a_fault(folder: Path, file: str, right: str, wrong: str, which: str) -> subprocess.CompletedProcess[str]:
    """The interpreted tests that `which` names, with a copy of the package in whose `file` a text is another."""
    shutil.copytree(Path(pointsman.__file__).parent, folder / "pointsman")
    target = folder / "pointsman" / file
    text = target.read_text()
    assert text.count(right) == 1
    target.write_text(text.replace(right, wrong))
    return interpreted(FOLDER, "-k", which, timeout=1700, package=folder)


NOT_WEEKLY = {
    "the mask of the last tile", "dropped rows in combine",
}  # fmt: skip
"""A fault of each kind of kernel."""


def most_weekly(faults: Collection[str]) -> list[Any]:
    """The faults of `NOT_WEEKLY`, and the others for the weekly workflow."""
    return [pytest.param(one, marks=() if one in NOT_WEEKLY else pytest.mark.weekly) for one in faults]


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    loose: Collection[str],
    capability: int,
    options: Mapping[str, int],
) -> Any:
    """A kernel for a GPU that is not there. All arguments but the `loose` ones are divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pointsman.kernels.triton.language import FUSED

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    whole = [place for place, name in enumerate(names) if name not in {*loose, *constants}]
    attributes = {(place,): [["tt.divisibility", 16]] for place in whole}
    given = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=given, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**options, **FUSED})


def registers_and_spills(found: Any, capability: int, folder: Path) -> tuple[int, int]:
    """What the assembler says."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(found.asm["ptx"])
    arch = {90: "sm_90a", 80: "sm_80"}[capability]
    command = [get_ptxas(capability).path, "-v", f"-arch={arch}", str(source), "-o", str(folder / "kernel.cubin")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.findall(r"Used (\d+) registers", told)[0]), int(re.findall(r"(\d+) bytes spill stores", told)[0])
