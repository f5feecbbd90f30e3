"""Packed weights: the same results, and never those of weights that have changed."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.experts.apply import apply_experts
from pointsman.experts.cpu import decode, function, packing
from pointsman.ops import gemm
from pointsman.ops.kernels import PLAIN, Kernels

ONEDNN = Kernels(gemm="onednn")


TRAINED = {
    "fused": lambda case: torch.optim.AdamW(leaves(case), 0.1, fused=True).step(),
    "data": lambda case: [tensor.data.mul_(2) for tensor in leaves(case)],
    "storage": lambda case: [tensor.detach().numpy().__imul__(2) for tensor in leaves(case)],
}
"""Changes that count no version."""


def leaves(case: Any) -> list[Tensor]:
    return [tensor for tensor in case.parameters if tensor is not None]


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not packing.works(torch.float32):
        pytest.skip("oneDNN packs no weights here")
    for module in (packing, decode):
        monkeypatch.setattr(module, "IN_CACHE", 1)
    monkeypatch.setattr(function, "sharing", lambda *_: None)
    monkeypatch.setattr(gemm, "SMALL", 0)
    monkeypatch.setattr(packing, "measure_kernels", lambda: ONEDNN)
    monkeypatch.setattr(packing, "beats_columns", lambda dtype: True)
    yield
    packing._packs.clear()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row counts of packed products."""
    rows: list[int] = []
    inner = packing.onednn_linear

    def counted(inputs: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        assert weight.is_mkldnn
        rows.append(len(inputs))
        return inner(inputs, weight, *rest)

    monkeypatch.setattr(packing, "onednn_linear", counted)
    return rows


def pack(case: Any) -> None:
    for tensor in case.parameters[:2] + case.parameters[4:5]:
        assert tensor is None or packing.pack(tensor) == tensor.nbytes


def evaluate(case: Any) -> Tensor:
    with torch.no_grad():
        return apply_experts(case.hidden, case.routing, case.parameters, case.activation, kernels=ONEDNN)


def check(case: Any, tolerance: float = 1e-5) -> None:
    expected = case.reference(torch.zeros_like(case.hidden))[0]
    assert (evaluate(case).double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "gated"), [("relu", False), ("gelu", False), ("silu", True)])
