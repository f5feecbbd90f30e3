"""`pointsman trace diff A B`, `pointsman trace place A`: what is between two recorded routings, and what one costs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pointsman_lab._files import write_whole
from pointsman_lab._grid import Grid, formatted
from pointsman_lab.cli.options import Parser, action_of, whole

ACTIONS = {
    "diff": "say where two traces differ, and which kind of fault explains it",
    "place": "simulate experts over devices, and a cache of hot experts",
}
USAGE = """usage: pointsman trace diff A B [--margins]
       pointsman trace place A [--devices 8] [--spare 0] [--cache N]

actions:
{actions}

A trace is a file of `record_routing(model).save(path)`; docs/traces.md has the
format and the readers for vLLM, SGLang, Megatron-core and llama.cpp.
"""


def parser(action: str) -> Parser:
    flags = Parser(f"trace {action}", f"{ACTIONS[action][0].upper()}{ACTIONS[action][1:]}.")
    flags.add("first A", "a routing trace", type=Path)
    if action == "diff":
        flags.add("second B", "the routing of the same text elsewhere", type=Path)
        told = "also show how many tokens flip at each margin, and how many the logits' noise predicts"
        flags.add("--margins", told, action="store_true")
    else:
        flags.add("--devices N", "devices for a layer's experts (8)", type=whole(2), default=8)
        flags.add("--spare N", "places for copies of experts (0)", type=whole(0), default=0)
        flags.add("--batch-size N", "tokens at once (1024)", type=whole(1), default=1024)
        flags.add("--cache N", "experts of a layer that fit in fast memory", type=whole(1))
    flags.common("a folder for the result, as trace.json", settings="")
    return flags


def run(words: Sequence[str]) -> int:
    action = action_of("trace", words, ACTIONS, USAGE)
    if action is None:
        return 0
    values = parser(action).read(words[1:])
    from pointsman.traces import RoutingTrace
    from pointsman_lab.traces import compare, flips
    from pointsman_lab.traces.placement import cache, place

    first, told = RoutingTrace.load(values.first), list[str]()
    if action == "diff":
        found = compare(first, RoutingTrace.load(values.second))
        told.append(f"{first.tokens:,} tokens, {len(first.lengths)} sequences, {len(first.layers)} layers")
        told.append("\n".join(f"- {kind}" for kind in found.kinds) or "the traces are equal")
        if not found.equal:
            told.append(f"other experts: {found.before:.2%} of tokens and layers; with this undone {found.after:.2%}\n")
            rows = [
                [name, f"{one.differing:.2%}", formatted(one.predicted, ".2%"), formatted(one.margin, ".3g"),
                 formatted(one.margin_differing, ".3g")]
                for name, one in found.layers.items()
            ]  # fmt: skip
            told.append(Grid(["layer", "other experts", "predicted", "margin", "where other"], rows).text())
            told.append("margin: last chosen logit minus the next; mean, and that of other experts")
        result = found.to_dict()
        if values.margins:
            result["margins"] = flips(*found.undone)
            told.append(f"\n{_flips(result['margins'])}")
    else:
        cached = cache(first, values.cache) if values.cache else {}
        placed = place(first, values.devices, spare=values.spare, batch=values.batch_size)
        batch = min(values.batch_size, first.tokens - first.tokens // 2)  # as `place` takes them
        told.append(f"largest load of a device over the mean, {values.devices} devices, batches of {batch:,} tokens")
        told.append(_by_layer(placed, "{:.3f}"))
        if cached:
            told.append(f"\nshare of choices found in a cache of {values.cache} experts a layer")
            told.append(_by_layer(cached, "{:.1%}"))
        result = {"placement": placed, "cache": cached}
    if values.out:
        write_whole(values.out / "trace.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    print("\n".join(told))  # last: whoever reads it may have enough of it
    return 0


def _flips(found: Sequence[Mapping[str, float]]) -> str:
    rows = [
        [f"{one['low']:.2f} to {one['high']:.2f}", f"{one['tokens']:,}", f"{one['flipped']:.2%} ± {one['error']:.2%}",
         f"{one['predicted']:.2%}"]
        for one in found
    ]  # fmt: skip
    header = ["margin, in the noise's deviations", "tokens", "other experts", "predicted"]
    return Grid(header, rows).text() if rows else "the logits are equal or not finite: nothing flips"


def _by_layer(found: Mapping[str, Mapping[str, float]], form: str) -> str:
    names = list(next(iter(found.values())))
    return Grid(["layer", *names], [[layer, *map(form.format, of.values())] for layer, of in found.items()]).text()
