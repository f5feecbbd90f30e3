"""What tokens informing each other costs: the whole model, forward and backward, over the bare router.

    python -m tools.bench.mixers time

The shape is Mutual-Inform's medium model (6 layers, dim 352, 16 experts, k 2, 512 tokens) without its output layer,
which would hide the mixers; `--output` adds one of 267,735 words and takes the forward pass alone, as the paper does.
`--out FILE` keeps the seconds of every turn; OMP_NUM_THREADS=1 for the processor time of one thread.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pointsman import step_end
from pointsman_lab._files import write_whole
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.registry import preset_config
from tools.bench.peak import peak_bytes
from tools.bench.turns import Call, drawn, kept_bytes, machine, measured, ratio

SPECS = ("smoe", "smoe+similarity", "smoe+attention")
WORDS, LENGTH = 267_735, 512


def whole_model(args: argparse.Namespace) -> None:
    vocabulary = WORDS if args.output else 256
    shapes = {spec: preset_config("mutual-medium", vocabulary, router=spec) for spec in SPECS}
    models = {spec: TransformerXL(shape).train() for spec, shape in shapes.items()}

    def forward(spec: str, tokens: Tensor) -> Tensor:
        output = models[spec](tokens, None if args.output else tokens)
        found: Tensor = output.logits if args.output else output.hidden
        return found

    def whole(spec: str, tokens: Tensor) -> None:
        with torch.set_grad_enabled(not args.output):
            found = forward(spec, tokens)
        if not args.output:
            found.square().mean().backward()  # type: ignore[no-untyped-call]

    def call(spec: str) -> Call:
        shape = args.batch, LENGTH
        batch = drawn(lambda generator: torch.randint(vocabulary, shape, generator=generator))

        def once() -> None:
            models[spec].zero_grad()
            whole(spec, batch())
            step_end(models[spec])

        return once

    seconds = measured({spec: call(spec) for spec in SPECS}, args.repeats)
    what = "forward, with output layer" if args.output else "forward and backward, no output layer"
    print(f"{what}; {args.batch} x {LENGTH} tokens, {torch.get_num_threads()} thread(s)")
    tokens = torch.randint(vocabulary, (args.batch, LENGTH))
    bare_kept = bare_peak = 0
    for spec in SPECS:
        least = min(seconds[spec]) / min(seconds[SPECS[0]])
        paired = 1 / ratio(seconds[spec], seconds[SPECS[0]])
        line = f"{spec:18} {1e3 * min(seconds[spec]):9.1f} ms   x {least:.3f}   paired {paired:.3f}"
        if not args.output:
            kept = kept_bytes(partial(forward, spec, tokens), list(models[spec].parameters()))
            peak = peak_bytes(partial(whole, spec, tokens))
            bare_kept, bare_peak = bare_kept or kept, bare_peak or peak
            line += f"   kept for backward {kept / 2**20:7.1f} MB x {kept / bare_kept:.3f}"
            line += f"   peak {peak / 2**20:7.1f} MB x {peak / bare_peak:.3f}"
        print(line, flush=True)
    if args.out:
        command = f"python -m tools.bench.mixers {' '.join(sys.argv[1:])}"
        write_whole(args.out, json.dumps({"machine": machine(), "command": command, "seconds": seconds}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time",))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", action="store_true", help="with the paper's output layer, forward only")
    parser.add_argument("--out", type=Path, help="a file for the seconds of every turn")
    whole_model(parser.parse_args())


if __name__ == "__main__":
    main()
