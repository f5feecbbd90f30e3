"""Measures the MoE layer against its limit and its peers: python -m tools.bench, or `make bench`.

Peers are measured where they are installed: pip install -e 'packages/pointsman-lab[bench]'

examples:
  OMP_NUM_THREADS=1 python -m tools.bench
  python -m tools.bench --case decode,decode-small --peers 'eight lines,eight lines as nn.Linear'
  python -m tools.bench --case routers

cases, as tokens x width, hidden units, experts, k: small 1024 x 128, 128, 8, 2; a 11264 x 256, 512, 16, 2 (and 2048
tokens, other k); b 4096 x 352, 352, 16, 2; c 2048 x 768, 3072, 32, 1; fine 4096 x 512, 192, 128, 8; decode: 1, 4 and 32
tokens x 1024, 2048, 64, 8; decode-small the same x 256, 512, 16, 2; routers, each one's share of the layer in a; on a
GPU (--device cuda) instead: gpu, 32768 tokens x 1024 and 2048, twice and four times as many hidden units, 16 and 64
experts, k 2 and 8, in bf16.
"""

import argparse
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from pointsman._errors import RunError, did_you_mean
from pointsman.routers.frame.registry import build_router, list_routers
from pointsman.routing import RoutingContext
from pointsman_lab._grid import NONE, Grid
from pointsman_lab.cli.options import choose_device, whole, words
from tools.bench.peers import IMPLEMENTATIONS, LIMIT, OWN, Case, Layer
from tools.bench.turns import Call, drawn, kept_bytes, measured, page, ratio

A = Case("a", 11264, 256, 512, 16, 2)
ON_CPU = (
    Case("small", 1024, 128, 128, 8, 2),
    A,
    replace(A, tokens=2048),
    replace(A, k=16),
    Case("b", 4096, 352, 352, 16, 2),
    Case("c", 2048, 768, 3072, 32, 1),
    Case("fine", 4096, 512, 192, 128, 8),
    *(Case("decode", tokens, 1024, 2048, 64, 8, train=False) for tokens in (1, 4, 32)),
    *(Case("decode-small", tokens, 256, 512, 16, 2, train=False) for tokens in (1, 4, 32)),
)
ON_GPU = tuple(
    Case("gpu", 32768, dim, factor * dim, num_experts, k, "bfloat16", device="cuda")
    for dim, factor, num_experts, k in product((1024, 2048), (2, 4), (16, 64), (2, 8))
)
HALF = ("small", "decode", "decode-small")  # also in bf16, which few CPUs have units for
ROUTERS = "routers"
NAMES = tuple(dict.fromkeys([*(case.name for case in (*ON_CPU, *ON_GPU)), ROUTERS]))
VOCABULARY = 256
ROUNDS, SECONDS = 101, 5.0  # of a case, at most


def cases(device: str, names: Collection[str] | None = None) -> list[Case]:
    """The cases for a device, on a CPU a few in bf16, too; only those in `names` if given."""
    if device != "cpu":
        chosen = [replace(case, device=device) for case in ON_GPU]
    else:
        chosen = [*ON_CPU, *(replace(case, dtype="bfloat16") for case in ON_CPU if case.name in HALF)]
    return [case for case in chosen if names is None or case.name in names]


def called(case: Case, layer: Layer, *, train: bool) -> Call:
    """A call on new tokens, in training with backward."""
    dtype = getattr(torch, case.dtype)

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randn(case.tokens, case.dim, generator=generator, device=case.device).to(dtype)

    hidden = drawn(draw, case.device)

    def call() -> None:
        with torch.set_grad_enabled(train):
            output = layer(hidden().requires_grad_(train))
            if train:
                output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]

    return call


