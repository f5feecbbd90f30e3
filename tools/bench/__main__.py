"""Measures the MoE layer against the dense limit and other libraries: python -m tools.bench, or `make bench`.

Peers are measured where they are installed: pip install -e 'packages/pointsman-lab[bench]'

examples:
  python -m tools.bench --quick
  python -m tools.bench --case decode,decode-small
  python -m tools.bench --case routers
  python -m tools.bench --peers 'transformers grouped_mm,transformers eager' --out runs/bench

cases, as tokens x width, hidden units, experts, k: a 11264 x 256, 512, 16, 2 (and fewer tokens, other k); b 4096 x 352,
352, 16, 2; c 2048 x 768, 3072, 32, 1; decode: 1, 4 and 32 tokens x 1024, 2048, 64, 8; decode-small the same x 256, 512,
16, 2; routers, the share of each in configuration a; on a GPU (--device cuda) instead: gpu, 32768 tokens x 1024 and
2048, twice and four times as many hidden units, 16 and 64, 2 and 8, in bf16 (one of them:
gpu-1024x2048-e16-k2); and steps, training steps of HyperRouter's small Transformer-XL: eager, compiled, as CUDA graphs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.cli.options import choose_device, number_from, words
from tools.bench import report
from tools.bench.cases import NAMES, cases, router_cases, steps
from tools.bench.implementations import IMPLEMENTATIONS, OWN
from tools.bench.run import run


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the tables and writes them.

    Raises:
        RunError: a case or a peer that is not known, not installed, or not measured so.
    """
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="about a minute: case a, and decoding of one token")
    flags.add_argument("--case", type=words, metavar="A,B", help="only these cases (above)")
    flags.add_argument(
        "--peers", type=words, metavar="A,B", help="only these peers, or `none` (default: all installed)"
    )
    flags.add_argument(
        "--seconds",
        type=number_from(0.0, name="seconds"),
        default=math.inf,
        metavar="N",
        help="begin no further measurement after N seconds; the report names what is left",
    )
    flags.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, … (default: cuda if there is one)")
    flags.add_argument(
        "--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="layer.md, layer.json and layer.svg go here"
    )
    values = flags.parse_args(arguments)
    peers = [] if values.peers == ["none"] else values.peers
    allowed = [name for name in IMPLEMENTATIONS if name not in OWN]
    for name in peers or ():
        if name not in allowed:
            raise RunError(f"--peers {name!r}: {did_you_mean(name, allowed)}")
        if not IMPLEMENTATIONS[name].installed:
            raise RunError(f"--peers {name!r}: the package {IMPLEMENTATIONS[name].package} is not installed")
    device = choose_device(values.device)
    for name in values.case or ():
        if name not in NAMES:
            raise RunError(f"--case {name!r}: {did_you_mean(name, NAMES)}")
    wanted = cases(device, values.quick, values.case) or steps(device, values.quick, values.case)
    if not wanted and not router_cases(device, values.case):
        raise RunError(f"--case {','.join(values.case)!r}: not measured on {device!r}, or not with --quick")
    announce = partial(print, file=sys.stderr, flush=True)
    benchmark = run(device, values.quick, peers, values.case, announce, values.seconds)
    written = report.write(benchmark, values.out)
    print(written[0].read_text(encoding="utf-8"))
    print("written: " + ", ".join(map(str, written)), file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
