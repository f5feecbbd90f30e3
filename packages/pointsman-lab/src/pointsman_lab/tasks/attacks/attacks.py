"""Attacked texts, and `evaluate --attack`: saved runs on clean and attacked texts at every k, and how routing moves.

Chosen words become "AAA", deterministically and at an exact rate, as token ids in the run's vocabulary. At byte level
each symbol is encoded on its own, so that replacing ids equals replacing text before encoding. At word level a word is
a token.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pointsman._errors import RunError
from pointsman.control import named_routers, set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.diagnostics.statistics import Fluctuation
from pointsman.ops.kernels import using
from pointsman.recording import record_routing
from pointsman.routing import Routing
from pointsman_lab._files import read_whole_json, write_whole
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.data.catalog import Level
from pointsman_lab.data.streams import EvalStream
from pointsman_lab.data.vocabulary import IdArray, Vocabulary
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, draws, eval_top_k, map_routing
from pointsman_lab.finetuning.run import identity
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.runs.compact import write_record
from pointsman_lab.runs.comparison import Comparison, read_comparison, read_plan
from pointsman_lab.runs.paths import slug
from pointsman_lab.runs.record import RunRecord
from pointsman_lab.tasks.attacks.table import Attack, AttackTable, attack_tables
from pointsman_lab.tasks.language_modelling.task import EvalProtocol, corpus_of, eval_protocol, evaluate
from pointsman_lab.training.run import Run, runs_at

FORMAT = 1
ROUTING_TOP_K = 2
ROUTING_TOKENS = 512
ROUTING_TEXTS = 64


@dataclass(frozen=True)
class Attacked:
    """Attacked texts.

    Attributes:
        rows: ids of each text [tokens].
        sources: for each text [tokens] int64, the position of each token in the clean text; -1 of what the attack put.
        chosen, candidates: the number of attacked words, and of all words.
    """

    rows: tuple[IdArray, ...]
    sources: tuple[NDArray[np.int64], ...]
    chosen: int
    candidates: int


def attack_texts(rows: Sequence[IdArray], vocabulary: Vocabulary, attack: Attack) -> Attacked:
    """Attacks texts given as ids: exactly round(rate x words) words over all texts."""
    if vocabulary.level == "subword":
        raise RunError("attacks need a run on bytes or words: this one's tokens are subwords")
    spans = [_words(row, vocabulary) for row in rows]
    total = sum(map(len, spans))
    chosen = np.zeros(total, dtype=np.bool_)
    chosen[np.random.default_rng([attack.seed, 0]).permutation(total)[: round(attack.rate * total)]] = True
    new, missing = vocabulary.encode_compact(attack.word)
    if missing and not len(_words(new, vocabulary)):
        raise RunError(f"the attack puts {attack.word!r} for words; of this run's bytes that would be white space")
    picked = np.split(chosen, np.cumsum([len(each) for each in spans])[:-1])
    made = [_swapped(row, each[own], new) for row, each, own in zip(rows, spans, picked, strict=True)]
    return Attacked(tuple(row for row, _ in made), tuple(source for _, source in made), int(chosen.sum()), total)


def _words(row: IdArray, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """[n, 2]: start and end (exclusive) of each word."""
    if vocabulary.level == "word":
        end = -1 if vocabulary.end_of_line_id is None else vocabulary.end_of_line_id
        places = np.flatnonzero(row != end)
        return np.stack([places, places + 1], 1)
    spaces = np.array([symbol < 128 and chr(symbol).isspace() for symbol in map(int, vocabulary.symbols)])
    inside = np.concatenate([[False], ~spaces[row], [False]]).astype(np.int8)
    edges = np.diff(inside)
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], 1)


def _swapped(row: IdArray, spans: NDArray[np.int64], new: IdArray) -> tuple[IdArray, NDArray[np.int64]]:
    """The text with these spans replaced, and the source of each token."""
    places = np.arange(len(row), dtype=np.int64)
    put = np.full(len(new), -1, dtype=np.int64)
    pieces, sources, done = [], [], 0
    for start, stop in spans.tolist():
        pieces += [row[done:start], new]
        sources += [places[done:start], put]
        done = stop
    return np.concatenate([*pieces, row[done:]]).astype(row.dtype), np.concatenate([*sources, places[done:]])


def run_attacks(values: argparse.Namespace, device: str) -> int:
    """Evaluates a run or every run of a comparison on clean and attacked texts; prints and saves.

    Attacks that a run's file has are not evaluated again, further ones are added.
    """
    attacks = [Attack(rate, values.attack_seed) for rate in values.attack_rate]
    single, name = read_plan(values.run) is None, ""
    with Display() as display, stop_on_signals() as stop:
        how = EvaluationContext(progress=display, stop=stop)
        for run in runs_at(values.run, device, display.note):
            name, about, asked = _asked(run, values)
            file = (values.out if single and values.out else run.path) / f"{name}.json"
            record = _held(file, about)
            if not record and file.exists():
                display.note(f"{file} is made anew: its weights, text or settings were others")
            had = record.get("asked", {}).get("attacks", [])
            if left := [attack for attack in attacks if attack.to_dict() not in had]:
                new = run_under_attack(run, left, how=how, data_progress=display.data, **asked)
                record = _with(_held(file, about), new, about, left)  # what others have added meanwhile stays
                write_whole(file, json.dumps(record, indent=2) + "\n")
    if single:
        read = RunRecord(values.run, run.config.model.router, run.config.seed, {})
        one = Comparison(values.run, {}, [read.router], [read.seed], {(read.router, read.seed): read})
        print(AttackTable.of(one, file.stem, [(read, record)]).text())
        print(f"saved: {file}", file=sys.stderr)
        return 0
    wanted = name.replace("attacks-", "attack-", 1)
    [table] = [one for one in attack_tables(read_comparison(values.run)) if one.name == wanted]
    saved = table.write(values.out or values.run)
    write_record(values.run)
    print(table.text())
    print(f"saved: {saved[0]}", file=sys.stderr)
    return 0


def _held(file: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The record in a file; {} where it is of other weights, text or settings, or there is none."""
    record = read_whole_json(file) or {}
    asked = {key: value for key, value in record.get("asked", {}).items() if key != "attacks"}
    return record if asked == about else {}


