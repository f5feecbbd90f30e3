"""evaluation.json: the results of a run's final evaluation, with their protocol."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pointsman._values import finite, mean_of


def evaluation_record(
    *,
    step: int,
    protocol: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    router_parameters: int,
    parameters: int,
    metrics: Iterable[Mapping[str, Any]],
    cost: Mapping[str, int],
) -> dict[str, Any]:
    """The content of evaluation.json.

    Args:
        step: of the evaluated weights.
        protocol: how the results came about: data, lengths, budget of tokens, …
        results: one for each k, with "split", "top_k", "metric", "value".
        router_parameters, parameters: trainable ones.
        cost: of a token (`models.cost.cost_a_token`).
        metrics: rows of metrics.jsonl; "step_seconds" is the median over the training rows.
    """
    seconds = [row["step_seconds"] for row in metrics if row["kind"] == "train"]
    return {
        "format": 1,
        "checkpoint": f"step-{step}",
        "protocol": dict(protocol),
        "results": list(results),
        "router_parameters": router_parameters,
        "parameters": parameters,
        "cost": dict(cost),
        "step_seconds": statistics.median(seconds) if seconds else None,
    }


def is_current(
    record: Mapping[str, Any] | None, *, step: int, protocol: Mapping[str, Any], split: str, top_k: Iterable[int]
) -> bool:
    """Whether evaluation.json is of this step, this split, exactly these k, and has these entries of the protocol."""
    if record is None or record.get("checkpoint") != f"step-{step}":
        return False
    found, results = record.get("protocol", {}), record.get("results", [])
    return (
        all(found.get(key) == value for key, value in protocol.items())
        and {result["top_k"] for result in results} == set(top_k)
        and all(result.get("split") == split for result in results)
    )


def over_layers(result: Mapping[str, Any], name: str) -> float | None:
    """A figure of the routers ("entropy", "experts_per_token"), mean over layers; None where there is none."""
    layers = (result.get("routers") or {}).values()
    return mean_of(layer.get(name) for layer in layers)


def clean_results(record: Mapping[str, Any], split: str = "test") -> dict[int, Mapping[str, Any]]:
    """Results without an attack, by k: those of `split`, or of the first split in the record where it has no such."""
    rows = [row for row in record.get("results", ()) if isinstance(row, dict) and not row.get("attack")]
    splits = [row.get("split") for row in rows]
    wanted = split if split in splits else (splits[0] if splits else None)
    return {int(row["top_k"]): row for row in rows if row.get("split") == wanted and finite(row.get("top_k"))}
