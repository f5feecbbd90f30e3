"""The page's words: title, command, protocol, missing runs, pairing, settings, environment."""

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman_lab._values import finite, flattened
from pointsman_lab.report.series import BINS
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.record import RunRecord
from pointsman_lab.training.settings import DERIVED, NO_EFFECT_ON_TRAINING


def title(comparison: Comparison) -> str:
    """One line: the routers and the data."""
    data = str(_setting(comparison, "data") or "unknown data")
    name = data if len(data) <= 40 else "…" + data[-39:]
    if comparison.single:
        run = next(iter(comparison.runs.values()))
        return f"{run.router} on {name}"
    return f"{len(comparison.routers)} router{'' if len(comparison.routers) == 1 else 's'} on {name}"


def facts(comparison: Comparison, table: ComparisonTable) -> list[tuple[str, str]]:
    """The facts at the head of the page: (name, value)."""
    total = len(comparison.routers) * len(comparison.seeds)
    done = total - len(comparison.missing())
    seeds = ", ".join(map(str, comparison.seeds))
    found: list[tuple[str, Any]] = [
        ("preset", _setting(comparison, "preset")),
        ("steps", _setting(comparison, "steps")),
        ("experts", next((run.num_experts for run in comparison.runs.values() if run.num_experts), None)),
        ("trained with k", _setting(comparison, "train_top_k")),
        ("seed" if len(comparison.seeds) == 1 else "seeds", "" if table.audit else seeds),
        ("runs done", "" if table.audit else f"{done} of {total}"),
        ("measure", f"{table.metric.label}, {table.metric.direction}"),
    ]
    return [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in found if value]


def _setting(comparison: Comparison, name: str) -> Any:
    """The setting; of single runs that differ in it each of its values."""
    sources = [comparison.settings] if comparison.settings.get(name) is not None else [
        run.config for run in comparison.runs.values()
    ]  # fmt: skip
    found = [source[name] for source in sources if source.get(name) is not None]
    every = list(dict.fromkeys(map(str, found)))
    return found[0] if len(every) == 1 else " / ".join(every) or None


def missing(comparison: Comparison, table: ComparisonTable) -> list[str]:
    """The runs that are not finished, a line for each seed and state."""
    found: dict[tuple[int, str], list[str]] = {}
    for router, seed in comparison.missing():
        run = comparison.runs.get((router, seed))
        state = "not begun" if run is None else f"stopped at step {run.last_step():,} of {run.steps or 0:,}"
        if run is not None and run.steps and run.last_step() >= run.steps:
            state = "trained, not evaluated"
        found.setdefault((seed, state), []).append(table.label(router))
    return [f"{', '.join(routers)}, seed {seed}: {state}" for (seed, state), routers in found.items()]


def loss_note(comparison: Comparison) -> str:
    """How the loss curves are averaged."""
    seeds = "mean over the seeds that have reached a step, band from the smallest to the largest; "
    return f"Loss: {seeds if len(comparison.seeds) > 1 else ''}averaged in at most {BINS} bins of equal width."


def findings(comparison: Comparison) -> list[str]:
    """The findings of an audit, a sentence each; [] for other runs."""
    return [str(line) for run in comparison.runs.values() for line in run.config.get("findings") or ()]


def lines(comparison: Comparison) -> list[str]:
    """The evaluation protocol, a line for each group of runs that share it."""
    groups: dict[str, list[RunRecord]] = {}
    for run in comparison.runs.values():
        if run.done:
            groups.setdefault(_protocol_line(run), []).append(run)
    if len(groups) <= 1:
        return list(groups) or ["no run has been evaluated yet"]
    called = _called(comparison)
    told = {line: ", ".join(f"{called[run.router]} (seed {run.seed})" for run in runs) for line, runs in groups.items()}
    return [f"{rows}: {line}" for line, rows in told.items()]


def _called(comparison: Comparison) -> dict[str, str]:
    """What the tables call each row."""
    return {row: comparison.shown.get("names", {}).get(row, row) for row in comparison.routers}


def _protocol_line(run: RunRecord) -> str:
    found = run.evaluation.get("protocol")
    told = dict(found) if isinstance(found, dict) else {}
    tokens = {int(value) for row in run.results().values() if (value := finite(row.get("tokens"))) is not None}
    if tokens:  # those that were scored, in whole segments, not those that were asked for
        told.pop("tokens", None)
    parts = [f"{_words(name)}: {_plain(value)}" for name, value in told.items()]
    if "checkpoint" in run.evaluation:
        parts.append(f"weights: {run.evaluation['checkpoint']}")
    if tokens:
        parts.append(f"tokens: {', '.join(f'{token:,}' for token in sorted(tokens))}")
    return "; ".join(parts)


