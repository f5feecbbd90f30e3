"""The page's parts on an audit, from audit.json: tables with what their figures mean, and the map of loads."""

import json
from math import exp, log
from typing import Any

from pointsman_lab._grid import NONE, Grid, formatted
from pointsman_lab._values import finite
from pointsman_lab.report.audit_costs import INTERVAL, Found, Part, cost_parts, dropped, part, percent, prunings, spread
from pointsman_lab.report.series import short_layer
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import AUDIT
from pointsman_lab.runs.record import read_object

MOST = 12  # rows of a table of experts
HOT = 3.0
"""An expert is called hot if its load is more than HOT times the load under uniform routing."""


def audit_parts(comparison: Comparison) -> list[Part]:
    """The parts of every audit of the page, each with its "id"; [] without audits."""
    audits = {run.router: read_object(run.path / AUDIT) for run in comparison.runs.values() if run.is_audit}
    found = [(name, one) for name, audit in audits.items() for one in _parts(audit)]
    return [
        {**one, "title": one["title"] if len(audits) == 1 else f"{one['title']}: {name}", "id": f"audit-{place}"}
        for place, (name, one) in enumerate(found)
    ]


def main_parts(audit: Found) -> list[Part]:
    """The loss at every k, and the routing of every layer, as far as they were measured."""
    made = [_quality(audit), _change(audit), _against(audit), _answers(audit), _routing(audit.get("layers") or {})]
    return [one for one in made if one["grid"].rows]


def _parts(audit: Found) -> list[Part]:
    made = [*main_parts(audit), _by_domain(audit), _domains(audit), _specialists(audit), _tokens(audit)]
    made += [_coverage(audit), prunings(audit), dropped(audit), _super(audit), _across(audit), *cost_parts(audit)]
    return [one for one in made if one["grid"].rows]


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


def _several(audit: Found) -> list[str]:
    """The domains of the text; [] where it has one."""
    domains = list(audit.get("domains") or {})
    return domains if len(domains) > 1 else []


def _quality(audit: Found) -> Part:
    domains = _several(audit)
    rows = [
        [_k_of(row, audit), spread({"mean": row["loss"], "half": row.get("half")}), *_numbers(row.get("perplexity")),
         *(spread(row.get("domains", {}).get(name)) for name in domains)]
        for row in audit.get("quality") or ()
    ]  # fmt: skip
    note = (
        "Nats a text token. ± is half of the 95 % interval over rows of text, of fewer than three over their quarters."
    )
    return part("Loss at every k", ["k", "all text" if domains else "loss", "perplexity", *domains], rows, note)


def _change(audit: Found) -> Part:
    domains = _several(audit)
    rows = [
        [_k_of(row, audit), spread(row.get("difference"), sign=True),
         *(spread((row.get("domains", {}).get(name) or {}).get("difference"), sign=True) for name in domains)]
        for row in audit.get("quality") or () if row["top_k"] != audit.get("top_k")
    ]  # fmt: skip
    note = f"Loss minus that at the model's own k. {INTERVAL} Intervals are corrected for the number of values of k."
    return part("Change of the loss with k", ["k", "all text" if domains else "change", *domains], rows, note)


def _against(audit: Found) -> Part:
    of = audit.get("against") or {}
    difference = of.get("difference")
    change = spread(difference if isinstance(difference, dict) else None, sign=True)
    rows = [["the other", spread({"mean": of.get("loss"), "half": of.get("half")}), change]] if of else []
    note = f"Each at its own k; change: the loss minus that of this checkpoint. {INTERVAL}"
    return part("The other checkpoint", ["checkpoint", "loss", "change"], rows, note)


def _answers(audit: Found) -> Part:
    found = audit.get("answers") or []
    rows = [
        [_k_of(one, audit), spread(one["reached"], 1, scale=100), spread(one.get("gained"), 1, sign=True, scale=100),
         spread(one["tokens"], 1), spread(one.get("times"), 2)]
        for one in found
    ]  # fmt: skip
    most = (audit.get("protocol") or {}).get("answer_tokens")
    note = (
        f"Greedy generation on {found[0]['prompts'] if found else 0} prompts until the answer is in its text; without "
        f"the answer, until the text ends or {most} tokens are spent. Times: tokens over those of the own k. "
        "± is half of the 95 % interval over prompts, paired with the own k."
    )
    header = ["k", "answers, %", "against own k", "tokens a prompt", "times own k"]
    return part("Tokens to an answer", header, rows, note)


def _routing(layers: Found) -> Part:
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
    grid = Grid(header, rows).without_empty_columns()
    note = (
        "Entropy of the gate's full distribution, nats: 0 is certain. Margin: score of the last chosen expert minus "
        "that of the next. Separation (representation collapse): spread of the gate's inputs within the tokens of one "
        "expert over that between experts; larger is less collapsed. Token identity: nats that the token itself says "
        "of its expert; 0 is nothing. In use: exp of the load's entropy, experts. Nearly dead: below a tenth of an "
        "even share; hot: over three times an even share."
    )
    note += " In bf16: tokens with other experts where the gate computes in bf16." if "in bf16" in grid.header else ""
    note += " Moved: with another first expert than in the other checkpoint." if "moved" in grid.header else ""
    return part("Routing by layer", grid.header, grid.rows, note)


