"""evaluation.json of a language model: its content, and whether it fits the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pointsman.control import named_routers
from pointsman.lab.data import Corpus
from pointsman.lab.evaluation.language_model import EvalProtocol
from pointsman.lab.runs import evaluation
from pointsman.lab.training.config import RunConfig
from pointsman.routers.registry import is_baseline


def eval_protocol(config: RunConfig, tokens: int | None) -> EvalProtocol:
    """How a run's settings evaluate, with at most `tokens` targets."""
    return EvalProtocol(config.eval_batch_size, config.eval_segment_length, config.eval_memory_length, tokens)


def evaluation_record(
    config: RunConfig,
    step: int,
    corpus: Corpus,
    model: nn.Module,
    results: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of evaluation.json."""
    routers = {id(p): p for _, router in named_routers(model) for p in router.parameters() if p.requires_grad}
    return evaluation.evaluation_record(
        step=step,
        protocol={**_protocol(config), "data": corpus.description},
        results=results,
        router_parameters=sum(parameter.numel() for parameter in routers.values()),
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        metrics=metrics,
    )


def still_right(record: Mapping[str, Any] | None, config: RunConfig) -> bool:
    """Whether evaluation.json is there and is of the last step, with these settings' protocol, part and k values."""
    return evaluation.is_current(
        record, step=config.steps, protocol=_protocol(config), split=config.eval_split, top_k=evaluated_k(config)
    )


def evaluated_k(config: RunConfig) -> set[int]:
    """The values of k that an evaluation by these settings has: a dense baseline's is its number of experts."""
    return {config.model.num_experts} if is_baseline(config.model.router) else set(config.eval_top_k)


def _protocol(config: RunConfig) -> dict[str, Any]:
    return {
        **eval_protocol(config, config.eval_tokens).to_dict(),
        "checkpoint_rule": "the last step",
        "vocabulary": "of the training data",
    }
