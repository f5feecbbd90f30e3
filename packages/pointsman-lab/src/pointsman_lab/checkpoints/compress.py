"""compress: a Hugging Face MoE with fewer experts, verified on held-out text beside random prunings of the same size.

The result is the class's own model with a smaller number of experts in its configuration: transformers alone loads it.
No class of transformers 5.24 builds layers of different numbers; `uneven` brings a file of code for those.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pointsman._errors import did_you_mean
from pointsman._values import check_whole
from pointsman.control import set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.hf.top_k import gate_top_k
from pointsman_lab._grid import markdown_table, wrapped
from pointsman_lab.checkpoints.audit.blocks import PARTS, mapped
from pointsman_lab.checkpoints.audit.measure import values_of_k
from pointsman_lab.checkpoints.audit.result import beats_random
from pointsman_lab.checkpoints.audit.run import finite
from pointsman_lab.checkpoints.audit.serving import MACHINES, served
from pointsman_lab.checkpoints.audit.trials import Rows, halves, mean_of, measured, paired
from pointsman_lab.checkpoints.choosing import METHODS, at_random, plan
from pointsman_lab.checkpoints.cutting import Keep, cut, cuttable, distil
from pointsman_lab.checkpoints.text import Conversation, TextBatch, refuse_unknown_tokens, text_batches
from pointsman_lab.report.audit_costs import INTERVAL, spread


@dataclass(frozen=True)
class Compression:
    """The result of `compress`. Losses are nats a text token; "half" is half of a 95 % interval over blocks of text.

    Attributes:
        model: the smaller model; it shares with the original what it keeps besides gates and experts.
        method, experts: the method, and the number of experts that a layer keeps. kept: layer -> groups (`Keep`).
        quality: by k: {"top_k", "original", "compressed", "difference": {"mean", "half"}}, on held-out text.
        domains: domain -> "difference" to the original, and to the mean of the random prunings ("random").
        random: {"losses", "difference"}: random prunings of the same size, healed alike, and this one minus their mean.
        routing: layer -> {"stays": share of the original's choices whose expert is kept, "effective", "dead"}.
        serving: `AuditResult`'s, before and after.
        even: with `uneven`: the loss minus that of the same method with as many experts in every layer; else None.
    """

    model: Any
    method: str
    experts: int
    before: int
    kept: Keep
    quality: Sequence[Mapping[str, Any]]
    domains: Mapping[str, Any]
    random: Mapping[str, Any]
    routing: Mapping[str, Any]
    serving: Mapping[str, Any]
    protocol: Mapping[str, Any]
    even: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the model."""
        found: dict[str, Any] = finite({name: value for name, value in vars(self).items() if name != "model"})
        return found

    def markdown(self) -> str:
        """A summary."""
        change = partial(spread, sign=True)
        rows = [
            [str(row["top_k"]), f"{row['original']:.4f}", f"{row['compressed']:.4f}", change(row["difference"])]
            for row in self.quality
        ]
        parts = [("all", {"difference": self.quality[-1]["difference"], "random": self.random["difference"]})]
        parts += self.domains.items() if len(self.domains) > 1 else ()
        of = [[name, change(one["difference"]), change(one["random"])] for name, one in parts]
        before, after = (self.serving[name]["memory"]["bfloat16"] / 2**20 for name in ("before", "after"))
        stays = sum(one["stays"] for one in self.routing.values()) / len(self.routing)
        costs = [
            [f"{one['batch']}", f"{one['distinct']:.1f} to {its['distinct']:.1f}",
             f"{one['bytes'] / 2**20:.4g} to {its['bytes'] / 2**20:.4g}",
             " to ".join(f"{1e6 * max(of['seconds'].values()):.3g}" for of in (one, its))]
            for one, its in zip(self.serving["before"]["rows"], self.serving["after"]["rows"], strict=True)
        ]  # fmt: skip
        slowest = min(MACHINES, key=lambda name: MACHINES[name][0])
        lines = [
            f"# {self.protocol['model']}: {self.experts} of {self.before} experts a layer, {self.method}", "",
            f"Weights in bf16: {before:,.1f} to {after:,.1f} MiB. "
            + (f"{stays:.1%} of the original's choices keep their expert." if stays < 1 - 1e-9 else
               "Every chosen expert is kept or merged.")
            + ("" if beats_random(self.random["difference"]) else
               " It is not shown to be better than random pruning to this size."), "",
        ]  # fmt: skip
        if self.even is not None:
            numbers = ", ".join(str(len(groups)) for groups in self.kept.values())
            lines += [f"Experts by layer: {numbers}. Loss against {self.experts} in every layer: "
                      f"{change(self.even)}. "
                      "Load the folder with trust_remote_code=True: its uneven.py makes layers of several sizes.",
                      ""]  # fmt: skip
        lines += [
            markdown_table(["k", "original", "compressed", "difference"], rows), "",
            markdown_table(["text", "against the original", "against random pruning"], of), "",
            f"Held-out text, {self.protocol['held_out']:,} tokens; {len(self.random['losses'])} random prunings"
            f"{', distilled alike' if self.protocol['heal'] else ''}. "
            f"{INTERVAL} Intervals are corrected for the number of k, and of texts.", "",
            markdown_table(["batch", "distinct", "MiB a token", "µs"], costs), "",
            "Cost to serve a token (estimate), before and after: experts of a layer that a batch needs, weights read "
            f"in bf16, and the time on {slowest} by roofline.",
        ]  # fmt: skip
        return wrapped("\n".join(lines), 80) + "\n"


def compress(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[str | Conversation] | Mapping[str, Iterable[str | Conversation]],
    *,
    experts: float = 0.5,
    method: str = "reap",
    uneven: bool = False,
    max_tokens: int | None = 50_000,
    length: int = 512,
    batch_size: int = 8,
    random: int = 3,
    heal: int = 0,
    seed: int = 0,
    note: Callable[[str], None] | None = None,
) -> Compression:
    """Prunes or merges the experts of a mixture of experts. The model is not changed.

    Every second row of the text calibrates, the others verify: loss by domain, the curve over k, the routing, all
    paired with the original and with random prunings. Every method but `random` keeps experts with outputs far above
    the others' as they are (`SUPER`).

    Args:
        texts: as `audit` takes them.
        experts: the share of experts to keep, or, from 1, their number in a layer.
        method: one of `METHODS`.
        uneven: layers may keep different numbers, as many as it takes to choose k at least; `experts` is their mean.
        random: the number of random prunings beside it.
        heal: steps of distillation from the original, of gates and experts, on the calibrating text; of the random
            prunings, too.
        note: told what is done.

    Raises:
        ValueError: an unknown method, a number out of range, a class whose experts cannot be cut, by name, or a model
            whose loss is not finite.
    """
    if method not in METHODS:
        raise ValueError(f"compress: method {method!r}: {did_you_mean(method, METHODS)}")
    check_whole("compress: random", random)
    check_whole("compress: heal", heal, 0)
    check_whole("compress: length", length, 2)
    check_whole("compress: batch_size", batch_size)
    check_whole("compress: max_tokens", 1 if max_tokens is None else max_tokens)
    gates, number, least, limits = cuttable(model)
    if limits > 1 and method in ("hc-smoe", "m-smoe"):
        told = f"{limits} groups of experts limit the choice: no merge has a place"
        raise ValueError(f"compress: method={method!r}: {told}")
    if not (0 < experts < 1 or (experts >= 1 and float(experts).is_integer())):
        raise ValueError(f"compress: experts={experts!r}: allowed are a share below 1 or a whole number")
    kept = round(number * experts) if experts < 1 else int(experts)
    if not least <= kept < number or kept % limits:
        steps = "" if limits == 1 else f", multiples of {limits}, its groups"
        allowed = f"allowed are {least} to {number - 1}{steps}"
        raise ValueError(f"compress: experts={experts:g} keeps {kept} of {number}: {allowed}")
    tell = note or (lambda _: None)
    batches, domain_of = _read(model, tokenizer, texts, length, batch_size, max_tokens)
    calibrate, held_out = halves(batches)
    names = [name for name in domain_of[1::2] for _ in range(PARTS)]
    own = gate_top_k(gates[0]).value
    with evaluating(model):
        bases = dict[int, Rows]()
        for k in sorted(k for k in values_of_k(model, None)[1] if k and k <= own):
            with set_top_k(model, k):
                bases[k] = measured(model, held_out)
        if not sum(tokens for _, tokens in bases[own]):
            told = "at least two rows of text that the tokenizer knows are needed"
            raise ValueError(f"compress: there is no held-out text with a loss: {told}")
        if not math.isfinite(loss := mean_of(bases[own])):
            raise ValueError(f"compress: the model's loss is {loss}: it overflows, or its weights are not finite")
        tell(f"calibrates on {sum(int(one.mask.sum()) for one in calibrate):,} tokens")
        align = method == "m-smoe"
        groups, counts = plan(model, gates, calibrate, kept, method, seed, least if uneven else None)
        smaller = cut(model, gates, groups, counts, align)
        equal = cut(model, gates, *plan(model, gates, calibrate, kept, method, seed), align) if uneven else None
        if heal:
            tell(f"distils for {heal} steps, and each random pruning as long")
        healed = partial(distil, model, batches=calibrate, steps=heal)
        smaller, equal = healed(smaller), None if equal is None else healed(equal)
        tell(f"verifies on {sum(int(one.mask.sum()) for one in held_out):,} held-out tokens")
        quality: list[dict[str, Any]] = []
        rows: Rows = ()
        for k, base in bases.items():
            with set_top_k(smaller, k):
                rows = measured(smaller, held_out)
            quality.append({"top_k": k, "original": mean_of(base), "compressed": mean_of(rows),
                            "difference": paired(rows, base, len(bases))})  # fmt: skip
        even = None if equal is None else paired(rows, measured(equal, held_out))
        losses, chance = at_random(model, gates, groups, held_out, random, seed, healed)
        domains = {}
        for name in (kinds := dict.fromkeys(names)):
            places = [place for place, its in enumerate(names) if its == name]
            before, after, at_chance = ([one[place] for place in places] for one in (bases[own], rows, chance))
            domains[name] = {
                "difference": paired(after, before, len(kinds)), "random": paired(after, at_chance, len(kinds))
            }  # fmt: skip
        (loads, first), (new_loads, last) = (served(one, held_out, own) for one in (model, smaller))
    routing = {}
    for gate in gates:
        share, load = (of[gate.layer]["load"] for of in (loads, new_loads))
        stays = sum(share["share"][one] for group in groups[gate.layer] for one in group)
        routing[gate.layer] = {"stays": stays, "effective": load["effective"], "dead": load["dead"]}
    protocol = {
        "model": type(model).__name__, "length": length, "batch_size": batch_size, "max_tokens": max_tokens,
        "heal": heal, "seed": seed, "held_out": sum(tokens for _, tokens in rows),
    }  # fmt: skip
    against, costs = {"losses": losses, "difference": paired(rows, chance)}, {"before": first, "after": last}
    return Compression(smaller, method, kept, number, groups, quality, domains, against, routing, costs, protocol, even)


def _read(
    model: Any, tokenizer: Any, texts: Any, length: int, batch_size: int, max_tokens: int | None
) -> tuple[list[TextBatch], list[str]]:
    """All batches, and the domain of every row."""
    parts = mapped(texts)
    share = None if max_tokens is None else max(1, max_tokens // max(1, len(parts)))
    batches, names = list[TextBatch](), list[str]()
    for name, of in parts.items():
        for batch in text_batches(tokenizer, of, length=length, batch_size=batch_size, max_tokens=share):
            refuse_unknown_tokens(model, int(batch.ids.max()))
            batches.append(batch)
            names += [name] * len(batch.ids)
    if len(names) < 2:
        raise ValueError("compress: the text has fewer than two rows: one calibrates, one verifies")
    return batches, names
