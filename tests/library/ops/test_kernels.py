"""Choosing, recording and falling back."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from pointsman import MoE
from pointsman.ops import gemm
from pointsman.ops import kernels as kernels_module
from pointsman.ops.kernels import PLAIN, Kernels, active, measure_kernels, using


def test_measured_once_and_recorded() -> None:
    kernels = measure_kernels()
    assert kernels is measure_kernels()
    assert kernels.path == "fast"
    assert Kernels.from_dict(kernels.to_dict()) == kernels
    assert Kernels.from_dict(PLAIN.to_dict()) == PLAIN


def test_as_a_word() -> None:
    kernels = Kernels("fast", "onednn", "mv", "dots", "padded")
    assert Kernels.decoded(kernels.code) == kernels
    assert kernels.row_of(torch.float32) == "mv"
    assert kernels.row_of(torch.bfloat16) == "dots"


BEFORE = {
    "gpu": "grouped_mm",
    **dict.fromkeys(("gpu_decode", "gpu_router", "gpu_attention", "gpu_mixing"), "torch"),
}


@pytest.mark.parametrize(
    ("recorded", "kernels"),
    [
        ({"path": "fast", "gemm": "onednn"}, Kernels(gemm="onednn", **BEFORE)),
        (
            {"path": "fast", "gemm": "blas", "row": "mv", "few": "rows", "row_bf16": "mv", "few_bf16": "columns"},
            Kernels(row="mv", row_bf16="mv", **BEFORE),
        ),
    ],
)
def test_records_of_earlier_versions(recorded: dict[str, str], kernels: Kernels) -> None:
    assert Kernels.from_dict(recorded) == kernels


class TestUsing:
    """One active choice for all that is computed inside."""

    @pytest.fixture(autouse=True)
    def _no_choice(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Whatever a thread of another test still holds."""
        monkeypatch.setattr(kernels_module, "_entered", [])
        token = kernels_module._own.set(None)
        yield
        kernels_module._own.reset(token)

    def test_nested(self) -> None:
        onednn = Kernels(gemm="onednn")
        assert active() == measure_kernels()
        with using(PLAIN):
            assert active() == PLAIN
            with using(onednn):
                assert active() == onednn
            with using(None):
                assert active() == measure_kernels()
            assert active() == PLAIN
        assert active() == measure_kernels()

    def test_left_by_an_error(self) -> None:
        with pytest.raises(KeyError), using(PLAIN):
            raise KeyError
        assert active() == measure_kernels()

    def test_two_threads_have_their_own(self) -> None:
        both, seen = threading.Barrier(2), {}

        def work(kernels: Kernels) -> None:
            with using(kernels):
                both.wait(10)
                seen[kernels] = active()
                both.wait(10)

        choices = [PLAIN, Kernels(gemm="onednn")]
        threads = [threading.Thread(target=work, args=(kernels,)) for kernels in choices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {kernels: kernels for kernels in choices}

    def test_a_thread_without_a_choice_follows_the_one_entered_last(self) -> None:
        seen = []
        with using(PLAIN):
            thread = threading.Thread(target=lambda: seen.append(active()))
            thread.start()
            thread.join()
        assert seen == [PLAIN]

    def test_backward_follows_its_forward(self) -> None:
        """The plain path has second derivatives, the fast one refuses them: also where backward runs outside."""
        layer, hidden = MoE(8, 12, 4), torch.randn(6, 8, requires_grad=True)
        with using(PLAIN):
            output = layer(hidden)
        (first,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        first.sum().backward()
        output = layer(hidden)
        with using(PLAIN), pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(output.square().sum(), hidden, create_graph=True)


@pytest.mark.parametrize("name", ["dots", "mv"])
def test_the_faster_row_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {"dots": (torch, "mv"), "mv": (kernels_module.dots, "linear")}[name]
    right = getattr(*slower)

    def slow(*args: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return right(*args)

    monkeypatch.setattr(*slower, slow)
    assert kernels_module._measure_row(torch.float32) == name


@pytest.mark.parametrize(("slower", "chosen"), [("mm", "padded"), ("bmm", "small")])
def test_the_faster_batches_are_taken(slower: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(torch, slower)

    def slow(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return right(*args, **kwargs)

    monkeypatch.setattr(torch, slower, slow)
    assert kernels_module._measure_batches(gemm.BLAS_RELU) == chosen


@pytest.mark.parametrize(("seconds", "chosen"), [(0.1, "usual"), (0.3, "other")])
def test_near_ties_fall_the_same_way(seconds: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def takes(duration: float) -> Callable[[], None]:
        def way() -> None:
            clock[0] += duration

        return way

    assert kernels_module.fastest({"usual": takes(2 + seconds), "other": takes(2)}, 3, 0.1) == chosen
    assert kernels_module.fastest({"usual": takes(2 + seconds), "other": takes(2)}, 3) == "other"


def test_without_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module.dots, "works", lambda: False)
    assert kernels_module._measure_row(torch.float32) == "mv"


@pytest.mark.parametrize("values", [{"path": "fats"}, {"gemm": "one-dnn"}, {"row": "dot"}, {"row_bf16": "nv"}])
def test_unknown_values_are_named(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))}=.*did you mean"):
        Kernels(**values)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown kernels 'gem'.*did you mean 'gemm'"):
        Kernels.from_dict({"gem": "blas"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["blas", "onednn"])
@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("small", [0, gemm.SMALL])  # 0: nothing is left to BLAS
def test_products(backend: str, dtype: torch.dtype, rows: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SMALL", small)
    products = gemm.choose(backend, dtype)
    if backend == "onednn" and gemm.onednn_works(dtype):
        assert products is not gemm.BLAS
    x, weight, bias, other = (torch.randn(shape).to(dtype) for shape in ((rows, 40), (56, 40), (56,), (rows, 56)))
    exact = [tensor.double() for tensor in (x, weight, bias, other)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    def check(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 8)

    linear = exact[0] @ exact[1].t()
    check(products.linear(x, weight), linear)
    check(products.linear(x, weight, bias), linear + exact[2])
    check(products.linear(x, weight, bias, relu=True), (linear + exact[2]).relu())
    output = torch.empty(rows, 56, dtype=dtype)
    assert products.linear(x, weight, bias, out=output) is output
    check(output, linear + exact[2])
    check(products.product(other, weight), exact[3] @ exact[1])
    back = torch.empty(rows, 40, dtype=dtype)
    products.product(other, weight, out=back)
    check(back, exact[3] @ exact[1])
    check(products.accumulate(other.clone(), x, weight), exact[3] + linear)
    check(products.accumulate(x.clone(), other, weight.t()), exact[0] + exact[3] @ exact[1])
    for left, right, product in ((other, x, exact[3].t() @ exact[0]), (x, other, exact[0].t() @ exact[3])):
        result = torch.empty(left.shape[1], right.shape[1], dtype=dtype)
        products.weight_gradient(result, left, right)
        check(result, product)
        products.weight_gradient(result, left, right, add=True)
        check(result, 2 * product)


class TestGuard:
    """oneDNN's products are not public: without them, or with wrong ones, BLAS is used."""

    @pytest.fixture(autouse=True)
    def _forget(self):
        gemm.onednn_works.cache_clear()
        measure_kernels.cache_clear()
        yield
        gemm.onednn_works.cache_clear()
        measure_kernels.cache_clear()

    def test_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
        assert not gemm.onednn_works(torch.float32)
        assert gemm.choose("onednn", torch.float32) is gemm.BLAS
        assert measure_kernels().gemm == "blas"

    def test_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = gemm.onednn_linear
        monkeypatch.setattr(gemm, "onednn_linear", lambda *args: right(*args) * 1.001)
        assert gemm.choose("onednn", torch.float32) is gemm.BLAS

    def test_wrong_weight_gradient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = gemm._onednn_weight_gradient
        monkeypatch.setattr(gemm, "_onednn_weight_gradient", lambda *args: right(*args) * 1.001)
        assert gemm.choose("onednn", torch.float32) is gemm.BLAS

    def test_refusing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise RuntimeError("not supported")

        monkeypatch.setattr(gemm, "onednn_linear", refuse)
        assert gemm.choose("onednn", torch.float32) is gemm.BLAS

    def test_slower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not gemm.onednn_works(torch.float32):
            pytest.skip("no oneDNN here")
        right = gemm.onednn_linear

        def slow(*args: object) -> torch.Tensor:
            for _ in range(20):
                right(*args)
            return right(*args)

        monkeypatch.setattr(gemm, "onednn_linear", slow)
        assert measure_kernels().gemm == "blas"
