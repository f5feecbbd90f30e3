"""What each technique of the experts' CPU path buys: the layer with it and without it, in turns.

    python -m tools.bench.tricks c --without recycled_gradients,keep_freed_memory
    python -m tools.bench.tricks decode --tokens 4 --without row=mv,decode

Each variant has a process of its own, in which one function is replaced by the plain one, or one choice of `Kernels`.
All have one thread and are measured in its CPU time, so that other programs on the machine matter little. A figure is
the median over rounds of the time without the technique over the time with it: 1.10 means that leaving it out costs a
tenth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from pointsman.experts.cpu import decode, dense, function, permute, sparse
from pointsman.ops import allocator, dots, gemm
from pointsman.ops.kernels import Kernels
from tools.bench.cases import DECODING, TRAINING, Case
from tools.bench.process import Process
from tools.bench.worker import Worker, serve


def put(value: Any, *places: tuple[Any, str]) -> None:
    for module, name in places:
        setattr(module, name, value)


def unfused(products: type) -> None:
    """A rectified product in two calls."""
    whole: Callable[..., torch.Tensor] = products.linear  # type: ignore[attr-defined]

    def linear(self: Any, rows: Any, weight: Any, bias: Any = None, relu: bool = False, out: Any = None) -> Any:
        output = whole(self, rows, weight, bias, out=out)
        return output.relu_() if relu else output

    put(linear, (products, "linear"))


class Never(int):
    """A k that never equals E."""

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def permuted() -> None:
    """k = E like any other k."""
    given = function.assignments_of_tokens
    put(
        lambda expert: (found := given(expert))._replace(per_token=Never(found.per_token)),
        (function, "assignments_of_tokens"),
    )


WITHOUT: dict[str, Callable[[], object]] = {
    "recycled_gradients": lambda: put(torch.empty_like, (function, "empty_gradient")),
    "buckets": lambda: put(lambda rows: rows, (permute, "bucket")),
    "groups": lambda: put(lambda *_: None, (function, "grouping")),
    "dense": permuted,
    "chunks": lambda: put(lambda tokens, *_: [slice(0, tokens)], (dense, "_chunks")),
    "divisible": lambda: put(
        lambda weight: (torch.ones_like(weight), weight), (sparse, "divisible"), (dense, "divisible")
    ),
    "fused_relu": lambda: [unfused(products) for products in (gemm.BlasRelu, gemm.OneDNN)],
    "dots_in_backward": lambda: put(lambda left, right: (left * right).sum(-1), (dots, "each")),
    "decode": lambda: put(0, (decode, "MOST")),
    "decode_all": lambda: put(lambda *_: False, (decode, "_all_suits")),
    "decode_dots": lambda: put(lambda: False, (dots, "works")),
    "decode_batched": lambda: put(lambda *_: False, (decode, "_batched_suits")),
    "decode_grouped": lambda: put(lambda *_: False, (decode, "_grouped_suits")),
    "keep_freed_memory": allocator.keep_freed_memory,  # the one that is added
}
WITH = "with"


def work(pipe: Connection) -> None:
    """A worker of the layer's benchmark, without one technique."""
    variant, kernels = pipe.recv()
    if variant in WITHOUT:
        WITHOUT[variant]()
    elif variant != WITH:
        kernels = replace(kernels, **dict([variant.split("=")]))
    torch.set_num_threads(1)
    put(lambda _: time.process_time(), (Worker, "_now"))
    build = Worker.__init__
    put(lambda self, name, case, _: build(self, name, case, kernels), (Worker, "__init__"))
    pipe.send({})
    serve(pipe)


def measure(case: Case, variants: list[str], rounds: int, kernels: Kernels, warm: float) -> None:
    """Prints the case and a line for each variant."""
    processes = [Process(name, work) for name in (WITH, *variants)]
    times: dict[str, list[float]] = {process.name: [] for process in processes}
    try:
        for process in processes:
            for request in ((process.name, kernels), ("build", ["pointsman", case, None]), ("warm", warm)):
                answer = process.ask(*request)
                if "error" in answer:
                    raise SystemExit(f"{process.name}: {answer['error']}")
        for turn in range(rounds):
            for process in processes:
                times[process.name].append(process.ask("measure", 10 * turn)["total"])
    finally:
        for process in processes:
            process.close()
    base = times[WITH]
    print(f"{case.label}: {1e3 * statistics.median(base):.2f} ms")
    for name in variants:
        ratios = sorted(one / other for one, other in zip(times[name], base, strict=True))
        quarter = len(ratios) // 4
        middle = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        print(f"  {name:20} {statistics.median(ratios):.2f}   (the middle half: {middle})")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=sorted({case.name for case in (*TRAINING, *DECODING)}))
    parser.add_argument("--without", required=True, help=f"{', '.join(WITHOUT)}, or KERNEL=VALUE")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    sizes = ("tokens", "k", "dim", "hidden_dim", "num_experts")
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--gemm", choices=("blas", "onednn"), default="blas")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warm", type=float, default=6.0, help="seconds at most")
    given = parser.parse_args()
    case = next(case for case in (*TRAINING, *DECODING) if case.name == given.case)
    changes = {name: value for name in (*sizes, "dtype") if (value := getattr(given, name)) is not None}
    measure(replace(case, **changes), given.without.split(","), given.rounds, Kernels(gemm=given.gemm), given.warm)


if __name__ == "__main__":
    main()
