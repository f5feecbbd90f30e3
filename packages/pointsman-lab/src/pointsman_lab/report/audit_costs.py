"""The page's parts on what an audit proposes and what it costs: fewer experts, k by layer, serving, placement."""

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman_lab._grid import NONE, Grid
from pointsman_lab._values import finite
from pointsman_lab.intervals import smallest_within
from pointsman_lab.report.series import short_layer

Found = Mapping[str, Any]
Row = Sequence[str]
Part = dict[str, Any]
"""What `part` makes."""
INTERVAL = "± is half of the 95 % interval over paired quarters of rows of text; a difference within it is none."
HOW = {"reap": "pruned (reap)", "m-smoe": "merged (m-smoe)"}
KEPT = {True: "yes", False: "no", None: "not decided by this text"}


def part(title: str, header: Sequence[str], rows: Sequence[Row], note: str, words: Sequence[int] = ()) -> Part:
    """A table of the page, what its figures mean, and which of its columns hold words."""
    return {"title": title, "grid": Grid(header, rows, code=False), "note": note, "words": words}


def cost_parts(audit: Found) -> list[Part]:
    """The parts that follow what the audit has measured of the routing."""
    return [_schedules(audit), _memory(audit), _serving(audit), _placement(audit), _cache(audit)]


def spread(of: Found | None, digits: int = 4, *, sign: bool = False, scale: float = 1.0) -> str:
    """`mean ± half`."""
    mean, half = (finite((of or {}).get(key)) for key in ("mean", "half"))
    if mean is None:
        return NONE
    shown = f"{mean * scale:{'+' if sign else ''}.{digits}f}"
    return shown if half is None else f"{shown} ± {half * scale:.{digits}f}"


def prunings(audit: Found) -> Part:
    rows = [
        [f"{one['kept']} of {one['experts']}", HOW.get(one["method"], one["method"]),
         spread({"mean": one["share"], "half": one["share_half"]}, 2, sign=True, scale=100), KEPT[one["within"]],
         spread(one.get("random"), sign=True), _bytes(one["serving"]["memory"]["bfloat16"]),
         " / ".join(_bytes(row["bytes"]) for row in one["serving"]["rows"])]
        for one in audit.get("prunings") or ()
    ]  # fmt: skip
    note = (
        "Change of the loss on held-out text; against random: loss minus the mean of three random prunings of the "
        "same size, nats: below 0 where the method is worth something. Nothing is trained afterwards. Bytes a token: "
        f"weights in bf16 at a batch of 1, 16 and 256, an estimate. Intervals are corrected for the rows. {INTERVAL} "
        "pointsman compress makes the smaller model, by these methods and others."
    )
    header = ["experts a layer", "method", "loss, %", "within 1 %", "against random", "weights", "bytes a token"]
    return part("Experts that can go", header, rows, note, words=(1, 3))


def dropped(audit: Found) -> Part:
    """Which experts the smallest model within the margin leaves out, or the largest one that was tried."""
    tried = audit.get("prunings") or ()
    kept = smallest_within(tried)
    one = kept or (tried[0] if tried else {})
    rows = []
    for layer, groups in (one.get("groups") or {}).items():
        merged = ", ".join(" + ".join(map(str, group)) for group in groups if len(group) > 1)
        rows.append([short_layer(layer), merged or ", ".join(map(str, one["dropped"].get(layer, ()))) or NONE])
    which = "The smallest model whose loss is" if kept else "No model is"
    how = HOW.get(str(one.get("method")), "")
    note = f"{which} shown to stay within 1 %; this is the one that is {how} to {one.get('kept')} experts a layer."
    note += " 3 + 5: these become one." if one.get("method") == "m-smoe" else ""
    return part("Which experts go", ["layer", "experts"], rows, note, words=(1,))


def _schedules(audit: Found) -> Part:
    rows = [
        [one["kind"], f"{one['mean_k']:.2f}", " ".join(map(str, one["ks"].values())) if len(one["ks"]) <= 32 else NONE,
         f"{100 * one['searched']:+z.2f}",
         spread({"mean": one["share"], "half": one["share_half"]}, 2, sign=True, scale=100), KEPT[one["kept"]],
         " / ".join(_bytes(row["bytes"]) for row in one.get("serving") or ()) or NONE]
        for one in audit.get("schedules") or ()
    ]  # fmt: skip
    header = ["k by layer", "mean k", "k of each layer", "searched, %", "held out, %", "within 1 %", "bytes a token"]
    note = (
        "Change of the loss against the model's own k, on the half of the text that the search read, and on the other "
        "half. Greedy: the cheapest step down first; exact: the best of all schedules; mean k: the best within this "
        f"budget. Bytes a token: weights in bf16 at a batch of 1, 16 and 256, an estimate. {INTERVAL}"
    )
    return part("k by layer", header, rows, note, words=(2, 5))


def _memory(audit: Found) -> Part:
    of = audit.get("serving") or {}
    memory = of.get("memory") or {}
    rows = [["all weights", *map(_bytes, memory.values())]] if of else []
    note = f"{of.get('parameters', 0):,} parameters, {of.get('experts', 0):,} of them in experts."
    return part("Weights in memory", ["", *memory], rows, note)


def _serving(audit: Found) -> Part:
    found = (audit.get("serving") or {}).get("rows") or []
    machines = list(found[0]["seconds"]) if found else []
    rows = [
        [f"{one['top_k']}", str(one["batch"]), f"{one['distinct']:.1f}", f"{one['flops'] / 1e6:.4g}",
         _bytes(one["bytes"]), *(f"{1e6 * one['seconds'].get(name, 0.0):.3g}" for name in machines)]
        for one in found
    ]  # fmt: skip
    note = (
        "Estimates of one decoded token, not measured times. Distinct: experts of a layer that a batch of independent "
        "tokens needs, from the measured routing. Bytes: weights in bf16, read once a batch. Times by roofline: the "
        "larger of bytes over bandwidth and operations over peak; attention over the context and its cache are left "
        "out."
    )
    header = ["k", "batch", "distinct", "MFLOP a token", "bytes a token", *(f"{name}, µs" for name in machines)]
    return part("Cost to serve (estimate)", header, rows, note)


def _placement(audit: Found) -> Part:
    placed = audit.get("placement") or {}
    names = list(next(iter(placed.values()), {}))
    rows = [[short_layer(layer), *(f"{of.get(name, 0.0):.2f}" for name in names)] for layer, of in placed.items()]
    note = (
        "Simulated on the recorded routing, experts over eight devices (or one for each expert): largest load of a "
        "device over the mean, chosen on the first half of the tokens, judged on the second."
    )
    return part("Expert-parallel placement", ["layer", *names], rows, note)


def _cache(audit: Found) -> Part:
    cached = audit.get("cache") or {}
    hits = cached.get("layers") or {}
    names = list(next(iter(hits.values()), {}))
    rows = [[short_layer(layer), *(percent(of.get(name)) for name in names)] for layer, of in hits.items()]
    note = (
        f"Simulated on the recorded routing, {cached.get('size', NONE)} experts a layer in fast memory: share of the "
        "choices that find their expert there. The optimum knows the future."
    )
    return part("Cache of hot experts", ["layer", *names], rows, note)


def percent(value: Any) -> str:
    return NONE if finite(value) is None else f"{100 * float(value):.1f} %"


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
