"""What tokens informing each other costs, and how far it reaches.

    python -m tools.bench.mixers time             whole model, forward and backward, over the bare router
    python -m tools.bench.mixers neighbours       S[i, i] and the effective number of neighbours, by source and tau

The shape of `time` is Mutual-Inform's medium model (6 layers, dim 352, 16 experts, k 2, 512 tokens) without its output
layer, which would hide the mixers; `--output` adds one of 267,735 words and takes the forward pass alone, as the paper
does. `--out FILE` keeps the seconds of every turn; OMP_NUM_THREADS=1 for the processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pointsman import RoutingContext, build_router, step_end
from pointsman._files import write_whole
from pointsman.ops.visible import Visible
from pointsman.routers.mutual.mixers import AttentionInform
from pointsman.routers.mutual.posterior import head_entropies
from pointsman.routers.mutual.token_mixer import Neighbours, TokenMixer
from pointsman.testing.peak import peak_bytes
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.registry import preset_config
from tools.bench.turns import Call, drawn, kept_bytes, machine, measured, ratio

SPECS = ("smoe", "smoe+similarity", "smoe+attention")
WORDS = 267_735


def whole_model(args: argparse.Namespace) -> None:
    vocabulary = WORDS if args.output else 256
    models = {
        spec: TransformerXL(preset_config("mutual-medium", vocabulary, router=spec)).train() for spec in SPECS
    }  # fmt: skip

    def forward(spec: str, tokens: Tensor) -> Tensor:
        output = models[spec](tokens, None if args.output else tokens)
        found: Tensor = output.logits if args.output else output.hidden
        return found

    def backward(spec: str, tokens: Tensor) -> None:
        forward(spec, tokens).square().mean().backward()  # type: ignore[no-untyped-call]

    def call(spec: str) -> Call:
        shape = args.batch, args.length
        batch = drawn(lambda generator: torch.randint(vocabulary, shape, generator=generator))

        def once() -> None:
            models[spec].zero_grad()
            if args.output:
                with torch.no_grad():
                    forward(spec, batch())
            else:
                backward(spec, batch())
            step_end(models[spec])

        return once

    seconds = measured({spec: call(spec) for spec in SPECS}, args.repeats)
    what = "forward, with output layer" if args.output else "forward and backward, no output layer"
    print(f"{what}; {args.batch} x {args.length} tokens, {torch.get_num_threads()} thread(s)")
    tokens = torch.randint(vocabulary, (args.batch, args.length))
    bare_kept = bare_peak = 0
    for spec in SPECS:
        least = min(seconds[spec]) / min(seconds[SPECS[0]])
        paired = 1 / ratio(seconds[spec], seconds[SPECS[0]])
        line = f"{spec:18} {1e3 * min(seconds[spec]):9.1f} ms   x {least:.3f}   paired {paired:.3f}"
        if not args.output:
            kept = kept_bytes(partial(forward, spec, tokens), list(models[spec].parameters()))
            peak = peak_bytes(partial(backward, spec, tokens))
            bare_kept, bare_peak = bare_kept or kept, bare_peak or peak
            line += f"   kept for backward {kept / 2**20:7.1f} MB x {kept / bare_kept:.3f}"
            line += f"   peak {peak / 2**20:7.1f} MB x {peak / bare_peak:.3f}"
        print(line, flush=True)
    if args.out:
        command = f"python -m tools.bench.mixers {' '.join(sys.argv[1:])}"
        write_whole(args.out, json.dumps({"machine": machine(), "command": command, "seconds": seconds}, indent=1))


def neighbours(args: argparse.Namespace) -> None:
    """On the model at its initial weights, or on a run's model; the text is Python's own `argparse` module."""
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    if args.run:
        from pointsman_lab.training.run import load_run

        run = load_run(args.run)
        model = run.model
        stream = torch.as_tensor(run.vocabulary.encode(text.decode()))
    else:
        torch.manual_seed(0)
        model = TransformerXL(preset_config("mutual-medium", 256)).eval()
        stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    tokens = stream[: args.batch * args.length].long().view(args.batch, args.length)
    inputs: list[tuple[Tensor, RoutingContext]] = []
    handles = []
    for module in model.modules():
        if getattr(module, "role", None) == "router":
            module.needs = frozenset({"attention"})  # so that the model traces its attention
            handles.append(module.register_forward_pre_hook(lambda m, given: inputs.append((given[0], given[1]))))
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    dim = inputs[0][0].shape[-1]
    independent = [
        (torch.nn.functional.layer_norm(torch.randn(args.batch, args.length, dim), (dim,)), RoutingContext())
    ]
    print(
        f"{args.run or 'initial weights'}; {args.batch} x {args.length} tokens, dim {dim}; means over tokens and layers"
    )
    print(f"{'':36}{'the text':^22}  {'independent tokens':^22}")
    print(f"{'mixer':34} {'S[i,i]':>10} {'neighbours':>11}   {'S[i,i]':>10} {'neighbours':>11}")
    options = [
        *(f"similarity:source=unit:tau={tau}" for tau in (0.01, 0.1, 1)),
        *(f"similarity:source=input:tau={tau:.4g}" for tau in (0.1, 1, 2, dim**0.5, 100)),
        *(f"similarity:source=attention:tau={tau:.4g}" for tau in (0.1, 1, 2, dim**0.5)),
        *(f"attention:sigma={sigma:.4g}" for sigma in (0.1, 1, 2, dim**0.5)),
        *(f"attention:sigma={sigma}" for sigma in (30, 100)),
        *(f"attention:factor=one:sigma={sigma:.4g}" for sigma in (1, 2, dim**0.5, 30)),
        *(f"attention:heads=all:sigma={sigma:.4g}" for sigma in (1,)),
    ]
    for spec in options:
        mixer = build_router(spec, dim=dim, num_experts=16).mix
        assert isinstance(mixer, TokenMixer)
        line = f"{spec:34}"
        for pairs in (inputs, independent):
            if pairs is independent and mixer.needs:
                break
            found = [neighbours_of(mixer, hidden, context) for hidden, context in pairs]
            own, effective = (torch.stack([getattr(each, name) for each in found]) for name in ("own", "effective"))
            line += f" {own.mean():10.5f} {effective.mean():11.2f}  "
        print(line, flush=True)


def neighbours_of(mixer: TokenMixer, hidden: Tensor, context: RoutingContext) -> Neighbours:
    """Of one layer; the head of lowest entropy is that of this text."""
    if isinstance(mixer, AttentionInform) and context.attention is not None:
        visible = Visible(hidden.shape[1], context.attention.key.shape[2])
        mixer.head_entropy = head_entropies(context.attention, visible, sample=False)[0].sum(0)
    return mixer.neighbours(torch.full((*hidden.shape[:2], 16), 1 / 16), hidden, context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "neighbours"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", action="store_true", help="time: with the paper's output layer, forward only")
    parser.add_argument("--out", type=Path, help="time: a file for the seconds of every turn")
    parser.add_argument("--run", help="neighbours: a run directory instead of initial weights")
    args = parser.parse_args()
    {"time": whole_model, "neighbours": neighbours}[args.what](args)


if __name__ == "__main__":
    main()
