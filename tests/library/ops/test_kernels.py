"""Choosing, and falling back."""

import threading
from collections.abc import Iterator

import pytest
import torch

from pointsman import MoE
from pointsman.ops import kernels as kernels_module
from pointsman.ops.kernels import PLAIN, Kernels, active, using


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
        other = Kernels(gpu="triton")
        assert active() == Kernels()
        with using(PLAIN):
            assert active() == PLAIN
            with using(other):
                assert active() == other
            with using(None):
                assert active() == Kernels()
            assert active() == PLAIN
        assert active() == Kernels()

    def test_left_by_an_error(self) -> None:
        with pytest.raises(KeyError), using(PLAIN):
            raise KeyError
        assert active() == Kernels()

    def test_two_threads_have_their_own(self) -> None:
        both, seen = threading.Barrier(2), {}

        def work(kernels: Kernels) -> None:
            with using(kernels):
                both.wait(10)
                seen[kernels] = active()
                both.wait(10)

        choices = [PLAIN, Kernels(gpu="triton")]
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

    def test_leaving_one_of_two_equal_choices_leaves_the_outer(self) -> None:
        seen = []
        with using(PLAIN), using(None):
            with using(PLAIN):
                pass
            thread = threading.Thread(target=lambda: seen.append(active()))
            thread.start()
            thread.join()
        assert seen == [Kernels()]

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

    @pytest.mark.parametrize(
        "spec", ["smoe+similarity", "smoe+similarity:source=input", "smoe:dense_gradient=true", "sparsemixer"]
    )
    def test_what_has_no_second_derivatives_on_any_path_refuses_them(self, spec: str) -> None:
        """`autograd.grad` of the first ones with respect to `hidden` gave wrong ones in silence."""
        layer, hidden = MoE(8, 12, 4, router=spec), torch.randn(2, 3, 8, requires_grad=True)
        with using(PLAIN):
            output = layer(hidden)
        with pytest.raises(RuntimeError, match=r"has no second derivatives: leave create_graph=True out$"):
            torch.autograd.grad(output.square().sum(), hidden, create_graph=True)


@pytest.mark.parametrize("values", [{"path": "fats"}, {"gpu": "tritn"}])
def test_unknown_values_are_named(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))}=.*did you mean"):
        Kernels(**values)
