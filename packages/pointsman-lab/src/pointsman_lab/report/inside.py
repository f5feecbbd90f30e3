"""What the page shows of the routing: loads, entropies, fluctuation, collapse, diagnoses, and the explorer's samples.

explorer.json is cut to a size that a page can hold.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pointsman_lab._grid import NONE, Grid, formatted
from pointsman_lab._shapes import unpacked
from pointsman_lab._values import finite
from pointsman_lab.report.series import Curve, binned, by_layer, drawn, last_step, per_router, short_layer, significant
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import DIAGNOSTICS, EXPLORER_FORMAT
from pointsman_lab.runs.record import RunRecord, read_object

COLUMNS = 60
EXPLORER_BYTES = 1_400_000
Rows = dict[str, list[dict[str, Any]]]
History = Sequence[Mapping[str, Any]]
Found = Mapping[str, Any]
RowsOfRuns = Mapping[tuple[str, int], Rows]


def inside(comparison: Comparison) -> dict[str, Any]:
    """The data of the page's sections on routing; parts without data are empty."""
    rows = {key: rows_by_layer(run) for key, run in comparison.runs.items()}
    last = last_step(comparison)
    samples = {router: found for router in comparison.routers if (found := sample_of(comparison, router))}
    histories = {router: of for router in comparison.routers if (of := history_of(diagnosis_of(comparison, router)))}
    lines = {"entropy": entropy_by_layer(comparison), "fluctuation": fluctuation_by_layer(comparison, histories)}
    return {
        "layers": layer_names(comparison),
        "entropy": over_training(comparison, rows, "entropy", last),
        "heat": [heat for router in comparison.routers if (heat := load_heat(comparison, router, rows, last))],
        "byLayer": lines,
        "collapse": collapse(comparison, histories),
        "explorer": explorer(samples),
    }


def layer_names(comparison: Comparison) -> list[str]:
    """Names of all routed layers, in the order in which the runs list them."""
    names: dict[str, None] = {}
    for run in comparison.runs.values():
        for result in run.results().values():
            names |= dict.fromkeys(result.get("routers") or {})
    for run in comparison.runs.values() if not names else ():
        names |= dict.fromkeys(row["layer"] for row in run.metrics("routing") if "layer" in row)
    return list(names)


def rows_by_layer(run: RunRecord) -> Rows:
    """The routing rows of a run by layer, in file order."""
    rows: Rows = {}
    for row in run.metrics("routing"):
        if isinstance(row.get("layer"), str) and finite(row.get("step")) is not None:
            rows.setdefault(row["layer"], []).append(row)
    return rows


def over_training(comparison: Comparison, rows: RowsOfRuns, name: str, last: float) -> dict[str, Any]:
    """A field of the routing rows against the step, for every layer."""

    def curve(layer: str, run: RunRecord) -> Curve:
        found = rows[run.router, run.seed].get(layer, [])
        return {float(row["step"]): value for row in found if (value := finite(row.get(name))) is not None}

    layers = layer_names(comparison)
    return by_layer({layer: per_router(comparison, partial(curve, layer), last, COLUMNS) for layer in layers})


def load_heat(comparison: Comparison, router: str, rows: RowsOfRuns, last: float) -> dict[str, Any] | None:
    """Load of every expert against the step, for every layer of the router's first run that has any.

    A byte is round(85 load E): 85 = an even share, 255 = three times an even share or more.
    """
    for run in comparison.of(router):
        layers = []
        for name, found in rows[run.router, run.seed].items():
            loads = {float(row["step"]): row["load"] for row in found if isinstance(row.get("load"), list)}
            lengths = {len(load) for load in loads.values()}
            if len(lengths) == 1 and lengths != {0}:
                layers.append({"name": name, "label": short_layer(name), **_heat(loads, last)})
        if layers:
            return {"router": router, "seed": run.seed, "layers": layers}
    return None


