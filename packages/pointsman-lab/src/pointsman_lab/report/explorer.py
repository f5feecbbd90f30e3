"""The page's explorer: reads the runs' explorer.json and cuts them to a size that a page can hold."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pointsman._shapes import unpacked
from pointsman_lab.report.series import short_layer
from pointsman_lab.runs.comparison import Comparison

EXPLORER_BYTES = 1_400_000


def sample_of(comparison: Comparison, router: str) -> dict[str, Any] | None:
    """explorer.json of the router's first run that has one, with its seed."""
    for run in comparison.of(router):
        found = run.explorer
        if readable(found):
            return {**found, "seed": run.seed}
    return None


def first_type(experts: int) -> np.dtype[Any]:
    """The integer type of first experts in a sample; its largest value means none."""
    return np.dtype(np.uint8 if experts <= 255 else "<u2")


def readable(sample: Mapping[str, Any]) -> bool:
    """Whether a sample has all parts, in the format for its number of experts."""
    parts = ("tokens", "top_k", "num_experts", "layers", "routing", "usage", "map")
    if not all(part in sample for part in parts) or sample.get("format") != first_type(sample["num_experts"]).itemsize:
        return False
    try:
        _cut(sample, 1)
        _first_at(sample)
    except (KeyError, IndexError, ValueError):  # packed routing that is cut or altered
        return False
    return True


def explorer(samples: Mapping[str, Mapping[str, Any]], budget: int = EXPLORER_BYTES) -> dict[str, Any]:
    """The samples, all cut to the same number of tokens, so that together they take at most `budget` bytes."""
    if not samples:
        return {"texts": [], "routers": []}
    shortest = min(len(sample["tokens"]) for sample in samples.values())
    tokens = shortest
    while True:
        cuts = {router: _cut(sample, tokens) for router, sample in samples.items()}
        size = sum(len(cut) for cut in cuts.values())
        if size <= budget or tokens <= 64:
            break
        tokens = max(64, min(tokens - 1, int(0.97 * tokens * budget / size)))
    texts: list[list[str]] = []
    routers = []
    for router, sample in samples.items():
        text = list(sample["tokens"][:tokens])
        if text not in texts:
            texts.append(text)
        usage = json.dumps(sample["usage"], separators=(",", ":")).encode()
        mapped = {**sample["map"], "tokens": [sample["tokens"][i] for i in sample["map"]["indices"]]}
        routers.append(
            {
                "name": router,
                "seed": sample["seed"],
                "text": texts.index(text),
                "word": sample.get("level") == "word",
                "topK": sample["top_k"],
                "experts": sample["num_experts"],
                "layers": [[name, short_layer(name)] for name in sample["layers"]],
                "sampled": len(sample["tokens"]),
                "routing": cuts[router],
                "usage": base64.b64encode(zlib.compress(usage, 9)).decode(),
                "map": {**mapped, "first": _first_at(sample)},
            }
        )
    return {"texts": texts, "routers": routers}


def _blocks(sample: Mapping[str, Any]) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
    """[layer, k, bytes] of the packed routing, and the number of tokens."""
    layers, ks, tokens = (len(sample[name]) for name in ("layers", "top_k", "tokens"))
    experts = sample["num_experts"]
    token = experts + first_type(experts).itemsize + (experts + 7) // 8
    raw = np.frombuffer(unpacked(sample["routing"], layers * ks * tokens * token), dtype=np.uint8)
    return raw.reshape(layers, ks, -1), tokens


def _cut(sample: Mapping[str, Any], tokens: int) -> str:
    """The packed routing of the first `tokens` tokens."""
    blocks, total = _blocks(sample)
    experts = sample["num_experts"]
    lead = blocks.shape[:2]
    probs = blocks[:, :, : total * experts].reshape(*lead, total, experts)[:, :, :tokens]
    size = first_type(experts).itemsize
    first = blocks[:, :, total * experts : total * (experts + size)].reshape(*lead, total, size)[:, :, :tokens]
    bits = blocks[:, :, total * (experts + size) :].reshape(*lead, total, -1)[:, :, :tokens]
    parts = [probs.reshape(*lead, -1), first.reshape(*lead, -1), bits.reshape(*lead, -1)]
    return base64.b64encode(zlib.compress(np.concatenate(parts, -1).tobytes(), 9)).decode()


def _first_at(sample: Mapping[str, Any]) -> dict[str, list[int | None]]:
    """The first expert of every mapped token, by layer; None where it has none."""
    blocks, total = _blocks(sample)
    experts = sample["num_experts"]
    k = sample["top_k"].index(sample["map"]["top_k"])
    kind = first_type(experts)
    first = np.ascontiguousarray(blocks[:, k, total * experts : total * (experts + kind.itemsize)]).view(kind)
    none, at = np.iinfo(kind).max, sample["map"]["indices"]
    return {
        name: [None if expert == none else expert for expert in first[i, at].tolist()]
        for i, name in enumerate(sample["layers"])
    }
