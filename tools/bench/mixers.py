"""What tokens informing each other costs, and how far it reaches.

    python -m tools.bench.mixers time             whole model, forward and backward, over the bare router
    python -m tools.bench.mixers memory           peak memory of one mixer at 1k, 2k, 4k and 8k tokens
    python -m tools.bench.mixers neighbours       S[i, i] and the effective number of neighbours, by source and tau

The shape of `time` is Mutual-Inform's medium model (6 layers, dim 352, 16 experts, k 2, 512 tokens) without its output
layer, which would hide the mixers; `--output` adds one of 267,735 words and takes the forward pass alone, as the paper
does. Run it on a machine that does nothing else; `--out FILE` keeps the seconds of every turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from pointsman import AttentionTrace, RoutingContext, build_router, step_end
from pointsman._files import write_whole
from pointsman.ops.visible import Visible
from pointsman.routers.mutual.mixers import AttentionInform
from pointsman.routers.mutual.posterior import head_entropies
from pointsman.routers.mutual.token_mixer import Neighbours, TokenMixer
from pointsman.testing.peak import peak_bytes
from pointsman_lab.models.blocks import RelativeAttention, RelativeContext
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.registry import preset_config
from tools.bench.report import machine

SPECS = ("smoe", "smoe+similarity", "smoe+attention")
WORDS = 267_735


def kept_bytes(run: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes that the graph of `run` keeps for backward, parameters apart, each storage once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = run()
    total = sum(kept.values())
    del alive
    return total


def whole_model(args: argparse.Namespace) -> None:
    vocabulary = WORDS if args.output else 256
    device = torch.device(args.device)
    models = {
        spec: TransformerXL(preset_config("mutual-medium", vocabulary, router=spec)).to(device).train()
        for spec in SPECS
    }
    seconds: dict[str, list[float]] = {spec: [] for spec in SPECS}
    memories = {}
    for spec, model in models.items():
        memories[spec] = None
        if args.memory:
            with torch.no_grad():
                tokens = torch.randint(vocabulary, (args.batch, args.memory), device=device)
                memories[spec] = model(tokens, tokens, memory_length=args.memory).memory

    def forward(spec: str, tokens: Tensor) -> Tensor:
        output = models[spec](tokens, None if args.output else tokens, memories[spec], memory_length=args.memory)
        return output.logits if args.output else output.hidden

    # on one thread the processor's time, which other programs do not lengthen
    clock = time.thread_time if args.threads == 1 and device.type == "cpu" else time.perf_counter

    def once(spec: str, tokens: Tensor) -> float:
        models[spec].zero_grad()
        wait(device)
        start = clock()
        if args.output:
            with torch.no_grad():
                forward(spec, tokens)
        else:
            forward(spec, tokens).square().mean().backward()
        wait(device)
        spent = clock() - start
        step_end(models[spec])
        return spent

    for repeat in range(args.repeats + 1):
        torch.manual_seed(repeat)
        tokens = torch.randint(vocabulary, (args.batch, args.length), device=device)
        for spec in SPECS:
            spent = once(spec, tokens)
            if repeat:  # the first warms up
                seconds[spec].append(spent)
    what = "forward, with output layer" if args.output else "forward and backward, no output layer"
    bare_kept = bare_peak = 0
    print(f"{what}; {args.batch} x {args.length} tokens, memory {args.memory}, {torch.get_num_threads()} thread(s)")
    for spec in SPECS:
        pairs = [mine / bare for mine, bare in zip(seconds[spec], seconds[SPECS[0]], strict=True)]
        least = min(seconds[spec]) / min(seconds[SPECS[0]])
        line = f"{spec:18} {1e3 * min(seconds[spec]):9.1f} ms   x {least:.3f}   paired {statistics.median(pairs):.3f}"
        if not args.output:
            kept = kept_bytes(lambda spec=spec: forward(spec, tokens), models[spec])
            peak = peak_bytes(lambda spec=spec: forward(spec, tokens).square().mean().backward())
            bare_kept, bare_peak = bare_kept or kept, bare_peak or peak
            line += f"   kept for backward {kept / 2**20:7.1f} MB x {kept / bare_kept:.3f}"
            line += f"   peak {peak / 2**20:7.1f} MB x {peak / bare_peak:.3f}"
        print(line, flush=True)
    if args.out:
        command = f"python -m tools.bench.mixers {' '.join(sys.argv[1:])}"
        write_whole(args.out, json.dumps({"machine": machine(), "command": command, "seconds": seconds}, indent=1))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def attended(hidden: Tensor, heads: int = 8) -> AttentionTrace:
    """The trace of one relative attention over `hidden` [B, T, dim]."""
    batch, length, dim = hidden.shape
    attention = RelativeAttention(dim, heads, dim // heads, dropout=0.0)
    biases = torch.randn(2, heads, dim // heads)
    trace = attention(
        hidden, hidden.new_zeros(batch, 0, dim), RelativeContext(torch.randn(length, dim), *biases), True
    )[1]
    assert trace is not None
    return trace


def memory(args: argparse.Namespace) -> None:
    dim = 352
    print(f"peak memory of the router in MB, forward and backward, 1 sequence, dim {dim}, 16 experts")
    for spec in (*SPECS, "smoe+attention:heads=all", "smoe+similarity:neighbours=lower-entropy"):
        router, peaks = build_router(spec, dim=dim, num_experts=16), []
        for length in (1024, 2048, 4096, 8192):
            hidden = torch.randn(1, length, dim, requires_grad=True)
            context = RoutingContext(attention=attended(hidden) if "attention" in spec else None)
            peaks.append(peak_bytes(lambda r=router, h=hidden, c=context: r(h, c).weights.square().sum().backward()))
        grown = "  ".join(f"{peak / 2**20:8.1f}" for peak in peaks)
        print(f"{spec:34} {grown}   8k over 1k: {peaks[-1] / peaks[0]:.2f}", flush=True)


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
            found = [measured(mixer, hidden, context) for hidden, context in pairs]
            own, effective = (torch.stack([getattr(each, name) for each in found]) for name in ("own", "effective"))
            line += f" {own.mean():10.5f} {effective.mean():11.2f}  "
        print(line, flush=True)


def measured(mixer: TokenMixer, hidden: Tensor, context: RoutingContext) -> Neighbours:
    """Of one layer; the head of lowest entropy is that of this text."""
    if isinstance(mixer, AttentionInform) and context.attention is not None:
        visible = Visible(hidden.shape[1], context.attention.key.shape[2])
        mixer.head_entropy = head_entropies(context.attention, visible, sample=False)[0].sum(0)
    return mixer.neighbours(torch.full((*hidden.shape[:2], 16), 1 / 16), hidden, context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "neighbours"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--memory", type=int, default=0, help="time: positions of memory before the tokens")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", action="store_true", help="time: with the paper's output layer, forward only")
    parser.add_argument("--out", type=Path, help="time: a file for the seconds of every turn")
    parser.add_argument("--run", help="neighbours: a run directory instead of initial weights")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"time": whole_model, "memory": memory, "neighbours": neighbours}[args.what](args)


if __name__ == "__main__":
    main()
