"""The result of `diagnose` as text for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pointsman_lab._grid import NONE, Grid, formatted

Found = Mapping[str, Any]


def summary(found: Found) -> str:
    """The figures of every layer in aligned columns; '-' for no value."""
    if "comparison" in found:
        parts = [f"== {router} ==\n{summary(of)}" for router, of in found["routers"].items()]
        ratios = found["entropy_ratio"]
        layers = list(next(iter(ratios.values())))
        rows = [[router, *(_number(of.get(layer), 3) for layer in layers)] for router, of in ratios.items()]
        return "\n\n".join([*parts, _aligned(["entropy / first router's", *layers], rows)])
    parts = [_head(found), _layers(found), _agreement(found), _change(found), _notes(found)]
    return "\n\n".join(part for part in parts if part)


def _head(found: Found) -> str:
    source, protocol = found.get("source", {}), found.get("protocol", {})
    who = source.get("run", source.get("model", "model"))
    step = f", step {source['step']}" if "step" in source else ""
    router = f", {source['router']}" if "router" in source else ""
    read = f"{protocol['tokens']:,} tokens of {protocol['split']}: {protocol['data']}" if protocol else ""
    at = f"k = {protocol['top_k']}" if "top_k" in protocol else ""
    return "\n".join(line for line in (f"{who}{step}{router}", read, at) if line)


COLUMNS: Sequence[tuple[str, Callable[[Found], str]]] = (
    ("entropy", lambda f: _with_spread(f.get("entropy", {}))),
    ("mixed", lambda f: _at(f, "entropy", "mixed_mean", 3) if "mixing" in f else NONE),
    ("S[i,i]", lambda f: _at(f, "mixing", "own_mean", 3)),
    ("neighbours", lambda f: _at(f, "mixing", "effective_mean", 1)),
    ("mixing moves", lambda f: _at(f, "mixing", "changed", 3)),
    ("margin", lambda f: _at(f, "margin", "mean", 4)),
    ("experts used", lambda f: f"{_at(f, 'load', 'effective', 1)}/{f['num_experts']}"),
    ("experts/token", lambda f: _experts_per_token(f)),
    ("dead", lambda f: str(len(f["load"]["dead"])) if "load" in f else NONE),
    ("load CV", lambda f: _at(f, "load", "cv", 3)),
    ("RC", lambda f: _at(f, "collapse", "value", 1)),
    ("classes", lambda f: str(f["collapse"]["classes"]) if "collapse" in f else NONE),
    ("I(expert; id)", lambda f: _at(f, "specialisation", "corrected", 3)),
    ("I(expert; language)", lambda f: _at(f, "group", "corrected", 3)),
    ("CKA", lambda f: _at(f, "outputs", "cka_mean", 3)),
    ("|J2|/|J1|", lambda f: _at(f, "jacobian", "norm_ratio", 3)),
)


def _layers(found: Found) -> str:
    rows = [[name, *(cell(of) for _, cell in COLUMNS)] for name, of in found["layers"].items()]
    return Grid(["layer", *(name for name, _ in COLUMNS)], rows).without_empty_columns().text(rule=False)


def _agreement(found: Found) -> str:
    layers = found["layers"]
    values = [row["top_k"] for row in next(iter(layers.values()))["agreement"]] if layers else []
    if not values:
        return ""
    changed = {name: [row["top1"] for row in of["agreement"]] for name, of in layers.items()}
    rows = [[name, *(_number(None if one is None else 1 - one, 3) for one in of)] for name, of in changed.items()]
    return _aligned(["same first expert as at", *(f"k={k}" for k in values)], rows)


def _change(found: Found) -> str:
    parts = [_fluctuation(f"fluctuation against {label}", layers) for label, layers in found["against"].items()]
    for row in found["history"]:
        parts.append(_fluctuation(f"fluctuation from {row['checkpoint']} to the next", row["layers"]))
    if found["consistency"]:
        rows = [[name, *_consistency(of)] for name, of in found["consistency"].items()]
        parts.append(_aligned(["inter-run consistency", "with diagonal", "without", "runs"], rows))
    for variant, tuned in found.get("finetunings", {}).items():
        rows = [[name, str(last["step"]), *_consistency(last)] for name, (*_, last) in tuned["layers"].items()]
        title = f"consistency of fine-tunings: {variant}, loads of {tuned['window']} batches or more"
        parts.append(_aligned([title, "step", "with diagonal", "without", "runs"], rows))
    return "\n\n".join(parts)


def _consistency(of: Found) -> list[str]:
    return [_number(of["with_diagonal"], 3), _number(of["without_diagonal"], 3), str(of["runs"])]


def _fluctuation(title: str, layers: Found) -> str:
    words = {"top1": "first expert", "sets": "sets", "overlap": "overlap", "entropy_ratio": "entropy ratio"}
    rows = [[name, *(_number({**of, **of["fluctuation"]}.get(key), 3) for key in words)] for name, of in layers.items()]
    return Grid([title, *words.values()], rows).without_empty_columns(keep=4).text(rule=False)


def _notes(found: Found) -> str:
    notes = []
    for name, of in found["layers"].items():
        if dead := of.get("load", {}).get("dead"):
            notes.append(f"{name}: expert{'s'[: len(dead) > 1]} {', '.join(map(str, dead))} got no token")
    return "\n".join(notes)


def _experts_per_token(found: Found) -> str:
    """The mean number of experts a token; not shown where it is a whole number, as k is."""
    load = found.get("load", {})
    if not load.get("tokens"):
        return NONE
    mean = load.get("assignments", 0) / load["tokens"]
    return NONE if mean and mean.is_integer() else f"{mean:.2f}"


def _at(found: Found, kind: str, key: str, digits: int) -> str:
    return _number(found.get(kind, {}).get(key), digits)


def _with_spread(of: Found) -> str:
    return NONE if of.get("mean") is None else f"{of['mean']:.3f} ± {_number(of['std'], 3)}"


def _number(value: float | None, digits: int) -> str:
    return formatted(value, ".3g" if value is not None and abs(value) >= 1e6 else f".{digits}f")


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Grid(header, rows).text(rule=False)
