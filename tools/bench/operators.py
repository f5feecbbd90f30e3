"""Counts the operators of a training step as a GPU would run them, and the bytes that they read and write.

The step runs on the "meta" device: shapes alone, no numbers, no GPU. A count says what must be launched and moved; it
is no time. Products are counted with their operands; views, and memory that is only reserved, are not.

    python -m tools.bench.operators --top-k 2,9,16
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman.control import set_top_k
from pointsman.experts import apply
from pointsman.kernels import grouped_mm
from pointsman.ops.kernels import Kernels, using
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--router", default="hyperrouter")
    parser.add_argument("--top-k", default="2,9,16")
    parser.add_argument("--most", type=int, default=12, metavar="N", help="operators listed for each k")
    given = parser.parse_args()
    config = preset(given.preset, router=given.router, data="enwik8").with_vocabulary(205)
    for k, counts in count_step(config, tuple(int(k) for k in given.top_k.split(","))).items():
        print(f"k {k}: {counts.operators.total():,} operators, {counts.bytes.total() / 1e9:.1f} GB")
        for name, size in counts.bytes.most_common(given.most):
            print(f"    {name:30} {counts.operators[name]:4} {size / 1e9:8.2f} GB")


if __name__ == "__main__":
    main()
