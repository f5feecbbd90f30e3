"""The operators and bytes of a training step as a GPU would run it, counted: they must not creep back.

The step runs on the "meta" device: shapes alone, no numbers, no GPU. A count says what must be launched and moved; it
is no time. Products are counted with their operands; views, and memory that is only reserved, are not.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman.control import set_top_k
from pointsman.experts import apply
from pointsman.experts.modules import Experts
from pointsman.kernels import grouped_mm
from pointsman.ops.kernels import Kernels, using
from pointsman.routing import Routing
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from pointsman_lab.recipes import preset
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import objective_of

FREE = ("detach", "empty", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "empty_strided")


@dataclass
class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`: counts every operator that a device would run.

    Attributes:
        operators: name -> how many.
        bytes: name -> read and written.
    """

    operators: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if not func.is_view and name not in FREE:
            written = _tensors(result)
            own = set() if name.endswith("_") else {id(tensor) for tensor in written}  # `out=` is not read
            read = [tensor for tensor in _tensors((args, kwargs)) if id(tensor) not in own]
            self.operators[name] += 1
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *written))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, tensors on "meta" take the way of those on a Hopper GPU, without autocast, which "meta" does not know."""
    with (
        patch.object(apply, "_path", lambda *_: "cuda"),
        patch.object(grouped_mm, "zeros_without_rows", lambda products, _: products),
        patch.object(torch, "autocast", lambda *_, **__: nullcontext()),
        patch.object(torch, "is_autocast_enabled", lambda *_: False),
        using(Kernels()),
    ):
        yield


def count_step(config: RunConfig, top_k: tuple[int, ...]) -> dict[int, Counts]:
    """Forward and backward of a step after a full memory, in bfloat16, for each k; without clipping and optimizer."""
    counts = {}
    with as_on_a_gpu():
        assert isinstance(config.model, TransformerXLConfig)
        model = TransformerXL(config.model).to("meta", torch.bfloat16)
        objective = objective_of(model)
        tokens = torch.zeros(config.batch_size, config.segment_length, dtype=torch.int64, device="meta")
        with torch.no_grad():
            memory = model(tokens, tokens, None, memory_length=config.memory_length).memory
        for k in top_k:
            set_top_k(model, k)
            model.zero_grad()
            with Counts() as counts[k]:
                outcome = objective.run(model, tokens, tokens, memory, config.memory_length)
                outcome.loss.backward()  # type: ignore[no-untyped-call]
    return counts


def test_a_step_of_the_small_model() -> None:
    """One layer of four at its full shape, 22 x 512 tokens after a memory of 512."""
    config = preset("small", router="hyperrouter", data="enwik8").with_vocabulary(205)
    config = config.with_overrides({"model.num_layers": 1})
    found = count_step(config, (2, 9))
    assert max(counts.operators.total() for counts in found.values()) <= 325
    assert found[2].bytes.total() < 7.0e9
    assert found[9].bytes.total() < 9.0e9


@pytest.mark.parametrize(
    ("hidden", "gated", "bias", "dropout", "operators", "passes"),
    [
        (512, False, False, 0.0, 39, 25), (512, False, True, 0.1, 57, 30), (512, True, False, 0.0, 48, 46),
        (512, True, True, 0.1, 70, 58), (64, False, False, 0.0, 45, 90), (64, True, True, 0.1, 76, 151),
    ],
)  # fmt: skip
def test_a_layer(hidden: int, gated: bool, bias: bool, dropout: float, operators: int, passes: float) -> None:
    """`passes`: all bytes, weights included, in those of the hidden units of all assignments."""
    tokens, k, dim = 4096, 4, 256
    layer = Experts(dim, hidden, 16, gated=gated, activation="silu" if gated else "relu", bias=bias, dropout=dropout)
    layer.to("meta", torch.bfloat16)
    given = torch.empty(tokens, dim, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.empty(tokens, k, device="meta", requires_grad=True)
    probs = torch.empty(tokens, 16, device="meta")
    routing = Routing(torch.empty(tokens, k, dtype=torch.int64, device="meta"), weights, probs, probs)
    with as_on_a_gpu(), Counts() as counts:
        output = layer(given, routing)
        output.backward(torch.empty_like(output))
    assert counts.operators.total() <= operators
    assert counts.bytes.total() / (tokens * k * hidden * 2) <= passes
