"""The page's parts on an audit, from audit.json: tables with what their figures mean, and the map of loads."""

from __future__ import annotations

import json
from math import exp, log
from typing import Any

from pointsman_lab._grid import NONE, Grid
from pointsman_lab._values import finite
from pointsman_lab.report.audit_costs import (
    INTERVAL,
    Found,
    answers,
    cost_parts,
    dropped,
    k_of,
    percent,
    prunings,
    spread,
)
from pointsman_lab.report.series import short_layer
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import AUDIT
from pointsman_lab.runs.record import read_object

MOST = 12  # rows of a table of experts
HOT = 3.0
"""An expert is called hot if its load is more than HOT times the load under uniform routing."""
WORDS = {
    "Domains apart": (2,), "Experts of one domain": (1,), "What experts read": (1,), "Experts that can go": (1, 3),
    "Which experts go": (1,), "Experts that go together": (2,), "k by layer": (2, 5),
}  # fmt: skip
"""Title of a part -> its columns of words."""


def audit_parts(comparison: Comparison) -> list[dict[str, Any]]:
    """{"id", "title", "grid", "note"} of every audit of the page; [] without audits."""
    audits = {run.router: read_object(run.path / AUDIT) for run in comparison.runs.values() if run.is_audit}
    found = []
    for name, audit in audits.items():
        for part in _parts(audit):
            title = part["title"] if len(audits) == 1 else f"{part['title']}: {name}"
            found.append({**part, "title": title})
    return [{**part, "id": f"audit-{place}"} for place, part in enumerate(found)]


def main_parts(audit: Found) -> list[dict[str, Any]]:
    """The loss at every k, and the routing of every layer, as far as they were measured."""
    made = [_quality(audit), _change(audit), _against(audit), answers(audit), _routing(audit.get("layers") or {})]
    return [part for part in made if part["grid"].rows]


def _parts(audit: Found) -> list[dict[str, Any]]:
    made = [*main_parts(audit), _by_domain(audit), _domains(audit)]
    made += [_specialists(audit), _tokens(audit), _coverage(audit), prunings(audit), dropped(audit), _super(audit)]
    made += [_across(audit), *cost_parts(audit)]
    return [{**part, "words": WORDS.get(part["title"], ())} for part in made if part["grid"] and part["grid"].rows]