def _with(
    record: Mapping[str, Any], new: Mapping[str, Any], about: Mapping[str, Any], attacks: Sequence[Attack]
) -> dict[str, Any]:
    """A record with what `run_under_attack` found for these attacks, where it has not got it."""
    had = record.get("asked", {}).get("attacks", [])
    own = [attack.to_dict() for attack in attacks if attack.to_dict() not in had]

    def is_new(row: Mapping[str, Any]) -> bool:
        attack = row.get("attack")
        return not had if attack is None else any(one.items() <= attack.items() for one in own)

    kept = {name: [*record.get(name, ()), *filter(is_new, new[name])] for name in ("results", "routing")}
    return {**new, **kept, "asked": {**about, "attacks": had + own}}


def _asked(run: Run, values: argparse.Namespace) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The name of a run's file, what it answers besides its attacks, and the arguments of `run_under_attack`."""
    corpus, split = corpus_of(run, values.data), values.split or "test"
    tokens = run.config.eval_tokens if values.eval_tokens is None else values.eval_tokens
    tokens = None if tokens == "all" else tokens
    about = {
        "top_k": sorted(values.top_k or run.config.eval_top_k), "checkpoint": f"step-{run.step}",
        "weights": identity(run)["sha256"], "split": split, "fingerprint": corpus.fingerprint,
        "protocol": asdict(eval_protocol(run.config, tokens)),
    }  # fmt: skip
    asked = {"data": values.data, "split": split, "top_k": values.top_k, "tokens": tokens}
    return f"attacks-{values.attack}-{slug(corpus.name)}-{split}", about, asked


def attack_part(
    tokens: IdArray, vocabulary: Vocabulary, protocol: EvalProtocol, attack: Attack
) -> tuple[list[IdArray], Attacked]:
    """The texts that an evaluation reads, clean and attacked: an attack's rate refers to exactly these texts."""
    stream = EvalStream(tokens, protocol.batch_size, protocol.segment_length, budget=protocol.tokens)
    return stream.texts, attack_texts(stream.texts, vocabulary, attack)


