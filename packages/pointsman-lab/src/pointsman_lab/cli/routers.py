"""`pointsman routers [NAME] [--cost]`: lists and explains the routers, and shows the cost of models."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from pointsman_lab._files import write_whole
from pointsman_lab._grid import Grid
from pointsman_lab._values import describe, written
from pointsman_lab.cli.options import Parser, whole
from pointsman_lab.cli.runs import counted_model
from pointsman_lab.registry import find_preset

EPILOG = """examples:
  pointsman routers
  pointsman routers hyperrouter
  pointsman routers --cost --preset small
  pointsman routers smoe:bias=false --cost --preset qwen3-30b-a3b
"""


def parser() -> Parser:
    flags = Parser("routers", "List the routers, explain one, or show what a model costs.", EPILOG)
    flags.add("name NAME", "a router, mixer or spec to explain, or to count with --cost", nargs="?")
    flags.add("--cost", "parameters by component, and inference FLOPs for every k", action="store_true")
    flags.add("--vocabulary V", "tokens, with --cost (default: the shape's own, or 204)", type=whole(1))
    flags.add("--preset", "the model's shape, with --cost (default: small)", default="small")
    told = "a setting of the model, with --cost, e.g. model.num_experts=32"
    flags.common("a folder for the text, as routers.txt", told)
    return flags


def run(words: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(words)
    if not values.cost:
        flags.without_effect(values, ("--preset", "--vocabulary", "--set"), "without --cost")
    text = cost(values, flags) if values.cost else explain_spec(values.name) if values.name else listing()
    if values.out:
        write_whole(values.out / "routers.txt", text + "\n")
    print(text if values.cost else "\n".join(wrapped(text.replace("\n    ", " ").splitlines())))
    return 0


def wrapped(lines: Sequence[str]) -> Iterator[str]:
    """The lines, those that are wider than the terminal over several: below their second column, if they have one."""
    width = shutil.get_terminal_size((120, 24)).columns
    for line in lines:
        column = re.match(r"  \S+ {2,}| *", line)
        below = " " * (column.end() if column and line.startswith("  ") else 4)
        yield textwrap.fill(line, width, subsequent_indent=below, break_on_hyphens=False) if len(line) > width else line


def listing() -> str:
    """All routers, mixers and baselines, a line each."""
    from pointsman.routers.frame.registry import BASELINES, entry, list_mixers, list_routers

    def lines(names: Sequence[str], prefix: str = "") -> list[str]:
        return [f"  {prefix + name:<20} {''.join(entry(name).summary.splitlines()[:1])}" for name in names]

    mixers = ["mixers, on any router that chooses by its scores: ROUTER+MIXER", *lines(list_mixers(), "+")]
    baselines = ["baselines without a router", *(f"  {name:<20} {text}" for name, text in BASELINES.items())]
    both = {name: entry(name).halves for name in list_routers() if has_halves(name)}
    own = ", ".join(name for name, (scores, _) in both.items() if scores != both["smoe"][0])
    best = ", ".join(name for name, (_, choice) in both.items() if choice == "The k best.")
    spec = (
        "a spec: scores[:option=value]*[@choice[:option=value]*][+mixer[:option=value]*]; A@B scores as A, chooses as B"
    )
    spec += f"\nas scores, NAME@…: {own} have their own; all others are a trained linear map W h + b"
    spec += f"\nas choice, …@NAME: by the lines above; {best} take the k best"
    spec += "\n`pointsman routers NAME` explains one, as scores and as choice"
    return "\n".join(["routers", *lines(list_routers()), "", *mixers, "", *baselines, "", spec])


def has_halves(name: str) -> bool:
    """Whether a router can stand before or after "@": one of another package with a selector of its own cannot."""
    from pointsman.routers.frame.registry import LayerSpec, entry

    found, layer = entry(name), LayerSpec(8, 4, 2, vocab_size=64, scores=name, choice=name)
    if found.choose is not None or found.build.__module__.startswith("pointsman."):
        return True
    with suppress(Exception):  # a router of another package that takes no layer so small
        return found.build(layer, **{one: option.default for one, option in found.of_scores.items()}).select is None
    return True


def explain_spec(spec: str) -> str:
    """`explain` of a name, or of the router and the mixer of a spec; "+similarity" is the mixer alone."""
    from pointsman.routers.frame.registry import build_router, format_spec, parse_spec

    if not any(sign in spec.removeprefix("+") for sign in ":+@"):
        return explain(spec.removeprefix("+"))
    parsed = parse_spec(spec)
    if parsed.choice is not None:  # whether these scores suit this choice
        scores = format_spec(parsed._replace(choice_options={}, mixer=None))
        build_router(scores, dim=16, num_experts=8, vocab_size=8)
    return "\n\n\n".join(explain(name) for name in (parsed.router, parsed.choice, parsed.mixer) if name is not None)


def explain(name: str) -> str:
    """A router's summary, its paper, and its options with types and defaults."""
    from pointsman.routers.frame.registry import BASELINES, COMMON, entry, list_mixers
    from pointsman.routers.frame.stages import NEEDS

    if name in BASELINES:
        return f"{name}\n\n{BASELINES[name]}"
    found = entry(name)
    mixer = name in list_mixers()
    defaults = {"balance": found.balance}

    def lines(options: dict[str, Any]) -> list[str]:
        shown = {key: (describe(of.annotation), written(defaults.get(key, of.default))) for key, of in options.items()}
        return [f"  {key:<18} {kind}; default {default}" for key, (kind, default) in shown.items()]

    own = lines(found.options) or ["  none of its own"]
    meanings = COMMON.summary.partition("\n\n")[2].splitlines()
    common = [] if mixer else ["", "options of every router", *lines(COMMON.options), "", *meanings]
    head = [f"+{name}" if mixer else name, "", found.summary, "", f"from: {found.paper}"]
    if not mixer and not has_halves(name):
        head += [f"neither {name}@… nor …@{name}: it has a selector of its own"]
    elif not mixer:
        scores, choice = found.halves
        needed = " or ".join(NEEDS[need] for need in found.needs.split("|"))
        head += [f"as scores, {name}@…: {scores}", f"as choice, …@{name}: {choice} Needs {needed}."]
    head += ["", "options"]
    return "\n".join([*head, *own, *common])