def compared(case: Case, peers: Collection[str] | None, rounds: int | None = None) -> Grid:
    """One case, a line for each implementation: time, time over the limit's, our speed over it, memory kept."""
    calls: dict[str, Call] = {}
    kept: dict[str, float] = {}
    for name, one in IMPLEMENTATIONS.items():
        if not one.installed or not one.suits(case) or not (name in OWN or peers is None or name in peers):
            continue
        torch.manual_seed(0)
        with torch.device(case.device):
            layer, module = one.build(case)
        module.to(case.device, getattr(torch, case.dtype)).train(case.train)
        calls[name] = called(case, layer, train=case.train and name != LIMIT)
        if case.train and name != LIMIT:
            hidden = torch.randn(case.tokens, case.dim, device=case.device).to(getattr(torch, case.dtype))
            known = [*module.parameters(), *module.buffers(), hidden]
            kept[name] = kept_bytes(partial(layer, hidden.requires_grad_()), known) / 2**20
    times = measured(calls, rounds or ROUNDS, SECONDS)
    if case.train:
        times[LIMIT] = [3 * seconds for seconds in times[LIMIT]]  # backward takes twice as many products as forward
    rows = []
    for name, own in times.items():
        speed = [f"{ratio(times[one], own):.2f}" if one in times else NONE for one in (LIMIT, "pointsman")]
        memory = f"{kept[name]:.1f}" if name in kept else NONE
        rows.append([name, f"{1e3 * statistics.median(own):.2f}", *speed, memory])
    header = [case.label, "ms", "over the limit", "over pointsman", "kept MiB"]
    return Grid(header, rows, code=False).without_empty_columns(keep=4)  # nothing is kept without a backward


def shares(case: Case, specs: Sequence[str], rounds: int | None = None) -> Grid:
    """Of each router forward and backward with its losses, over the whole layer with `smoe`.

    Tokens are in sequences of 512, or in one shorter one, with token ids and a state of the layer below where the
    router reads them.
    """
    layer = IMPLEMENTATIONS["pointsman"].build(case)[0]
    calls: dict[str, Call] = {"layer": called(case, layer, train=True)}
    length = 512 if case.tokens % 512 == 0 else case.tokens

    def router_call(spec: str) -> Call:
        router = build_router(spec, dim=case.dim, num_experts=case.num_experts, top_k=case.k, vocab_size=VOCABULARY)
        batch = drawn(lambda generator: torch.randn(case.tokens // length, length, case.dim, generator=generator))

        def call() -> None:
            hidden: Tensor = batch().requires_grad_()
            below = {name: hidden.detach()[..., :1].expand(*hidden.shape[:2], width).contiguous()
                     for name, width in router.score.below.items()}  # fmt: skip
            ids = (hidden.detach()[..., 0].abs() * 1000).long() % VOCABULARY
            routing = router(hidden, RoutingContext(token_ids=ids, below=below))
            results = [routing.weights, *routing.combine.weights().values(), *routing.losses.values()]
            results = [result for result in results if result.requires_grad]
            if results:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])

        return call

    times = measured(calls | {spec: router_call(spec) for spec in specs}, rounds or 9)
    rows = [[spec, f"{ratio(times['layer'], times[spec]):.1%}"] for spec in specs]
    return Grid([f"router, {case.label}", "of the layer"], rows, code=False)


def chosen_peers(names: Sequence[str] | None) -> Sequence[str] | None:
    """The peers that were asked for; None: all that are installed."""
    if names == ["none"]:
        return []
    allowed: Mapping[str, object] = {name: one for name, one in IMPLEMENTATIONS.items() if name not in OWN}
    for name in names or ():
        if name not in allowed:
            raise RunError(f"--peers {name!r}: {did_you_mean(name, allowed)}")
        if not IMPLEMENTATIONS[name].installed:
            raise RunError(f"--peers {name!r}: the package {IMPLEMENTATIONS[name].package} is not installed")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--case", type=words, metavar="A,B", help="only these cases (above)")
    flags.add_argument("--peers", type=words, metavar="A,B", help="only these peers, or `none` (default: all)")
    flags.add_argument("--rounds", type=whole(1), metavar="N", help="of each case")
    flags.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, … (default: cuda if there is one)")
    flags.add_argument("--out", type=Path, metavar="FILE.md", help="write the tables to this file, too")
    values = flags.parse_args(arguments)
    peers, device = chosen_peers(values.peers), choose_device(values.device)
    for name in values.case or ():
        if name not in NAMES:
            raise RunError(f"--case {name!r}: {did_you_mean(name, NAMES)}")
    wanted = cases(device, values.case)
    routers = device == "cpu" and (values.case is None or ROUTERS in values.case)
    if not wanted and not routers:
        raise RunError(f"--case {','.join(values.case)!r}: not measured on {device!r}")
    grids = []
    for case in wanted:
        print(case.label, file=sys.stderr, flush=True)
        grids.append(compared(case, peers, values.rounds))
    if routers:
        grids.append(shares(A, list_routers(), values.rounds))
    given = sys.argv[1:] if arguments is None else arguments
    page(" ".join(["python -m tools.bench", *given]), grids, values.out)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
