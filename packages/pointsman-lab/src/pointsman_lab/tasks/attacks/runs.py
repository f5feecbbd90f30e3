"""Attacks on saved runs: results on clean and attacked texts at every k, and routing fluctuation under attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from pointsman._errors import RunError
from pointsman.control import named_routers, set_top_k
from pointsman.diagnostics.base import map_routing
from pointsman.diagnostics.observe import evaluating
from pointsman.diagnostics.statistics import Fluctuation
from pointsman.ops.kernels import using
from pointsman.recording import record_routing
from pointsman.routing import Routing
from pointsman_lab.data.catalog import Level
from pointsman_lab.data.streams import EvalStream
from pointsman_lab.data.task_streams import Encoded, collate
from pointsman_lab.data.vocabulary import IdArray, Vocabulary
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.progress import Progress, Stop
from pointsman_lab.runs.paths import slug
from pointsman_lab.tasks.attacks.attacks import Attack, Attacked, attack_texts
from pointsman_lab.tasks.classification.data import Examples
from pointsman_lab.tasks.classification.task import (
    Classification,
    cut,
    encode_examples,
    end_mark,
    evaluate_task,
    texts_of,
)
from pointsman_lab.tasks.language_modelling.evaluation import EvalProtocol, MarkedText, evaluate
from pointsman_lab.tasks.language_modelling.task import corpus_of, eval_protocol
from pointsman_lab.training.run import Run

ROUTING_TOKENS = 512
ROUTING_TEXTS = 64


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
        The results of `evaluate`, with "unmarked" (without attacked tokens as targets) and "attack": {"kind", "rate",
        "seed", "word", "chosen", "candidates"}.
    """
    text = MarkedText(attacked.rows, attacked.marks)
    return _described(attack, attacked, evaluate(model, text, level, how=_named(how, attack), **asked))


def attack_examples(
    examples: Examples, vocabulary: Vocabulary, max_length: int, attack: Attack
) -> tuple[Encoded, list[IdArray], Attacked]:
    """Examples with attacked texts, the clean ids, and the attacked ids. End marks are not attacked."""
    clean = [vocabulary.encode_compact(text)[0] for text in examples.texts]
    attacked = attack_texts(clean, vocabulary, attack)
    mark = end_mark(vocabulary)
    rows = tuple(cut(row, mark, max_length) for row in attacked.rows)
    truncated = sum(len(row) + len(mark) > max_length for row in attacked.rows)
    return Encoded(rows, np.array(examples.labels, dtype=np.int64), truncated), clean, attacked


def evaluate_task_attack(
    model: Classifier,
    encoded: Encoded,
    attacked: Attacked,
    attack: Attack,
    how: EvaluationContext = PLAIN,
    **asked: Any,
) -> list[dict[str, Any]]:
    """Evaluates a classifier on attacked texts (`attack_examples`), at every k; `asked`: those of `evaluate_task`.

    Returns:
        The results of `evaluate_task`, each with "attack" as of `evaluate_attack`.
    """
    return _described(attack, attacked, evaluate_task(model, encoded, how=_named(how, attack), **asked))


def _named(how: EvaluationContext, attack: Attack) -> EvaluationContext:
    return replace(how, name=f"attack {attack.kind} {attack.rate:g}")