def load_maps(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Audit -> {"layers": names, "of": {domain, or "all": the share of every expert by layer}}."""
    found = {}
    for run in (one for one in comparison.runs.values() if one.is_audit):
        layers = (read_object(run.path / AUDIT).get("layers") or {}).items()
        names = dict.fromkeys(name for _, of in layers for name in of.get("domains") or {})
        every = {"all": [of.get("load") or {} for _, of in layers]}
        for name in names if len(names) > 1 else ():
            every.setdefault(name, [(of.get("domains") or {}).get(name) or {} for _, of in layers])
        shares = {name: [[*map(finite, of.get("share") or [])] for of in each] for name, each in every.items()}
        if any(shares["all"]):
            found[run.router] = {"layers": [short_layer(name) for name, _ in layers], "of": shares}
    return found


def _quality(audit: Found) -> dict[str, Any]:
    domains = list(audit.get("domains") or {})
    domains = domains if len(domains) > 1 else []
    rows = [
        [k_of(row, audit), spread({"mean": row["loss"], "half": row.get("half")}), *_numbers(row.get("perplexity")),
         *(spread(row.get("domains", {}).get(name)) for name in domains)]
        for row in audit.get("quality") or ()
    ]  # fmt: skip
    grid = Grid(["k", "all text" if domains else "loss", "perplexity", *domains], rows, code=False)
    note = (
        "Nats a text token. ± is half of the 95 % interval over rows of text, of fewer than three over their quarters."
    )
    return {"title": "Loss at every k", "grid": grid, "note": note}


def _change(audit: Found) -> dict[str, Any]:
    domains = list(audit.get("domains") or {})
    domains = domains if len(domains) > 1 else []
    rows = [
        [k_of(row, audit), spread(row.get("difference"), sign=True),
         *(spread((row.get("domains", {}).get(name) or {}).get("difference"), sign=True) for name in domains)]
        for row in audit.get("quality") or () if row["top_k"] != audit.get("top_k")
    ]  # fmt: skip
    grid = Grid(["k", "all text" if domains else "change", *domains], rows, code=False)
    note = f"Loss minus that at the model's own k. {INTERVAL} Intervals are corrected for the number of values of k."
    return {"title": "Change of the loss with k", "grid": grid, "note": note}


def _against(audit: Found) -> dict[str, Any]:
    of = audit.get("against") or {}
    difference = of.get("difference")
    change = spread(difference if isinstance(difference, dict) else None, sign=True)
    rows = [["the other", spread({"mean": of.get("loss"), "half": of.get("half")}), change]] if of else []
    note = f"Each at its own k; change: the loss minus that of this checkpoint. {INTERVAL}"
    grid = Grid(["checkpoint", "loss", "change"], rows, code=False)
    return {"title": "The other checkpoint", "grid": grid, "note": note}


def _routing(layers: Found) -> dict[str, Any]:
    rows = []
    for name, of in layers.items():
        load, experts = of.get("load") or {}, max(1, of.get("num_experts") or 1)
        share = [finite(one) or 0.0 for one in load.get("share") or ()]
        figures = [("entropy", "mean"), ("margin", "mean"), ("collapse", "value"), ("specialisation", "corrected")]
        counts = [len(load.get("dead") or ()), sum(0 < one < 0.1 / experts for one in share)]
        counts.append(sum(one > HOT / experts for one in share))
        moved = [(of.get("bfloat16") or {}).get("sets"), (of.get("fluctuation") or {}).get("top1")]
        rows.append(
            [short_layer(name), *_numbers(*((of.get(part) or {}).get(key) for part, key in figures)),
             f"{load.get('effective') or 0:.1f} of {of.get('num_experts')}", *map(str, counts), *map(percent, moved)]
        )  # fmt: skip
    header = ["layer", "entropy", "margin", "separation", "token identity", "in use", "dead", "nearly dead", "hot",
              "in bf16", "moved"]  # fmt: skip
    grid = Grid(header, rows, code=False).without_empty_columns()
    note = (
        "Entropy of the gate's full distribution, nats: 0 is certain. Margin: score of the last chosen expert minus "
        "that of the next. Separation (representation collapse): spread of the gate's inputs within the tokens of one "
        "expert over that between experts; larger is less collapsed. Token identity: nats that the token itself says "
        "of its expert; 0 is nothing. In use: exp of the load's entropy, experts. Nearly dead: below a tenth of an "
        "even share; hot: over three times an even share."
    )
    note += " In bf16: tokens with other experts where the gate computes in bf16." if "in bf16" in grid.header else ""
    note += " Moved: with another first expert than in the other checkpoint." if "moved" in grid.header else ""
    return {"title": "Routing by layer", "grid": grid, "note": note}


def _by_domain(audit: Found) -> dict[str, Any]:
    names = list(audit.get("domains") or {})
    rows = []
    for layer, of in (audit.get("layers") or {}).items():
        parts = [(of.get("domains") or {}).get(name) or {} for name in names]
        entropies = [-sum(x * log(x) for x in one.get("share") or () if x and x > 0) for one in parts]
        rows += [
            [short_layer(layer), "entropy", *_numbers(*(one.get("entropy") for one in parts))],
            [short_layer(layer), "margin", *_numbers(*(one.get("margin") for one in parts))],
            [short_layer(layer), "experts in use", *(f"{exp(min(one, 50)):.1f}" for one in entropies)],
        ]
    grid = Grid(["layer", "figure", *names], rows, labels=2) if len(names) > 1 else None
    return {
        "title": "Routing by domain", "grid": grid,
        "note": "The figures of the table above, of each part of the text alone.",
    }  # fmt: skip


def _domains(audit: Found) -> dict[str, Any]:
    names = list(audit.get("domains") or {})
    rows = [[" and ".join(one["domains"]), spread(one, 3), _verdict(one)] for one in audit.get("divergence") or ()]
    note = (
        "Jensen-Shannon divergence of two domains' loads in bits, mean over layers: 0 is the same load, 1 has no "
        f"expert in common. Bias and interval by leaving out each block once. Tokens: "
        f"{', '.join(f'{name} {count:,}' for name, count in (audit.get('domains') or {}).items())}."
    )
    grid = Grid(["domains", "divergence", "verdict"], rows) if len(names) > 1 else None
    return {"title": "Domains apart", "grid": grid, "note": note}


def _verdict(one: Found) -> str:
    if one.get("half") is None:
        return "too few blocks"
    return "differ" if one["mean"] > one["half"] else "no difference beyond chance"


def _specialists(audit: Found) -> dict[str, Any]:
    found = sorted(audit.get("specialists") or (), key=lambda one: -one["share"])
    rows = [
        [f"{short_layer(one['layer'])}, expert {one['expert']}", one["domain"],
         spread({"mean": one["share"], "half": one["half"]}, 1, scale=100), f"{one['tokens']:,}"]
        for one in found[:MOST]
    ]  # fmt: skip
    note = (
        f"All {len(found)} experts with at least three quarters of their choices in one domain, at equal numbers of "
        "tokens of each, the lower end of the interval included."
        if len(rows) == len(found)
        else f"{len(rows)} of the {len(found)} experts with at least three quarters of their choices in one domain."
    )
    return {"title": "Experts of one domain", "grid": Grid(["expert", "domain", "share, %", "choices"], rows),
            "note": note}  # fmt: skip


def _tokens(audit: Found) -> dict[str, Any]:
    found = [one for one in audit.get("typical") or () if one["tokens"]]
    shown = sorted(found, key=lambda one: -one["tokens"][0]["lift"])[: 2 * MOST]
    rows = [
        [f"{short_layer(one['layer'])}, expert {one['expert']}",
         ", ".join(f"{json.dumps(token['text'], ensure_ascii=False)} {token['lift']:.1f}" for token in one["tokens"])]
        for one in sorted(shown, key=lambda one: found.index(one))
    ]  # fmt: skip
    note = (
        f"Of the {len(found)} experts with such tokens, the {len(rows)} most particular ones; all are in audit.json. "
        "Of an expert's twenty most frequent tokens, those that it takes the most times as often as it takes any token."
    )
    return {
        "title": "What experts read",
        "grid": Grid(["expert", "tokens, and how many times as often"], rows),
        "note": note,
    }


def _coverage(audit: Found) -> dict[str, Any]:
    rows = [
        ["once" if one["times"] == 1 else f"{one['times']} times", f"{one['reached']:,} of {one['experts']:,}",
         _count(one.get("first_tokens")), _count(one.get("tokens")), _count(one.get("blocks")),
         _count(one.get("at_least"))]
        for one in audit.get("coverage") or ()
    ]  # fmt: skip
    header = ["each expert", "reached", "tokens from the start", "tokens of a subset", "its blocks", "at least"]
    note = (
        "How much of this text is needed until every expert that it reaches at all so often has been reached: from the "
        "start, and with the best blocks first (greedy). No choice of fewer blocks than “at least” does it."
    )
    return {"title": "Coverage for calibration", "grid": Grid(header, rows), "note": note}


def _super(audit: Found) -> dict[str, Any]:
    rows = [
        [f"{short_layer(one['layer'])}, expert {one['expert']}", spread(one, sign=True), f"{one['peak']:.3g}"]
        for one in audit.get("super_experts") or ()
    ]
    note = (
        "Change of the loss (nats) on held-out text where an expert gives out nothing; tried are those with the "
        f"largest output (its largest element), or all of a small model. Intervals are corrected for their "
        f"number. {INTERVAL}"
    )
    return {"title": "Super experts", "grid": Grid(["without", "loss", "largest output"], rows), "note": note}


def _across(audit: Found) -> dict[str, Any]:
    rows = []
    for name, of in (audit.get("layers") or {}).items():
        pairs = (of.get("co_activation") or {}).get("pairs") or []
        rows += [[short_layer(name), NONE, _pair(one)] for one in pairs[:1]]
    for one in audit.get("across") or ():
        best = [_pair(pair) for pair in one["pairs"][:1]] or [NONE]
        rows.append([" to ".join(map(short_layer, one["layers"])), f"{one['bits']:.3f}", best[0]])
    note = (
        "Within a layer: the two experts that tokens take together most beyond chance; from a layer to the next: what "
        "a choice says of the next layer's (bits, 0 is nothing) and the strongest pair. Times: joint tokens over those "
        "that independent choices would have."
    )
    return {"title": "Experts that go together", "grid": Grid(["layers", "bits", "pair"], rows), "note": note}


def _pair(one: Found) -> str:
    return f"{' and '.join(map(str, one['experts']))}: {one['lift'] or 0:.1f} times, {one['tokens']:,} tokens"


def _numbers(*values: Any) -> list[str]:
    return [NONE if (value := finite(one)) is None else f"{value:.3f}" for one in values]


def _count(value: Any) -> str:
    return NONE if value is None else f"{value:,}"