@pytest.mark.parametrize(("tokens", "k"), [(40, 2), (200, 3), (30, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_reference(
    problem: Callable[..., Any],
    products: list[int],
    dtype: torch.dtype,
    activation: str,
    gated: bool,
    tokens: int,
    k: int,
    bias: bool,
) -> None:
    case = problem(tokens, k=k, dtype=dtype, activation=activation, gated=gated, bias=bias)
    pack(case)
    check(case, 1e-5 if dtype == torch.float32 else 2e-2)
    assert len(products) >= (3 if gated else 2) * 5


def test_single_rows_and_dropped_assignments(problem: Callable[..., Any], products: list[int]) -> None:
    case = problem(7, k=2, dropped=0.4)
    pack(case)
    check(case)
    assert products
    assert min(products) > 1


@pytest.mark.parametrize("faster", [True, False])
def test_columns_where_they_are_faster(
    problem: Callable[..., Any], products: list[int], monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    monkeypatch.setattr(packing, "beats_columns", lambda dtype: not faster)
    monkeypatch.setattr(decode, "COLUMNS", {torch.float32: range(2, 100)})
    case = problem(12, k=2)
    pack(case)
    kernels = Kernels(gemm="onednn", few="columns")
    with torch.no_grad():
        output = apply_experts(case.hidden, case.routing, case.parameters, case.activation, kernels=kernels)
    expected = case.reference(torch.zeros_like(case.hidden))[0]
    assert (output.double() - expected).norm() <= 1e-5 * expected.norm()
    assert bool(products) != faster


def test_the_timing_against_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    genuine = packing.onednn_linear

    def slow(*args: Any) -> Tensor:
        time.sleep(0.05)
        return genuine(*args)

    monkeypatch.setattr(packing, "onednn_linear", slow)
    try:
        packing.beats_columns.cache_clear()
        assert not packing.beats_columns(torch.bfloat16)
    finally:
        packing.beats_columns.cache_clear()


def test_halves_of_a_fused_weight(problem: Callable[..., Any], products: list[int]) -> None:
    case = problem(40, k=2, gated=True, activation="silu", bias=False)
    fused = torch.cat([case.parameters.w_gate, case.parameters.w_in], 1).detach().requires_grad_()
    gate, up = fused.unflatten(1, (2, -1)).unbind(1)
    case.parameters = case.parameters._replace(w_in=up, w_gate=gate)
    packing.pack(fused, parts=2)
    packing.pack(case.parameters.w_out)
    check(case)
    assert len(products) == 3 * 6
    assert len(packing._packs[fused].matrices) == 2 * 6


def test_changed_weights_are_packed_anew(problem: Callable[..., Any], products: list[int]) -> None:
    case = problem(40, k=2)
    pack(case)
    check(case)
    with torch.no_grad():
        case.parameters.w_in.mul_(2)  # counts a version
    check(case)
    case.parameters.w_out.data = torch.randn_like(case.parameters.w_out)  # another address
    check(case)
    assert products


@pytest.mark.parametrize("how", TRAINED)
@pytest.mark.parametrize("evaluated", ["before the gradients", "before the step"])
@pytest.mark.parametrize("training", ["plain", "autocast", "reference"])
def test_training_makes_them_old(
    problem: Callable[..., Any], products: list[int], how: str, evaluated: str, training: str
) -> None:
    case = problem(40, k=2)
    pack(case)
    check(case)
    kernels = PLAIN if training == "reference" else ONEDNN
    with torch.autocast("cpu", torch.bfloat16, enabled=training == "autocast"):
        output = apply_experts(case.hidden, case.routing, case.parameters, case.activation, kernels=kernels)
    if evaluated == "before the gradients":
        evaluate(case)
    output.sum().backward()
    if evaluated == "before the step":
        evaluate(case)
    versions = [tensor._version for tensor in leaves(case)]
    TRAINED[how](case)
    assert versions == [tensor._version for tensor in leaves(case)]
    products.clear()
    check(case)
    assert products


def test_in_inference_mode_no_versions_are_counted(problem: Callable[..., Any], products: list[int]) -> None:
    with torch.inference_mode():
        case = problem(40, k=2)
        case.parameters = case.parameters._replace(
            w_in=case.parameters.w_in.detach().clone(), w_out=case.parameters.w_out.detach().clone()
        )
        pack(case)
        before = evaluate(case)
        case.parameters.w_out.mul_(2)
        case.parameters.b_out.mul_(2)
        assert len(products) > 2
        torch.testing.assert_close(evaluate(case), 2 * before)


def test_unpacked_and_gone_with_its_parameter(problem: Callable[..., Any], products: list[int]) -> None:
    case = problem(40, k=2)
    pack(case)
    twin = copy.deepcopy(case.parameters.w_in)
    assert twin not in packing._packs
    packing.unpack(case.parameters.w_in)
    packing.unpack(case.parameters.w_out)
    check(case)
    assert not products
    packing.pack(twin)
    del twin
    gc.collect()
    assert not len(packing._packs)


def test_what_is_not_packed(problem: Callable[..., Any], products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(40, k=2)
    assert packing.pack(case.parameters.w_in.detach().double()) == 0
    assert packing.pack(torch.randn(4, 5)) == 0
    assert packing.pack(torch.randn(4, 5, 3).bfloat16().transpose(1, 2)) == 0
    assert packing.pack(torch.randn(4, 4, 1), parts=2) > 0
    assert packing.pack(torch.randn(4, 2, 1), parts=2) == 0
    pack(case)
    with torch.no_grad():
        apply_experts(case.hidden, case.routing, case.parameters, case.activation, kernels=Kernels(gemm="blas"))
    assert not products  # float32 through BLAS stays there
    monkeypatch.setattr(packing, "measure_kernels", lambda: Kernels(gemm="blas"))
    assert packing.pack(case.parameters.w_in) == 0


def test_a_wrong_pack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packing._packed
    try:
        for wrong in (lambda matrix: right(matrix * 1.1), lambda matrix: torch.ops.mkldnn.no_such_operation(matrix)):
            packing.works.cache_clear()
            monkeypatch.setattr(packing, "_packed", wrong)
            assert not packing.works(torch.float32)
            assert packing.pack(torch.randn(2, 30, 30)) == 0
    finally:
        packing.works.cache_clear()