def evaluate_attack(
    model: TransformerXL, attacked: Attacked, level: Level, attack: Attack, how: EvaluationContext = PLAIN, **asked: Any
) -> list[dict[str, Any]]:
    """Evaluates a language model on attacked texts (`attack_part`), at every k; `asked`: arguments of `evaluate`.

    Returns:
        The results of `evaluate`, each with "attack": {"kind", "rate", "seed", "word", "chosen", "candidates"}.
    """
    how = replace(how, name=f"attack {attack.rate:g}")
    about = {**attack.to_dict(), "chosen": attacked.chosen, "candidates": attacked.candidates}
    return [{**one, "attack": dict(about)} for one in evaluate(model, attacked.rows, level, how=how, **asked)]


@torch.no_grad()
def change_under_attack(model: TransformerXL, clean: Sequence[IdArray], attacked: Attacked) -> dict[str, Any]:
    """Routing fluctuation between clean and attacked texts, over the tokens that the attack did not change.

    At k = 2, of a router with one k at that. Each text is read on its own, without memory: the first 64 texts, up to
    512 tokens of each.

    Returns:
        {"top_k", "texts", "layers": {layer: result of `Fluctuation`}}; no layers for a model without routers, or
        whose routers draw.
    """
    layers = {} if draws(model) else {name: Fluctuation() for name, _ in named_routers(model)}
    (k,) = eval_top_k(model, (min(ROUTING_TOP_K, model.config.num_experts),))
    found = {"top_k": k or model.config.num_experts, "texts": (texts := min(ROUTING_TEXTS, len(clean)))}
    if not layers:
        return {**found, "layers": {}}
    with evaluating(model, 0), set_top_k(model, k) if k else nullcontext():
        for index in range(texts):
            before, after = (row[:ROUTING_TOKENS] for row in (clean[index], attacked.rows[index]))
            sources = attacked.sources[index][: len(after)]
            places = np.flatnonzero((sources >= 0) & (sources < len(before)))
            if not len(places):
                continue
            one, two = _routings(model, before), _routings(model, after)
            for name, fluctuation in layers.items():
                fluctuation.update(_rows(one[name], sources[places]), _rows(two[name], places))
    return {**found, "layers": {name: fluctuation.result() for name, fluctuation in layers.items()}}


def _routings(model: TransformerXL, row: IdArray) -> dict[str, Routing]:
    ids = torch.from_numpy(row.astype(np.int64))[None].to(next(model.parameters()).device)
    with record_routing(model) as records:
        model.encode(ids)
    return records


def _rows(routing: Routing, places: Any) -> Routing:
    return map_routing(routing, lambda tensor: tensor[torch.as_tensor(places, device=tensor.device)])


def run_under_attack(
    run: Run,
    attacks: Sequence[Attack],
    *,
    data: str | None = None,
    split: str = "test",
    top_k: Sequence[int] | None = None,
    tokens: int | None = None,
    how: EvaluationContext = PLAIN,
    data_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluates a language model on clean texts and under each attack; attacked tokens count as targets.

    Returns:
        {"format", "name", "checkpoint", "protocol", "results", "routing"}: `results` are those of `evaluate`, then
        for each attack those of `evaluate_attack`; `routing` is `change_under_attack` for each attack.
    """
    corpus = corpus_of(run, data, data_progress)
    text, protocol = corpus.split(split), eval_protocol(run.config, tokens)
    asked: dict[str, Any] = {"split": split, "top_k": top_k or run.config.eval_top_k, "protocol": protocol}
    asked["how"] = replace(how, precision=run.autocast())
    level, routing = run.vocabulary.level, []
    with using(run.config.kernels):
        results = evaluate(run.model, text, level, **asked)
        for attack in attacks:
            clean, attacked = attack_part(text, run.vocabulary, protocol, attack)
            results += evaluate_attack(run.model, attacked, level, attack, **asked)
            if run.sparse:
                with run.autocast():
                    change = change_under_attack(run.model, clean, attacked)
                routing.append({"attack": attack.to_dict(), **change})
    about = {**asdict(protocol), "data": corpus.description, "fingerprint": corpus.fingerprint}
    about["attacked_targets"] = "count"
    return {
        "format": FORMAT, "name": slug(corpus.name), "checkpoint": f"step-{run.step}", "protocol": about,
        "results": results, "routing": routing,
    }  # fmt: skip