def _by_domain(audit: Found) -> Part:
    names, rows = _several(audit), list[list[str]]()
    for layer, of in (audit.get("layers") or {}).items() if names else ():
        parts = [(of.get("domains") or {}).get(name) or {} for name in names]
        entropies = [-sum(x * log(x) for x in one.get("share") or () if x and x > 0) for one in parts]
        rows += [
            [short_layer(layer), "entropy", *_numbers(*(one.get("entropy") for one in parts))],
            [short_layer(layer), "margin", *_numbers(*(one.get("margin") for one in parts))],
            [short_layer(layer), "experts in use", *(f"{exp(min(one, 50)):.1f}" for one in entropies)],
        ]
    note = "The figures of the table above, of each part of the text alone."
    return part("Routing by domain", ["layer", "figure", *names], rows, note)


def _domains(audit: Found) -> Part:
    found = audit.get("divergence") or () if _several(audit) else ()
    rows = [[" and ".join(one["domains"]), spread(one, 3), _verdict(one)] for one in found]
    note = (
        "Jensen-Shannon divergence of two domains' loads in bits, mean over layers: 0 is the same load, 1 has no "
        f"expert in common. Bias and interval by leaving out each block once. Tokens: "
        f"{', '.join(f'{name} {count:,}' for name, count in (audit.get('domains') or {}).items())}."
    )
    return part("Domains apart", ["domains", "divergence", "verdict"], rows, note, words=(2,))


def _verdict(one: Found) -> str:
    if one.get("half") is None:
        return "too few blocks"
    return "differ" if one["mean"] > one["half"] else "no difference beyond chance"


def _specialists(audit: Found) -> Part:
    found = sorted(audit.get("specialists") or (), key=lambda one: -one["share"])
    shares = [(one, spread({**one, "mean": one["share"]}, 1, scale=100)) for one in found[:MOST]]
    rows = [[_expert(one), one["domain"], share, f"{one['tokens']:,}"] for one, share in shares]
    note = (
        f"All {len(found)} experts with at least three quarters of their choices in one domain, at equal numbers of "
        "tokens of each, the lower end of the interval included."
        if len(rows) == len(found)
        else f"{len(rows)} of the {len(found)} experts with at least three quarters of their choices in one domain."
    )
    return part("Experts of one domain", ["expert", "domain", "share, %", "choices"], rows, note, words=(1,))


def _tokens(audit: Found) -> Part:
    found = [one for one in audit.get("typical") or () if one["tokens"]]
    shown = sorted(found, key=lambda one: -one["tokens"][0]["lift"])[: 2 * MOST]
    rows = [[_expert(one), ", ".join(map(_token, one["tokens"]))] for one in sorted(shown, key=found.index)]
    note = (
        f"Of the {len(found)} experts with such tokens, the {len(rows)} most particular ones; all are in audit.json. "
        "Of an expert's twenty most frequent tokens, those that it takes the most times as often as it takes any token."
    )
    return part("What experts read", ["expert", "tokens, and how many times as often"], rows, note, words=(1,))


def _coverage(audit: Found) -> Part:
    counts = ("first_tokens", "tokens", "blocks", "at_least")
    rows = [
        ["once" if one["times"] == 1 else f"{one['times']} times", f"{one['reached']:,} of {one['experts']:,}",
         *(formatted(one.get(key), ",") for key in counts)]
        for one in audit.get("coverage") or ()
    ]  # fmt: skip
    header = ["each expert", "reached", "tokens from the start", "tokens of a subset", "its blocks", "at least"]
    note = (
        "How much of this text is needed until every expert that it reaches at all so often has been reached: from the "
        "start, and with the best blocks first (greedy). No choice of fewer blocks than “at least” does it."
    )
    return part("Coverage for calibration", header, rows, note)


def _super(audit: Found) -> Part:
    found = audit.get("super_experts") or ()
    rows = [[_expert(one), spread(one, sign=True), f"{one['peak']:.3g}"] for one in found]
    note = (
        "Change of the loss (nats) on held-out text where an expert gives out nothing; tried are those with the "
        f"largest output (its largest element), or all of a small model. Intervals are corrected for their "
        f"number. {INTERVAL}"
    )
    return part("Super experts", ["without", "loss", "largest output"], rows, note)


def _across(audit: Found) -> Part:
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
    return part("Experts that go together", ["layers", "bits", "pair"], rows, note, words=(2,))


def _expert(one: Found) -> str:
    return f"{short_layer(one['layer'])}, expert {one['expert']}"


def _token(one: Found) -> str:
    return f"{json.dumps(one['text'], ensure_ascii=False)} {one['lift']:.1f}"


def _pair(one: Found) -> str:
    return f"{' and '.join(map(str, one['experts']))}: {one['lift'] or 0:.1f} times, {one['tokens']:,} tokens"


def _k_of(row: Found, audit: Found) -> str:
    return f"{row['top_k'] or NONE}{' (own)' if row['top_k'] == audit.get('top_k') else ''}"


def _numbers(*values: Any) -> list[str]:
    return [formatted(finite(one)) for one in values]
