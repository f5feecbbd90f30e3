"""Triton's kernels without a GPU: run in the interpreter, compiled for GPUs that are not there, and left out."""

import importlib
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pointsman.ops import kernels as choice
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import Kernels, using
from tests.library.kernels.tools import (
    FLOAT_ATOMICS,
    FOLDER,
    LIMIT,
    compile_kernel,
    interpreted,
    most_weekly,
    needs_triton,
    registers_and_spills,
    with_a_fault,
)

QUICK = (
    "(test_against_the_reference and ((dtype0 and (case0 or case3)) or (dtype2 and case4)))"
    " or test_dropout_reaches or test_a_dropped or test_frozen or test_no_tokens or test_nothing or test_tiles"
    " or test_the_cache or test_many or test_an_expert_that_does_not_exist or (test_sort and 9-8-255)"
    " or (test_products_with_units and silu and 0.3 and True) or (test_products and 30-24-40-False-dtype0)"
    " or test_the_dispatch or (test_against_the_reference and 512 and dtype0 and case3)"
)


FEW = (
    "(test_against_the_reference and dtype0 and case3 and not 512) or test_a_dropped or test_no_tokens"
    " or (test_sort and 9-8-255)"
)
"""A case or two of every kernel; the slow tests run more."""


@needs_triton
@pytest.mark.timeout(600)
def test_in_the_interpreter() -> None:
    ended = interpreted(FOLDER, "-k", FEW)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert ended.stdout.partition("[100%]")[0].count(".") >= 7, "with -q twice, dots are all that is told"


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    """All of it weekly (`--all-specs`)."""
    which = [] if pytestconfig.getoption("--all-specs") else ["-k", QUICK]
    ended = interpreted(FOLDER, *which, timeout=1700)
    assert ended.returncode == 0, ended.stdout[-3000:]


MUTATIONS = {
    "the mask of the last tile": ("products.py", "inside = row < end\n    n =", "inside = row >= 0\n    n ="),
    "the mask of the last rows": (
        "products.py",
        "inside = row < end\n        left_row",
        "inside = row >= 0\n        left_row",
    ),
    "dropped rows in combine": ("products.py", "there = (row[:, None] >= 0) &", "there = (row[:, None] >= -1) &"),
    "the weight of units": ("fused.py", "weighted = units * weight", "weighted = units"),
    "the block's own count": ("products.py", "shift = upto - here - ", "shift = upto - "),
    "the mask in backward": ("fused.py", "inner = inner * mask_of_units", "pass"),
    "the bias inside the product": (
        "fused.py",
        "up += tl.load(up_bias_ptr + of_expert, mask=n < H, other=0.0)"
        ".to(tl.float32)[None, :]\n    if GATED:\n        gate = gate.to",
        "up += 0.0\n    if GATED:\n        gate = gate.to",
    ),
    "the token of a row": ("fused.py", "x_ptrs = x_ptr + (slot // K)", "x_ptrs = x_ptr + row"),
    "the parts of the combine weight's gradient": (
        "fused.py",
        "slot.to(tl.int64) * columns + column",
        "slot.to(tl.int64) * columns",
    ),
    "the second product": ("products.py", "acc = accumulated(acc, b_ptr", "accumulated(acc, b_ptr"),
    "the sums of an expert": ("products.py", "total += tl.sum(left.to(tl.float32), 0)", "total += 0"),
    "the mask's slot": ("fused.py", "tl.philox(tl.load(seed_ptr), slots,", "tl.philox(tl.load(seed_ptr), zero,"),
    "the first tile of an expert": ("language.py", "tl.where(mine, upto - tiles, 0)", "tl.where(mine, upto, 0)"),
    "the last group of rows": ("language.py", "tl.minimum(rows - group * GROUP, GROUP)", "GROUP"),
    "no assignments": ("products.py", "max(1, triton.cdiv(slots, size))", "triton.cdiv(slots, size)"),
    "frozen weights": ("function.py", "and (want[of_weight] or want[of_bias])", ""),
}


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", most_weekly(MUTATIONS))
def test_a_mutation_is_found(name: str, tmp_path: Path) -> None:
    """What the tests are worth: each of these faults fails one."""
    file, right, wrong = MUTATIONS[name]
    more = "test_masks or (test_against_the_reference and 512 and dtype0 and (case1 or case2))"
    ended = with_a_fault(tmp_path, f"kernels/triton/{file}", right, wrong, f"{QUICK} or {more}")
    assert ended.returncode, ended.stdout[-3000:]