def _heat(loads: Mapping[float, Sequence[Any]], last: float) -> dict[str, Any]:
    experts = len(next(iter(loads.values())))
    columns = COLUMNS if experts <= 32 else COLUMNS // 2
    tables = [binned([(s, finite(load[e]) or 0.0) for s, load in loads.items()], last, columns) for e in range(experts)]
    matrix = np.array([list(table.values()) for table in tables])
    quantised = np.clip(np.rint(85 * matrix * experts), 0, 255).astype(np.uint8)
    return {"experts": experts, "steps": list(tables[0]), "load": base64.b64encode(quantised.tobytes()).decode()}


def entropy_by_layer(comparison: Comparison) -> list[dict[str, Any]]:
    """Entropy of the full distribution at the largest k of the final evaluation: layer index -> mean over seeds."""
    places = {name: float(index) for index, name in enumerate(layer_names(comparison))}

    def curve(run: RunRecord) -> Curve:
        results = run.results()
        layers = results[max(results)].get("routers") or {} if results else {}
        values = {places[name]: finite(layer.get("entropy")) for name, layer in layers.items()}
        return {place: value for place, value in values.items() if value is not None}

    return per_router(comparison, curve)


def fluctuation_by_layer(comparison: Comparison, histories: Mapping[str, History]) -> list[dict[str, Any]]:
    """Share of tokens whose first expert changed between the last two checkpoints, for every layer."""
    places = {name: float(index) for index, name in enumerate(layer_names(comparison))}
    curves = {}
    for router, history in histories.items():
        values = {name: finite(layer.get("top1")) for name, layer in history[-1]["layers"].items() if name in places}
        curves[router] = sorted([places[name], significant(at)] for name, at in values.items() if at is not None)
    return drawn(curves)


def collapse(comparison: Comparison, histories: Mapping[str, History]) -> dict[str, Any]:
    """Representation collapse at every kept checkpoint, for every layer."""

    def points(layer: str, history: History) -> list[list[float]]:
        values = {float(one["step"]): finite(one["layers"].get(layer, {}).get("collapse")) for one in history}
        return [[step, significant(value)] for step, value in values.items() if value is not None]

    layers = layer_names(comparison)
    return by_layer({layer: drawn({name: points(layer, of) for name, of in histories.items()}) for layer in layers})


def diagnosis_of(comparison: Comparison, router: str) -> dict[str, Any]:
    """diagnostics.json of the router's first run that has one, else the comparison's entry for it, else {}."""
    for run in comparison.of(router):
        if "layers" in (found := run.diagnostics):
            return found
    if comparison.planned:
        found = read_object(comparison.path / DIAGNOSTICS).get("routers", {}).get(router, {})
        return found if isinstance(found, dict) else {}
    return {}


def diagnosis_grid(comparison: Comparison) -> Grid:
    """Router, layer and figures of all diagnosed routers, without empty columns; the caption is their protocols."""
    from pointsman_lab.report.summary import COLUMNS

    rows: list[list[str]] = []
    protocols: dict[str, None] = {}
    for router in comparison.routers:
        found = diagnosis_of(comparison, router)
        for name, layer in found.get("layers", {}).items():
            history = found.get("history")
            moved = _top1(history[-1], name) if history else None
            consistency = finite((found.get("consistency", {}).get(name) or {}).get("without_diagonal"))
            figures = [cell(layer) for _, cell in COLUMNS]
            rows.append([router, name, *figures, formatted(moved), formatted(consistency)])
        if of := found.get("protocol"):
            read = f"{of['tokens']:,} tokens of {of.get('split', NONE)}" if "tokens" in of else "tokens"
            protocols[f"{read}, k = {of.get('top_k', NONE)}"] = None
    header = ["router", "layer", *(name for name, _ in COLUMNS), "fluctuation", "IC over seeds"]
    return Grid(header, rows, caption="; ".join(protocols)).without_empty_columns(keep=2)


