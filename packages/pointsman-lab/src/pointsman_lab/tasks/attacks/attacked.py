"""Evaluation on attacked texts: language models and classifiers at any k, and routing fluctuation under attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pointsman.control import named_routers, record_routing, set_top_k
from pointsman.diagnostics.base import map_routing
from pointsman.diagnostics.observe import evaluating
from pointsman.diagnostics.statistics import Fluctuation
from pointsman.routing import Routing
from pointsman_lab.data import EvalStream, Vocabulary
from pointsman_lab.data.catalog import Level
from pointsman_lab.data.task_streams import Encoded, collate
from pointsman_lab.data.vocabulary import IdArray
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.tasks.attacks.attacks import Attack, Attacked, attack_texts
from pointsman_lab.tasks.classification.data import Examples
from pointsman_lab.tasks.classification.evaluation import evaluate_task
from pointsman_lab.tasks.classification.task import cut, end_mark
from pointsman_lab.tasks.language_modelling.evaluation import EvalProtocol, MarkedText, evaluate

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
