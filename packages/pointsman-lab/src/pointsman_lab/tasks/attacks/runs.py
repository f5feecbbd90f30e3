"""Attacks on saved runs: results on clean and attacked texts at every k, and routing fluctuation under attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.ops.kernels import using
from pointsman_lab.data.vocabulary import IdArray
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.progress import Progress, Stop
from pointsman_lab.runs.paths import slug
from pointsman_lab.tasks.attacks.attacked import (
    attack_examples,
    attack_part,
    change_under_attack,
    evaluate_attack,
    evaluate_task_attack,
)
from pointsman_lab.tasks.attacks.attacks import Attack, Attacked
from pointsman_lab.tasks.classification.evaluation import evaluate_task
from pointsman_lab.tasks.classification.task import Classification, encode_examples, texts_of
from pointsman_lab.tasks.language_modelling.evaluation import evaluate
from pointsman_lab.tasks.language_modelling.task import corpus_of, eval_protocol
from pointsman_lab.training.run import Run

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
