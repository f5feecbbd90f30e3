"""Triton's kernels outside the experts without a GPU: interpreted, with faults put in, compiled."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.library.kernels.tools import (
    FLOAT_ATOMICS,
    LIMIT,
    compile_kernel,
    most_weekly,
    needs_triton,
    registers_and_spills,
    with_a_fault,
)

QUICK = (
    "(test_against_float64 and relative and (((case0 or case1) and dtype0) or (case3 and dtype2)))"
    " or (test_against_float64 and inform and 5 and ((entropy and False) or (padded and True))) or test_without_values"
    " or test_what_the_kernels"
)


MUTATIONS = {
    "later keys": (
        "flash.py",
        "visible = visible & (j[None, :] <= own[:, None])",
        "pass",
    ),
    "the skew": (
        "flash.py",
        "(T - 1) + j[None, :]\n            tl.store",
        "T + j[None, :]\n            tl.store",
    ),
    "padded keys in backward": ("flash.py", "here, here & flows", "here, here"),
    "the shrinking of the sum": ("flash.py", "total = total * shrink + ", "total = total + "),
    "the first block of queries": ("flash.py", "tl.maximum(0, start - (S - T)) // BM * BM", "start"),
    "whom a token informs": ("flash.py", "visible = visible | (j[None, :] == own[:, None])", "pass"),
    "padding": ("flash.py", "visible & real[None, :] & own_real[:, None]", "visible & own_real[:, None]"),
    "the gradient of biases": ("flash.py", "d_bias += tl.sum(d_scores, 0)", "d_bias += 0"),
}


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", most_weekly(MUTATIONS))
def test_a_mutation_is_found(name: str, tmp_path: Path) -> None:
    """What the tests are worth: each of these faults fails one."""
    file, right, wrong = MUTATIONS[name]
    ended = with_a_fault(tmp_path, f"kernels/triton/{file}", right, wrong, QUICK)
    assert ended.returncode == 1, ended.stdout[-3000:]


# Compiled without a device ------------------------------------------------------------------------------------------

HALF = ("x_ptr", "q_ptr", "k_ptr", "v_ptr", "products_ptr", "out_ptr", "upper_ptr", "d_k_ptr", "d_v_ptr",
        "d_products_ptr", "d_q_ptr")  # fmt: skip
LOOSE = ("N", "B", "T", "S", "E", "W", "blocks", "tolerance")


def one_compiled(
    file: str,
    name: str,
    constants: dict[str, Any],
    capability: int,
    warps: int,
    stages: int = 3,
    half: Collection[str] = HALF,
) -> Any:
    """A kernel with inputs in bfloat16; the sizes in `LOOSE` need not be divisible by 16."""
    kernel = getattr(importlib.import_module(f"pointsman.kernels.triton.{file}"), name)
    signature = {argument: kind(argument, half) for argument in kernel.arg_names}
    options = {"num_warps": warps, "num_stages": stages}
    return compile_kernel(kernel, signature, constants, LOOSE, capability, options)


def kind(argument: str, half: Collection[str]) -> str:
    if argument.endswith("_ptr"):
        if argument == "real_ptr":
            return "*i8"
        return "*i64" if argument == "expert_ptr" else "*bf16" if argument in half else "*fp32"
    return "fp32" if argument == "tolerance" else "i32"


def check(found: Any, name: str, capability: int, folder: Path) -> None:
    """No spills, shared memory that fits, matrix instructions, no sums whose order depends on the run."""
    registers, spills = registers_and_spills(found, capability, folder)
    ptx = found.asm["ptx"]
    instruction = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else None
    print(f"{name} sm_{capability}: {registers} registers, {found.metadata.shared} bytes, {instruction}, {spills}")
    assert spills == 0
    assert found.metadata.shared <= LIMIT[capability]
    assert instruction
    assert re.search(r"ld\.global[^;]*\.v[24]|cp\.async", ptx), "wide loads"
    assert not FLOAT_ATOMICS.search(ptx)


FLASH = dict.fromkeys(["BIAS", "POSITIONS", "CAUSAL", "VALUES", "ENTROPY"], False) | {"PADDING": 0}


def flash(kernel: str, width: int, values: int, dtype: str, capability: int) -> Any:
    """A kernel of `flash.py`: of a mixer in float32, of an attention in bfloat16."""
    from pointsman.kernels.triton.flash_ops import tile

    mixer = dtype == "float32"
    t = tile(width, values, getattr(torch, dtype), capability // 10, kernel != "forward_kernel")
    constants = FLASH | dict.fromkeys(["POSITIONS", "CAUSAL", "VALUES"], True) | {"BIAS": mixer}
    constants |= {"PRECISION": "tf32x3" if mixer else "ieee", "BM": t.queries, "BN": t.keys, "DP": width, "EP": values}
    constants |= {"BD": min(t.inner, width), "BE": min(t.inner, values)}
    half = () if mixer else HALF
    return one_compiled("flash", kernel, constants, capability, t.warps, t.stages, half)


@needs_triton
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kernel", "width"),
    [
        ("keys_kernel", 32),
        *(
            pytest.param(kernel, width, marks=pytest.mark.slow)
            for kernel in ("forward_kernel", "keys_kernel", "queries_kernel")
            for width in (32, 64, 128)
        ),
    ],
)
def test_attention_compiles(kernel: str, width: int, capability: int, tmp_path: Path) -> None:
    found = flash(kernel, width, width, "bfloat16", capability)
    check(found, f"attention {kernel} {width}", capability, tmp_path)


@needs_triton
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kernel", "width", "experts"),
    [
        ("keys_kernel", 256, 16),
        *(
            pytest.param(kernel, *sizes, marks=pytest.mark.slow)
            for kernel in ("forward_kernel", "keys_kernel", "queries_kernel")
            for sizes in ((64, 16), (256, 256), (512, 64))
        ),
    ],
)
def test_mixing_compiles(kernel: str, width: int, experts: int, capability: int, tmp_path: Path) -> None:
    found = flash(kernel, width, experts, "float32", capability)
    check(found, f"mixers {kernel} {width} {experts}", capability, tmp_path)