def test_ours_where_they_are_chosen_and_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    there = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:7"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(choice, "without_triton", lambda _: None)
    assert not choice.with_triton(there), "the default is torch"
    for path in ("fast", "plain"):
        with using(Kernels(path, gpu="triton")):
            assert choice.with_triton(there) == (path == "fast")
            assert not choice.with_triton(torch.zeros(3, 8)), "on a CPU"


def test_a_choice_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:7"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.9.0"))
    choice.without_triton.cache_clear()
    try:
        with using(Kernels(gpu="triton")), pytest.raises(ValueError, match=r"capability 7.5 is below 8.0; gpu='torch'"):
            choice.with_triton(there)
        monkeypatch.setitem(sys.modules, "triton", None)
        assert "pointsman[gpu]" in str(choice.without_triton((9, 0)))
    finally:
        choice.without_triton.cache_clear()


# Compiled without a device ------------------------------------------------------------------------------------------

POINTER = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}


def compiled(
    file: str, name: str, dtype: str, constants: dict[str, Any], capability: int, options: dict[str, int]
) -> Any:
    """A kernel for a GPU that is not there. Pointers and widths are divisible by 16."""
    kernel = getattr(importlib.import_module(f"pointsman.kernels.triton.{file}"), name)
    whole = {"expert_ptr", "count_ptr", "upto_ptr", "order_ptr", "row_ptr", "row_expert_ptr", "ends_ptr"}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument == "seed_ptr":
            signature[argument] = "*i64"
        elif argument.endswith("_ptr"):
            signature[argument] = (
                "*i32" if argument in whole else "*fp32" if argument == "parts_ptr" else POINTER[dtype]
            )
        else:
            signature[argument] = "fp32" if argument in ("rate", "scale") else "i32"
    loose = {"S", "T", "blocks", "K", "rows", "columns", "rate", "scale"}
    return compile_kernel(kernel, signature, constants, loose, capability, options)


def gemm_case(capability: int, rows: int, dtype: str, outer: bool) -> tuple[str, dict[str, Any], dict[str, int]]:
    from pointsman.kernels.triton import language

    exact = getattr(torch, dtype)
    tile = language.tile_for("outer" if outer else "times", exact, rows, capability // 10)
    constants = {"PRECISION": "tf32x3" if dtype == "float32" else "ieee"}
    constants |= {"BM": tile.rows, "BN": tile.columns, "BK": tile.inner}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if outer:
        return "outer_kernel", {**constants, "GATHER_LEFT": False, "GATHER_RIGHT": True, "SUMS": True}, options
    inner = {"E": 64, "EP": 128, "SUM": rows > 64, "other_a": 1}
    return "rows_kernel", {**constants, **inner, "stride_a": 1}, options


@needs_triton
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rows", "dtype", "outer"),
    [
        (1000, "bfloat16", False),
        pytest.param(1000, "bfloat16", True, marks=pytest.mark.slow),
        pytest.param(64, "float16", False, marks=pytest.mark.slow),
        pytest.param(8, "bfloat16", False, marks=pytest.mark.slow),
        pytest.param(8, "float32", False, marks=pytest.mark.slow),
        pytest.param(1000, "float32", False, marks=pytest.mark.slow),
        pytest.param(1000, "float32", True, marks=pytest.mark.slow),
    ],
)
def test_products_compile(rows: int, dtype: str, outer: bool, capability: int, tmp_path: Path) -> None:
    name, constants, options = gemm_case(capability, rows, dtype, outer)
    found = compiled("products", name, dtype, constants, capability, options)
    with_matrices(found, f"{name} {dtype} rows {rows}", capability, tmp_path, hopper=rows >= 64)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "dtype"), [(1000, "bfloat16"), (8, "bfloat16"), (1000, "float32")])