def _described(attack: Attack, attacked: Attacked, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    about = {**attack.to_dict(), "chosen": attacked.chosen, "candidates": attacked.candidates}
    return [{**result, "attack": dict(about)} for result in results]


@torch.no_grad()
def change_under_attack(
    model: TransformerXL, clean: Sequence[IdArray], attacked: Attacked, *, top_k: int
) -> dict[str, Any]:
    """Routing fluctuation between clean and attacked texts, over the tokens that the attack did not change.

    Each text is read on its own, without memory: the first 64 texts, up to 512 tokens of each.

    Args:
        model: a language model, or a classifier's `backbone`.
        clean: ids of the texts.
        attacked: the result of `attack_texts` for them.
        top_k: k.

    Returns:
        {"top_k", "texts", "layers": {layer: result of `Fluctuation`}}; no layers for a model without routers.
    """
    names = [name for name, _ in named_routers(model)]
    layers = {name: Fluctuation() for name in names}
    texts = min(ROUTING_TEXTS, len(clean))
    if names:
        with evaluating(model, 0), set_top_k(model, top_k):
            for index in range(texts):
                before, after = (row[:ROUTING_TOKENS] for row in (clean[index], attacked.rows[index]))
                sources = attacked.sources[index][: len(after)]
                places = np.flatnonzero((sources >= 0) & (sources < len(before)))
                if not len(places):
                    continue
                one, two = _routings(model, before), _routings(model, after)
                for name, fluctuation in layers.items():
                    fluctuation.update(_rows(one[name], sources[places]), _rows(two[name], places))
    results = {name: fluctuation.result() for name, fluctuation in layers.items()}
    return {"top_k": top_k, "texts": texts, "layers": results}


def _routings(model: TransformerXL, row: IdArray) -> dict[str, Routing]:
    device = next(model.parameters()).device
    batch = collate(Encoded((row,), np.zeros(1, dtype=np.int64), 0), np.zeros(1, dtype=np.int64), device)
    with record_routing(model) as records:
        model.encode(batch.tokens)
    return records


def _rows(routing: Routing, places: Any) -> Routing:
    index = torch.as_tensor(places, device=routing.experts.device)
    return map_routing(routing, lambda tensor: tensor[index])


FORMAT = 1
ROUTING_TOP_K = 2

Budget = int | None | Literal["run"]
"""Tokens to score: a number, None = all, "run" = as in the run's settings."""


def run_under_attack(
    run: Run,
    attacks: Sequence[Attack],
    *,
    data: str | None = None,
    split: str = "test",
    top_k: Sequence[int] | None = None,
    budget: Budget = "run",
    watch: Progress | None = None,
    stop: Stop | None = None,
    data_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluates a language model on clean texts and under each attack.

    Args:
        run: from `load_run`.
        attacks: applied to the texts of the clean evaluation.
        data: other data than the run's, encoded with the run's vocabulary.
        split, top_k, budget: of the evaluation; top_k None = the run's.

    Returns:
        {"format", "name", "checkpoint", "protocol", "results", "routing"}: `results` are those of `evaluate`, then
        for each attack those of `evaluate_attack`; `routing` is `change_under_attack` at k = 2 for each attack.
    """
    corpus = corpus_of(run, data, data_progress)
    tokens = corpus.split(split)
    protocol = eval_protocol(run.config, run.config.eval_tokens if budget == "run" else budget)
    values = run.config.eval_top_k if top_k is None else tuple(top_k)
    asked: dict[str, Any] = {"split": split, "top_k": values, "protocol": protocol}
    asked["how"] = EvaluationContext(run.autocast(), watch, stop)
    level, routing = run.vocabulary.level, []
    with using(run.kernels):
        results = evaluate(run.model, tokens, level, **asked)
        for attack in attacks:
            clean, attacked = attack_part(tokens, run.vocabulary, protocol, attack)
            results += evaluate_attack(run.model, attacked, level, attack, **asked)
            routing += _routing(run, run.model, clean, attacked, attack)
    about = {**protocol.to_dict(), "data": corpus.description, "fingerprint": corpus.fingerprint}
    return _record(run, corpus.name, about, results, routing)


def finetuned_under_attack(
    run: Run,
    attacks: Sequence[Attack],
    *,
    split: str | None = None,
    top_k: Sequence[int] | None = None,
    budget: Budget = "run",
    watch: Progress | None = None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Evaluates a classifier on its task: clean texts and each attack.

    Args:
        run: from `load_finetuned`.
        split: the part that is read; None: the reported one.
        budget: tokens to read, in whole texts.

    Returns:
        As `run_under_attack`; results are those of `evaluate_task` and `evaluate_task_attack`.

    Raises:
        RunError: the task has no such part.
    """
    task, config = texts_of(run), run.config
    split = split or task.reported
    if split not in task.splits:
        raise RunError(f"the task {task.name} has no {split} part; it has: {', '.join(task.splits)}")
    values = config.eval_top_k if top_k is None else tuple(top_k)
    length = config.segment_length
    every = encode_examples(task.splits[split], run.vocabulary, length)
    tokens = config.eval_tokens if budget == "run" else budget
    places = every.within(tokens)
    examples = task.splits[split].take(places)
    asked: dict[str, Any] = {"split": split, "top_k": values, "batch_size": config.eval_batch_size}
    asked["how"] = EvaluationContext(run.autocast(), watch, stop)
    routing = []
    with using(run.kernels):
        results = evaluate_task(run.model, every.take(places), **asked)
        for attack in attacks:
            encoded, clean, attacked = attack_examples(examples, run.vocabulary, length, attack)
            results += evaluate_task_attack(run.model, encoded, attacked, attack, **asked)
            routing += _routing(run, run.model.backbone, clean, attacked, attack)
    about = Finetuning(
        run.finetuning["task"], freeze=tuple(run.finetuning["freeze"]), balance=run.finetuning["balance"],
        pooling=run.finetuning["pooling"], from_scratch=run.finetuning["from_scratch"],
    )  # fmt: skip
    judged = Classification(task, about, run.vocabulary, None, reported=split)
    protocol = judged.protocol(replace(config, eval_tokens=tokens))
    return _record(run, task.name, {**protocol, "data": task.description}, results, routing)


def _routing(
    run: Run, model: TransformerXL, clean: Sequence[IdArray], attacked: Attacked, attack: Attack
) -> list[dict[str, Any]]:
    """The change of the routing under this attack; [] for a model without routers."""
    if not any(True for _ in named_routers(model)):
        return []
    top_k = min(ROUTING_TOP_K, run.config.model.num_experts)
    return [{"attack": attack.to_dict(), **change_under_attack(model, clean, attacked, top_k=top_k)}]


def _record(run: Run, name: str, protocol: dict[str, Any], results: list[Any], routing: list[Any]) -> dict[str, Any]:
    found = {"protocol": protocol, "results": results, "routing": routing}
    return {"format": FORMAT, "name": slug(name), "checkpoint": f"step-{run.step}", **found}
