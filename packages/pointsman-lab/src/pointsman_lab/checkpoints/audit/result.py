"""The result of an audit: as a dict, its findings, and as a run directory that `pointsman report` reads."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pointsman_lab._files import disk_errors, scratch_folder, sync_folder, write_synced
from pointsman_lab._grid import wrapped
from pointsman_lab.checkpoints.audit.sample import Sample, explorer
from pointsman_lab.intervals import smallest_within
from pointsman_lab.report.audits import HOT, main_parts
from pointsman_lab.report.series import short_layer

FORMAT = 1
TOLERANCE = 0.01
"""The cheapest k is the smallest k whose loss exceeds that at the model's own k by at most this share."""
LARGEST = 700.0  # nats; exp of a larger loss overflows a float


@dataclass
class AuditResult:
    """The result of `audit`. Losses are nats per text token; `pointsman.diagnostics` defines all other figures.

    "half" is half the width of a 95 % interval over blocks of text (rows of tokens); None below three blocks.
    A "difference" is to the own k, paired by quarters of rows, its interval corrected for the number of values of k.

    Attributes:
        model, parameters: the class's name, and its number of parameters.
        top_k: the model's own k; None if the class stores none.
        tokens: the number of tokens read of each kind: text, special, template, padding.
        quality: by k: {"top_k", "loss", "half", "difference": {"mean", "half"}, "perplexity", "tokens", "domains",
            "routers": {layer: {"entropy", "entropy_std", "load"}}}
        layers: layer -> its diagnostics at the model's own k ("entropy", "margin", "load", "co_activation", "collapse",
            "specialisation"), "apart" (entropy and load of the other kinds of token), "agreement" (routing at other k),
            "bfloat16" (the gate in bf16 against float32, on the same inputs) and, with `against`, "fluctuation";
            "router": the spec of the router with the same choice and weights, None if there is none here; "without":
            then why;
            "shared_experts": the width of shared experts, in widths of one expert.
        analyses: "domains" (tokens of each), "typical" (tokens that an expert takes more than others do), "divergence"
            (of loads between domains, bits), "specialists" (experts that serve one domain), "coverage",
            "super_experts", "prunings" (of several sizes, beside random ones), "across" (co-activation with the next
            layer), "schedules" (k by layer), "serving" (costs by k), "answers" (tokens to an answer by k),
            "placement" and "cache" (`pointsman_lab.traces.placement`).
        against: {"loss", "half", "difference"} of the other checkpoint.
        protocol: the settings of the measurement.
        notes: what could not be measured, and why.
    """

    model: str
    parameters: int
    top_k: int | None
    tokens: Mapping[str, int]
    quality: Sequence[Mapping[str, Any]]
    layers: Mapping[str, Mapping[str, Any]]
    protocol: Mapping[str, Any]
    notes: Sequence[str]
    analyses: Mapping[str, Any] = field(default_factory=dict)
    against: Mapping[str, Any] | None = None
    sample: Sample | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON values for `json.dumps(allow_nan=False)`, without the sample."""
        names = ("model", "parameters", "top_k", "tokens", "quality", "layers", "against", "protocol", "notes")
        own = {name: getattr(self, name) for name in names}
        return {"format": FORMAT, **own, **self.analyses, "findings": self.findings()}

    def cheapest_top_k(self, tolerance: float = TOLERANCE) -> int | None:
        """The smallest measured k whose loss is, interval included, at most (1 + tolerance) times that at the own k."""
        loss = self._loss()
        if self.top_k is None or loss is None:
            return None
        return min(
            int(row["top_k"])
            for row in self.quality
            if row["top_k"] == self.top_k or ((rise := _most(row)) is not None and rise <= tolerance * loss)
        )

    def dead(self) -> dict[str, list[int]]:
        """layer -> experts that no text token chose."""
        return {name: layer["load"]["dead"] for name, layer in self.layers.items() if layer["load"]["dead"]}

    def hot(self) -> dict[str, list[int]]:
        """layer -> experts with more than three times the load under uniform routing."""
        found = {}
        for name, layer in self.layers.items():
            loads = [(part or 0.0) * layer["num_experts"] for part in layer["load"]["share"]]
            found[name] = [expert for expert, load in enumerate(loads) if load > HOT]
        return {name: experts for name, experts in found.items() if experts}

    def findings(self) -> list[str]:
        """The main results, one sentence each."""
        said = self._routers()
        if (guess := self.guessing()) is not None:
            return [*said, f"The loss is that of guessing (ln of the vocabulary, {guess:.4f}): text of this kind is "
                    "unknown to the model, and nothing is said of k or of experts that could go.",
                    *self._loads()]  # fmt: skip
        cheapest = self.cheapest_top_k()
        if cheapest is not None and self.top_k is not None and cheapest < self.top_k:
            margin = f"at most {TOLERANCE:.0%} of the loss at k = {self.top_k}, interval included"
            said.append(f"k = {cheapest} costs {margin}.")
        if lower := [row for row in self.quality if (most := _most(row)) is not None and most < 0]:
            best = min(lower, key=lambda row: row["loss"])
            gain = best["difference"]
            by = f"{-gain['mean']:.4f} ± {gain['half']:.4f} nats a token"
            said.append(f"The loss at k = {best['top_k']} is lower than at k = {self.top_k} by {by}.")
        elif len(self.quality) > 1 and self._loss() is not None:
            said.append("No other k has a lower loss beyond its interval.")
        tried = [one for one in self.analyses.get("schedules", ()) if len(set(one["ks"].values())) > 1 and one["kept"]]
        one = min(tried, key=lambda row: (row["mean_k"], row["share"]), default=None)
        if one is not None and self.top_k and one["mean_k"] < min(self.top_k, cheapest or self.top_k):
            ks = [str(k) for k in one["ks"].values()]
            shown = ", ".join(ks if len(ks) <= 12 else [*ks[:12], "…"])
            said.append(f"With k by layer ({shown}; mean {one['mean_k']:.3g}) the loss changes by {_changes(one)}.")
        said += self._prunings()
        for one in self.analyses.get("answers", ()):
            times = one["times"] or {}
            if times.get("half") is not None and abs(times["mean"] - 1) > times["half"]:
                spent = f"{times['mean']:.2f} ± {times['half']:.2f} times the tokens of k = {self.top_k} on the task"
                reached = f"it reaches {one['reached']['mean']:.1%} of the answers"
                said.append(f"k = {one['top_k']} spends {spent}; {reached}.")
        return said + self._loads()

    def guessing(self) -> float | None:
        """ln of the vocabulary, where the loss at the own k is not below it, interval included."""
        size, loss = self.protocol.get("vocabulary") or 0, self._loss()
        half = next((row["half"] for row in self.quality if row["top_k"] == self.top_k), None)
        return math.log(size) if size and loss is not None and loss + (half or 0.0) >= math.log(size) else None

    def _prunings(self) -> list[str]:
        tried = self.analyses.get("prunings") or ()
        if one := smallest_within(tried):
            how = "pruned" if one["method"] == "reap" else "merged"
            worth = "" if beats_random(one["random"]) else ", not shown to be better than random pruning"
            fewer = f"With {one['kept']} of {one['experts']} experts a layer ({how} by {one['method']})"
            return [f"{fewer} the loss changes by {_changes(one)}{worth}."]
        most = max((one["kept"] for one in tried), default=0)
        return [f"No pruning or merge to {most} of {tried[0]['experts']} experts a layer, or fewer, is shown to keep "
                f"the loss within {TOLERANCE:.0%}."] if tried else []  # fmt: skip

    def _loads(self) -> list[str]:
        said = list[str]()
        hot = "got over three times the load of uniform routing"
        apart = [one for one in self.analyses.get("divergence") or () if one["half"] and one["mean"] > one["half"]]
        if apart:
            one, serve = max(apart, key=lambda row: row["mean"]), len(self.analyses["specialists"])
            bits = f"{one['mean']:.3f} ± {one['half']:.3f} bits, 1 at most"
            serving = f"{serve} expert{' serves' if serve == 1 else 's serve'} one domain"
            said.append(f"Loads differ most between {' and '.join(one['domains'])}: {bits}; {serving}.")
        for one in (self.analyses.get("coverage") or ())[-1:]:
            if one["reached"] and one["tokens"]:
                first = "" if one["first_tokens"] == one["tokens"] else f" (its first {one['first_tokens']:,} do)"
                reach = f"reach {one['reached']:,} of {one['experts']:,} experts {one['times']} times each"
                said.append(f"{one['tokens']:,} tokens of this text {reach}{first}.")
        for what, found in (("got no text token", self.dead()), (hot, self.hot())):
            if found:
                count = sum(len(experts) for experts in found.values())
                layer, experts = next(iter(found.items()))
                shown = ", ".join(map(str, experts[:5])) + (", …" if len(experts) > 5 else "")
                several = f"{_counted(count, 'expert')} in {_counted(len(found), 'layer')}"
                said.append(f"{several} {what} (in {short_layer(layer)}: {shown}).")
        changed = {name: layer["bfloat16"]["sets"] or 0 for name, layer in self.layers.items() if "bfloat16" in layer}
        if changed and changed[worst := max(changed, key=changed.__getitem__)]:
            share, where = changed[worst], short_layer(worst)
            said.append(f"In bf16 up to {share:.2%} of the tokens choose other experts ({where}).")
        moved = {name: of["fluctuation"]["top1"] or 0 for name, of in self.layers.items() if "fluctuation" in of}
        if moved:
            worst = max(moved, key=moved.__getitem__)
            said.append(f"Up to {moved[worst]:.1%} of the tokens changed their first expert ({short_layer(worst)}).")
        return said

    def _routers(self) -> list[str]:
        layers = self.layers.values()
        kinds = Counter((of.get("router"), of.get("without"), of.get("shared_experts") or 0.0) for of in layers)
        sentences = []
        for (spec, why, shared), count in kinds.items():
            none = f"a router without a counterpart here ({why})" if why else "a router without a counterpart here"
            router = none if spec is None else f"{spec}, as this library spells it"
            beside = f", with {_counted(shared, 'shared expert')}" if shared else ""
            sentences.append(f"Router of {_counted(count, 'layer')}: {router}{beside}.")
        return sentences

    def _loss(self) -> float | None:
        return next((row["loss"] for row in self.quality if row["top_k"] == self.top_k), None)

    def markdown(self) -> str:
        """What was found, the loss at every k and the routing of every layer, as on the page."""
        found = self.to_dict()
        read = ", ".join(f"{count:,} {kind}" for kind, count in self.tokens.items() if count)
        lines = [f"# Audit of {self.model}", "", f"{self.parameters:,} parameters; tokens read: {read}.", ""]
        lines += [f"- {sentence}" for sentence in found["findings"]]
        for part in main_parts(found):
            lines += ["", f"## {part['title']}", "", part["grid"].markdown(), "", part["note"]]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return wrapped("\n".join(lines), 80) + "\n"

    def save(self, directory: str | Path, data: str = "texts", command: str | None = None) -> Path:
        """Writes audit.json, audit.md and the files of a run directory that `pointsman report` reads, all or none.

        Args:
            data: the name of the texts on the page.
            command: the command line of this audit, for the page.
        """
        folder = Path(directory)
        experts = max(layer["num_experts"] for layer in self.layers.values())
        results = []
        for row in self.quality:
            low = high = None
            if row["half"] is not None and row["loss"] + row["half"] <= LARGEST:
                low, high = (math.exp(row["loss"] + sign * row["half"]) for sign in (-1, 1))
            results.append(
                {"split": "test", "top_k": row["top_k"] or 1, "nats": row["loss"], "metric": "perplexity",
                 "low": low, "high": high, "value": row["perplexity"], "tokens": row["tokens"],
                 "routers": row["routers"]}
            )  # fmt: skip
        config = {
            "format": 1,
            "model": {"router": self.model, "num_experts": experts},
            "data": data,
            "seed": 0,
            "command": command or "pointsman_lab.checkpoints.audit(model, tokenizer, texts)",
            "findings": self.findings(),
        }
        read = {"tokens": self.tokens["text"], "split": data, "top_k": self.top_k}
        diagnostics = {"protocol": read, "layers": self.layers, "against": {}, "history": [], "consistency": {}}
        files: dict[str, Any] = {
            "audit.json": self.to_dict(),
            "evaluation.json": {"format": 1, "protocol": dict(self.protocol), "results": results},
            "diagnostics.json": {"format": 1, **diagnostics},
            "explorer.json": explorer(self.sample, self.model, self.layers, self.top_k),
            "config.json": config,
        }
        texts = {name: json.dumps(of, allow_nan=False) + "\n" for name, of in files.items() if of is not None}
        texts = {"audit.md": self.markdown(), **texts}
        with disk_errors(folder, "the audit was not written"), scratch_folder(folder) as scratch:
            for name, text in texts.items():
                write_synced(scratch / name, text.encode())
            for name in ("config.json", *(files.keys() - texts)):  # of an earlier audit
                (folder / name).unlink(missing_ok=True)
            for name in texts:  # config.json last: what a kill leaves is no audit, not one of two
                (scratch / name).replace(folder / name)
            sync_folder(folder)
        return folder


def beats_random(difference: Mapping[str, Any]) -> bool:
    """Whether a loss minus that of random prunings is below 0, interval included."""
    return difference["half"] is not None and difference["mean"] + difference["half"] < 0


def _counted(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _changes(one: Mapping[str, Any]) -> str:
    return f"{one['share']:+.2%} ± {one['share_half']:.2%} on held-out text"


def _most(row: Mapping[str, Any]) -> float | None:
    """The upper end of a row's difference to the own k; None without an interval."""
    change = row["difference"] or {}
    return None if change.get("half") is None else float(change["mean"] + change["half"])