@pytest.mark.parametrize("name", ["up_kernel", "inner_kernel"])
def test_products_with_units_compile(
    name: str, rows: int, dtype: str, gated: bool, capability: int, tmp_path: Path
) -> None:
    """With all that can be at their ends: biases, GELU, gate, dropout."""
    from pointsman.kernels.triton import language

    product = {"up_kernel": ("up", "gated up"), "inner_kernel": ("inner", "gated inner")}[name][gated]
    tile = language.tile_for(product, getattr(torch, dtype), rows, capability // 10)
    constants = {"E": 64, "EP": 128, "ACT": 1, "GATED": gated, "DROP": True}
    constants |= {"BIAS": True} if name == "up_kernel" else {}
    constants |= {"PRECISION": "tf32x3" if dtype == "float32" else "ieee"}
    constants |= {"BM": tile.rows, "BN": tile.columns, "BK": tile.inner}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    found = compiled("fused", name, dtype, constants, capability, options)
    with_matrices(found, f"{name} {dtype} rows {rows} gated {gated}", capability, tmp_path, hopper=rows > 64)


def with_matrices(found: Any, what: str, capability: int, folder: Path, *, hopper: bool) -> None:
    """No spills, little enough memory, matrix instructions (on Hopper its own, if so), no sums in any order."""
    registers, spills = registers_and_spills(found, capability, folder)
    ptx = found.asm["ptx"]
    own = "wgmma.mma_async" in ptx
    print(f"{what} sm_{capability}: {registers} registers, {found.metadata.shared} bytes, {own}")
    assert spills == 0
    assert found.metadata.shared <= LIMIT[capability]
    assert own or ("mma.sync" in ptx and not (hopper and capability >= 90)), "no matrix instructions"
    assert "cp.async" in ptx
    assert not FLOAT_ATOMICS.search(ptx)


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "count": ("products", "count_kernel", "bfloat16", {"E": 64, "EP": 128, "BS": 512}),
    "place": ("products", "place_kernel", "bfloat16", {"E": 64, "EP": 128, "BS": 512}),
    "place256": ("products", "place_kernel", "bfloat16", {"E": 256, "EP": 512, "BS": 512}),
    "combine": ("products", "combine_kernel", "bfloat16", {"K": 8, "WEIGHTED": True, "BT": 4, "BD": 1024}),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["combine", *(pytest.param(one, marks=pytest.mark.slow) for one in CASES)])
def test_other_kernels_compile(case: str, capability: int, tmp_path: Path) -> None:
    file, name, dtype, constants = CASES[case]
    found = compiled(file, name, dtype, constants, capability, {"num_warps": 4, "num_stages": 3})
    registers, spills = registers_and_spills(found, capability, tmp_path)
    ptx = found.asm["ptx"]
    print(f"{case} sm_{capability}: {registers} registers, {found.metadata.shared} bytes")
    assert spills == 0
    assert found.metadata.shared <= 48 * 1024
    assert not FLOAT_ATOMICS.search(ptx)
    if name == "combine_kernel":
        assert re.search(r"ld\.global[^;]*\.v4", ptx), "16 bytes at a time"
        assert re.search(r"st\.global[^;]*\.v4", ptx)


# On a device --------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_device(problem: Callable[..., Any], gated: bool, dtype: torch.dtype) -> None:
    from pointsman.kernels.triton import function

    for favourite in (0.0, 20.0):
        case = problem(700, 64, 96, 9, 2, dtype=dtype, gated=gated, dropped=0.2, favourite=favourite)

        def on_device(case: Any) -> torch.Tensor:
            tensors = (None if tensor is None else tensor.cuda() for tensor in case.parameters)
            given = case.hidden.cuda(), case.weights.cuda(), case.routing.experts.cuda(), ExpertParameters(*tensors)
            return function.apply(*given, case.activation, 0.0).cpu()

        case.check(on_device)
        results = []
        for _ in range(2):  # bit for bit
            output = on_device(case)
            results.append([output, *torch.autograd.grad(output.float().square().sum(), case.leaves)])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_is_captured_in_a_graph(problem: Callable[..., Any]) -> None:
    from pointsman.kernels.triton import function

    case = problem(512, 64, 96, 8, 2, dtype=torch.bfloat16)
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in case.leaves]
    experts, gradient = case.routing.experts.cuda(), torch.randn(512, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> list[torch.Tensor]:
        hidden, weights, *tensors = leaves
        output = function.apply(hidden, weights, experts, ExpertParameters(*tensors), "relu", 0.0)
        return [output, *torch.autograd.grad(output, leaves, gradient)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = [tensor.clone() for tensor in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    experts.copy_(experts.flip(0))
    graph.replay()
    assert not torch.equal(captured[0], expected[0])
    experts.copy_(experts.flip(0))
    graph.replay()
    assert all(torch.equal(got, value) for got, value in zip(captured, expected, strict=True))
