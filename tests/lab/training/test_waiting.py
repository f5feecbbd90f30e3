"""A training step waits for no device: nothing in it needs a number on the host."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman import add_losses, list_routers
from pointsman._errors import RunError
from pointsman.experts import apply
from pointsman.routers.mutual import posterior
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import check_kernels
from pointsman_lab.training.objectives import objective_of

Settings = Callable[..., RunConfig]
NOISY = "smoe:noise=0.5:balance=0.01:z_loss=0.1:capacity=1.0"


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class WaitingError(RuntimeError):
    """An operator that would wait for a device."""


class NoWaiting(TorchDispatchMode):
    """Refuses operators whose result a host must know (numbers out of tensors, shapes that depend on data), and copies
    between host and device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        masks = any(index.dtype == torch.bool for index in tensors(args[1:2])) if "index" in func.__name__ else True
        known = "output_size" in kwargs
        if func is torch.ops.aten.lift_fresh.default:
            raise WaitingError("a tensor made of numbers on the host")
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and masks and not known
        ):
            raise WaitingError(str(func))
        result = func(*args, **kwargs)
        if len({tensor.device.type for tensor in tensors((args, kwargs, result))}) > 1:
            raise WaitingError(f"{func} between host and device")
        return result


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors take the way of those on a GPU, wherever they are."""
    monkeypatch.setattr(apply, "_path", lambda *_: "cuda")
    monkeypatch.setattr(posterior, "_nothing_to_wait_for", lambda _: False)


@pytest.fixture
def on_meta(gpu_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The "meta" device, which knows no autocast, stands for a GPU."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def pass_without_waiting(config: RunConfig, device: str) -> None:
    """Forward and backward of two segments."""
    model = TransformerXL(config.model).to(device)
    objective, memory = objective_of(model), None
    tokens = torch.zeros(4, 16, dtype=torch.int64, device=device)
    for _ in range(2):
        with NoWaiting():
            outcome = objective.run(model, tokens, tokens, memory, 16)
            add_losses(outcome.loss, model).backward()  # type: ignore[no-untyped-call]
        memory = outcome.memory
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "experts" in name)


AHEAD = ("base", "depths", "expert-choice", "pooled", "sinkhorn", "soft")


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("device", ["cpu", "meta"])  # one shows tensors made of numbers, the other what is left behind
@pytest.mark.parametrize("mixer", ["", "+similarity", "+attention", "+attention:heads=all"])
def test_no_router_waits(settings: Settings, mixer: str, device: str) -> None:
    # a decoder refuses the first ones; hash, mask and stable check ids on a CPU, which waits for nothing; the means of
    # outputs that default needs are of pairs, whose number only the device knows
    causal = [name for name in list_routers() if name not in (*AHEAD, "hash", "mask", "stable", "default")]
    for name in [*(["xmoe"] if mixer else causal), NOISY]:
        pass_without_waiting(settings(name + mixer, **{"model.num_layers": 1}), device)


@pytest.mark.usefixtures("on_meta")
def test_what_waits_is_found(settings: Settings) -> None:
    values = torch.tensor([1.0, 0.0])
    for waits in (
        values.sum().item,
        values.nonzero,
        lambda: values[values > 0],
        lambda: values[[1, 0]],
        lambda: torch.tensor([1.0]),
        lambda: values.to("meta"),
    ):
        with NoWaiting(), pytest.raises(WaitingError):
            waits()
    order = torch.tensor([1, 0])
    with NoWaiting():
        assert len(values[order]) == 2


def test_kernels_for_a_gpu_are_refused_elsewhere(settings: Settings) -> None:
    with pytest.raises(RunError, match=r"^gpu_kernels=triton: only a CUDA device has them"):
        check_kernels(settings(gpu_kernels="triton"), torch.device("cpu"))
    with pytest.raises(RunError, match=r"^gpu_kernels=triton: deterministic=true takes the plain"):
        settings(gpu_kernels="triton", deterministic=True)