def _top1(entry: Found, layer: str) -> float | None:
    return finite((entry["layers"].get(layer, {}).get("fluctuation") or {}).get("top1"))


def history_of(diagnosis: Found) -> list[dict[str, Any]]:
    """[{"step", "layers": {name: {"collapse", "top1"}}}], oldest checkpoint first.

    top1: share of tokens whose first expert changed since the previous checkpoint.
    """
    if not diagnosis:
        return []
    entries = list(diagnosis.get("history") or [])
    line = [*((str(entry["checkpoint"]), entry["layers"]) for entry in entries)]
    line.append((f"step-{diagnosis.get('source', {}).get('step', '')}", diagnosis.get("layers", {})))
    found = []
    for place, (label, layers) in enumerate(line):
        step = label.rpartition("-")[2]
        if step.isdecimal() and len(step) < 16:
            values = {}
            for name, layer in layers.items():
                moved = _top1(entries[place - 1], name) if place else None
                values[name] = {"collapse": finite((layer.get("collapse") or {}).get("value")), "top1": moved}
            found.append({"step": int(step), "layers": values})
    return found


def sample_of(comparison: Comparison, router: str) -> dict[str, Any] | None:
    """explorer.json of the router's first run that has one, with its seed."""
    for run in comparison.of(router):
        found = run.explorer
        if readable(found):
            return {**found, "seed": run.seed}
    return None


def readable(sample: Mapping[str, Any]) -> bool:
    """Whether a sample has all parts, in the format of today."""
    parts = ("tokens", "top_k", "num_experts", "layers", "routing", "usage", "map")
    if not all(part in sample for part in parts) or sample.get("format") != EXPLORER_FORMAT:
        return False
    try:
        return sample["map"].keys() >= {"top_k", "method", "tokens", "layers", "first"} and bool(_unpacked(sample))
    except ValueError:  # packed routing that is cut or altered
        return False


def explorer(samples: Mapping[str, Mapping[str, Any]], budget: int = EXPLORER_BYTES) -> dict[str, Any]:
    """The samples, all cut to the same number of tokens, so that together they take at most `budget` bytes."""
    if not samples:
        return {"texts": [], "routers": []}
    tokens = min(len(sample["tokens"]) for sample in samples.values())
    whole = {router: _unpacked(sample) for router, sample in samples.items()}
    while True:
        cuts = {router: _packed(whole[router][: tokens * _width(sample)]) for router, sample in samples.items()}
        size = sum(len(cut) for cut in cuts.values())
        if size <= budget or tokens <= 64:
            break
        tokens = max(64, min(tokens - 1, int(0.97 * tokens * budget / size)))
    texts: list[list[str]] = []
    routers = []
    for router, sample in samples.items():
        text = list(sample["tokens"][:tokens])
        if text not in texts:
            texts.append(text)
        usage = json.dumps(sample["usage"], separators=(",", ":")).encode()
        routers.append(
            {
                "name": router,
                "seed": sample["seed"],
                "text": texts.index(text),
                "word": sample.get("level") == "word",
                "topK": sample["top_k"],
                "experts": sample["num_experts"],
                "layers": [[name, short_layer(name)] for name in sample["layers"]],
                "sampled": len(sample["tokens"]),
                "routing": cuts[router],
                "usage": _packed(usage),
                "map": sample["map"],
            }
        )
    return {"texts": texts, "routers": routers}


def _width(sample: Mapping[str, Any]) -> int:
    """Bytes of a token in the packed routing."""
    experts = int(sample["num_experts"])
    return len(sample["layers"]) * len(sample["top_k"]) * (experts + (1 if experts <= 255 else 2) + (experts + 7) // 8)


def _unpacked(sample: Mapping[str, Any]) -> bytes:
    return unpacked(sample["routing"], len(sample["tokens"]) * _width(sample))


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()