def pairing(comparison: Comparison) -> list[str]:
    """What all rows share, and which rows cannot be paired fully."""
    if comparison.single:
        return []
    if all(run.is_audit for run in comparison.runs.values()):
        read = {(str(run.config.get("data")), _protocol_line(run)) for run in comparison.runs.values()}
        apart = "These audits read different texts, or read them differently: their figures are not comparable."
        return [apart] if len(read) > 1 else []
    called = _called(comparison)
    told = {name: _of_rows(values, called) for name, values in differing(comparison).items()}
    found = [
        f"{'Apart from what the settings named below change, r' if told else 'R'}ows of one seed see the same batches "
        "in the same order, start from the same weights outside the router, and drop the same activations: each step "
        "seeds the default generator from (seed, step)."
    ]
    random = [called[router] for router in comparison.routers if stochastic(router)]
    if random:
        so = "so that later dropout masks of a step differ from those of the other rows"
        found.append(f"{', '.join(random)}: draws random numbers while training, {so}.")
    from pointsman.routers.frame.entries import BASELINES

    dense = [called[router] for router in comparison.routers if router in BASELINES]
    if dense:
        so = "so that the feed-forward weights and their dropout masks have no counterpart in the other rows"
        found.append(f"{', '.join(dense)}: no experts, {so}.")
    chosen = {key for of in comparison.tuned.values() for key in of if not key.startswith("model.")}
    if other := [f"{_words(name)}: {values}" for name, values in told.items() if name not in chosen]:
        found.append(f"These runs differ in {'; '.join(other)}: their differences are not those of the router alone.")
    if comparison.tuned:
        by_value: dict[str, dict[str, list[str]]] = {}
        for row, of in comparison.tuned.items():
            for key in of.keys() - {"row"}:
                by_value.setdefault(key, {}).setdefault(str(of[key]), []).append(row)
        own = "; ".join(f"{_words(key)}: {_of_rows(by_value[key], called)}" for key in sorted(by_value))
        found.append(f"--tune chose settings of single rows, on seeds of its own. {own}.")
    if comparison.tuned and (left := [called[row] for row in comparison.routers if row not in comparison.tuned]):
        so = "a difference to them may be one of the settings alone"
        found.append(f"{', '.join(left)}: not tuned, among rows that are: {so}.")
    protocols = [run.evaluation.get("protocol") for run in comparison.runs.values() if run.done]
    if any(one != protocols[0] for one in protocols):
        found.append("These runs were evaluated with different protocols: their figures are not comparable.")
    places = {name for name in _PLACE if len({str(run.environment.get(name)) for run in comparison.runs.values()}) > 1}
    if places:
        where = ", ".join(sorted(places))
        so = "times are not comparable, and rounding differs"
        found.append(f"These runs were made on different machines ({where}): {so}.")
    return found


def differing(comparison: Comparison) -> dict[str, dict[str, list[str]]]:
    """The settings of trainings in which runs differ, besides router and seed: name -> value -> its rows."""
    free = {*_NO_SETTINGS, *DERIVED, *NO_EFFECT_ON_TRAINING, "seed", "model.router", "model.vocab_size"}
    found: dict[str, dict[str, list[str]]] = {}
    for run in comparison.runs.values():
        for name, value in () if run.is_audit else flattened(run.config):
            if name not in free:
                rows = found.setdefault(name, {}).setdefault(_plain(value), [])
                rows += [] if run.router in rows else [run.router]
    return {name: values for name, values in found.items() if len(values) > 1}


def _of_rows(values: Mapping[str, Sequence[str]], called: Mapping[str, str]) -> str:
    return ", ".join(f"{value} ({', '.join(called.get(row, row) for row in rows)})" for value, rows in values.items())


_NO_SETTINGS = ("format", "command", "findings")  # entries of config.json that are no settings
_PLACE = ("device", "device_name", "machine", "processor", "threads", "packages")


def stochastic(router: str) -> bool:
    """Whether this router draws random numbers in training (the registry's flag); no for baselines, unknown ones."""
    from pointsman.routers.frame.registry import BASELINES, build_router, split_specs

    try:
        return any(
            build_router(spec, dim=8, num_experts=4, top_k=2, vocab_size=16).training_stochastic
            for spec in split_specs(router)
            if spec not in BASELINES
        )
    except ValueError:
        return False


def settings(comparison: Comparison) -> list[tuple[str, str]]:
    """The settings of the runs: (name in words, value); where rows of one comparison differ, each value with them."""
    source = comparison.settings if not comparison.single else next(iter(comparison.runs.values())).config
    told = ((name, value) for name, value in flattened(source) if value is not None and name not in _NO_SETTINGS)
    different = {} if comparison.single else differing(comparison)
    own = {name: _of_rows(values, _called(comparison)) for name, values in different.items()}
    return [(_words(name), own.get(name) or _plain(value)) for name, value in told]


def environment(comparison: Comparison) -> list[tuple[str, str]]:
    """Versions, device, threads, kernels: (name in words, value), all where runs differ; what each node trained."""
    found: dict[str, list[str]] = {}
    for run in comparison.runs.values():
        for name, value in flattened(run.environment):
            if value is not None and (text := _plain(value)) not in found.setdefault(name, []):
                found[name].append(text)
    trained: dict[str, list[str]] = {}
    for run_name, nodes in comparison.nodes.items():
        for node in dict.fromkeys(nodes):
            left = "" if node == nodes[-1] else " (not to its end)"
            trained.setdefault(f"node {node}", []).append(run_name + left)
    words = [(_words(name), " / ".join(values)) for name, values in found.items() if name != "format"]
    return words + [(node, "; ".join(names)) for node, names in sorted(trained.items())]


def _words(name: str) -> str:
    if name.startswith("origin."):  # of a file or a package, whose name stays as it is
        return name.replace(".", " · ", 1)
    return name.replace("_", " ").replace(".", " · ")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "-"
    return "-" if value is None else str(value)