def cost(values: argparse.Namespace, flags: Parser) -> str:
    """Parameters by component and FLOPs for every k, of a preset with one router or with all of them."""
    from pointsman.routers.frame.registry import BASELINES, build_router, list_routers
    from pointsman_lab.models.cost import PAPERS, Protocol, cost_table

    counted, vocabulary = counted_model(flags, values, "cost", ("--vocabulary",))
    config: Any = counted.model
    own = find_preset(values.preset).get("router", "smoe")
    rest = [name for name in list_routers() if name != own]
    protocol, title, size = PAPERS, FLOPS_TITLE, f"vocabulary {vocabulary}"
    if not config.reads_tokens:
        rest = [one for one in rest if "token_ids" not in build_router(one, dim=8, num_experts=4, vocab_size=8).needs]
        protocol, size = Protocol(100, config.tokens, 0), f"{config.image_size} x {config.image_size} pixels"
        title = f"inference FLOPs in 1e10 of 100 images of {config.tokens} patches"
    specs = [values.name] if values.name else [own, *rest, *BASELINES]
    rows = cost_table(config, specs, protocol=protocol)
    ks = sorted({k for row in rows for k in row.flops})
    parameters, flops = [], []
    for row in rows:
        table = row.parameters
        counts = (table.backbone, table.router_trainable, table.router_fixed, row.fixed_a_layer, table.trainable)
        parameters.append([row.router, *(f"{count:,}" for count in counts)])
        flops.append([row.router, *(f"{row.flops[k] / 1e10:.3f}" if k in row.flops else "-" for k in ks)])
    first = rows[0].parameters
    names = ("attention", "experts", "feed_forward", "norms", "embeddings")
    parts = [[f"{name.replace('_', ' ')} ({rows[0].router})", f"{getattr(first, name):,}"] for name in names]
    header = ["router", "backbone", "router, trained", "router, fixed", "fixed a layer", "all that trains"]
    grids = [
        Grid(header, parameters, caption="parameters\n"), Grid(["component of the backbone", "parameters"], parts),
        Grid(["router", *(f"k = {k}" for k in ks)], flops, caption=f"{title}\n"),
    ]  # fmt: skip
    head = f"preset {values.preset}, {size}, {config.num_experts} experts"
    return "\n\n".join([head, *(grid.caption + grid.text(rule=False) for grid in grids)])


FLOPS_TITLE = "inference FLOPs in 1e10: 10 sequences, 128 tokens after 896 of memory; linear layers, experts, routers"
