"""What an audit found, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pointsman_lab._grid import NONE, markdown_table, wrapped

INTERVALS = (
    "± is half of the 95 % interval: of a loss over rows of text, of a difference over paired quarters of rows, "
    "corrected for their number. A difference within its interval is none."
)
COLUMNS = {
    "entropy": "of the gate's distribution, nats",
    "margin": "score of the last chosen expert minus that of the next",
    "used": "experts in use, exp of the load's entropy",
    "hot": "over three times an even share",
    "apart": "spread of the gate's inputs within an expert's tokens over that between experts, larger is less "
    "collapsed",
    "token": "nats that the token says of its expert",
    "bf16": "share of tokens with other experts where the gate computes in bf16",
    "moved": "with another first expert than in the other checkpoint",
}


def markdown(result: Any) -> str:
    """A summary: the loss at every k, then a line for each layer."""
    read = ", ".join(f"{count:,} {kind}" for kind, count in result.tokens.items() if count)
    lines = [f"# Audit of {result.model}", "", f"{result.parameters:,} parameters; tokens read: {read}.", ""]
    lines += [*(f"- {sentence}" for sentence in result.findings()), ""]
    rows = []
    for row in result.quality:
        own = " (own)" if row["top_k"] == result.top_k else ""
        name = NONE if row["top_k"] is None else row["top_k"]
        change = row["difference"] or {"mean": None, "half": None}
        shown = [plus_minus(row["loss"], row["half"]), plus_minus(change["mean"], change["half"], sign=True)]
        rows.append([f"{name}{own}", *shown, _shown(row["perplexity"], 2)])
    header = ["k", "loss (nats)", "against own k", "perplexity"]
    lines += [markdown_table(header, rows), "", INTERVALS, ""]
    if told := result.analyses.get("answers"):
        rows = [
            [f"{one['top_k']}", f"{round(one['reached']['mean'] * one['prompts'])} of {one['prompts']}",
             plus_minus(one["tokens"]["mean"], one["tokens"]["half"], 1),
             NONE if one["times"] is None else plus_minus(one["times"]["mean"], one["times"]["half"], 2)]
            for one in told
        ]  # fmt: skip
        lines += [markdown_table(["k", "answers", "tokens a prompt", "times own k"], rows), ""]
        lines += ["Tokens until the answer, or until the text ends; ± is over prompts.", ""]
    columns = "layer, entropy, margin, used, dead, hot, apart, token, bf16, moved"
    rows, names = [], short_names(result.layers)
    for name, layer in result.layers.items():
        load = layer["load"]
        cells = [
            names[name],
            _shown(layer["entropy"]["mean"]),
            _shown(layer["margin"]["mean"]),
            f"{_shown(load['effective'], 1)}/{layer['num_experts']}",
            str(len(load["dead"])),
            str(len(result.hot().get(name, []))),
            _shown(layer.get("collapse", {}).get("value"), 1),
            _shown(layer.get("specialisation", {}).get("corrected")),
            _shown(layer.get("bfloat16", {}).get("sets"), 4),
            _shown(layer.get("fluctuation", {}).get("top1"), 4),
        ]
        rows.append(cells)
    header = columns.split(", ")
    kept = [at for at in range(len(header)) if any(row[at] != NONE for row in rows)]
    header, rows = [header[at] for at in kept], [[row[at] for at in kept] for row in rows]
    told = "; ".join(f"{name}: {COLUMNS[name]}" for name in header if name in COLUMNS)
    name = next(iter(names))
    lines += [markdown_table(header, rows), "", f"Layer {names[name]} is {name}. {told[:1].upper()}{told[1:]}."]
    lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return wrapped("\n".join(lines), 80) + "\n"


def short_names(layers: Iterable[str]) -> dict[str, str]:
    """Layer -> its number where its name has one and no other layer has the same; else its name."""
    numbers = {name: [part for part in name.split(".") if part.isdigit()] for name in layers}
    found = {name: of[0] if len(of) == 1 else name for name, of in numbers.items()}
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def plus_minus(value: float | None, half: float | None, digits: int = 4, *, sign: bool = False) -> str:
    """`1.2345 ± 0.0012`."""
    if value is None:
        return NONE
    return f"{value:{'+' if sign else ''}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def _shown(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
