"""evaluation.json: what a finished run is judged by, and whether a file still says that."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pointsman.control import named_routers
from pointsman.lab.data import Corpus
from pointsman.lab.evaluation.language_model import EvalProtocol
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
    """The content of evaluation.json; `step_seconds` is the median training step in `metrics`."""
    seconds = [row["step_seconds"] for row in metrics if row["kind"] == "train"]
    routers = {id(p): p for _, router in named_routers(model) for p in router.parameters() if p.requires_grad}
    return {
        "format": 1,
        "checkpoint": f"step-{step}",
        "protocol": {**_protocol(config), "data": corpus.description},
        "results": list(results),
        "router_parameters": sum(parameter.numel() for parameter in routers.values()),
        "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "step_seconds": statistics.median(seconds) if seconds else None,
    }


def still_right(record: Mapping[str, Any] | None, config: RunConfig) -> bool:
    """Whether evaluation.json is there and is of the last step, with these settings' protocol, part and k values."""
    if record is None or record.get("checkpoint") != f"step-{config.steps}":
        return False
    found, results = record.get("protocol", {}), record.get("results", [])
    return (
        all(found.get(key) == value for key, value in _protocol(config).items())
        and {result["top_k"] for result in results} == evaluated_k(config)
        and all(result["split"] == config.eval_split for result in results)
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
