"""The compact format of the report's routing explorer: a sample of tokens with their routing at every k and layer."""

import base64
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.diagnostics.base import first_choice
from pointsman.ops.selection import members
from pointsman_lab.evaluation.diagnose import Routings
from pointsman_lab.runs.paths import EXPLORER_FORMAT

TOKENS_PER_EXPERT = 10
LEVELS = 127  # of the square root of a probability: the error is at most 0.008, near 1


def pack(
    routings: Mapping[int, Routings], tokens: Sequence[str], inputs: Mapping[str, Tensor], top_k: int, points: int
) -> dict[str, Any]:
    """The routing of T tokens for every k and layer (k -> layer -> routing) in a compact form, and a 2-D map of some.

    `routing` is base64 of zlib of, for each token, for each layer, for each k: probabilities [E] as bytes
    round(127 sqrt(p)), the expert with the largest weight (255: none), and the chosen experts as bits [ceil(E / 8)],
    little-endian. For more than 255 experts the expert takes two bytes (65535: none).

    Args:
        inputs: layer -> [T, dim], of its router; the map has their first two principal components, from 0 to 1000.
        top_k: of the first experts in the map.
        points: evenly spaced tokens in the map.
    """
    ks = sorted(routings)
    layers = list(routings[ks[0]])
    usage: dict[str, dict[str, Any]] = {str(k): {} for k in ks}
    experts = routings[ks[0]][layers[0]].num_experts
    kind = np.dtype(np.uint8 if experts <= 255 else "<u2")
    parts = []
    for name in layers:
        for k in ks:
            routing = routings[k][name]
            chosen = members(routing.experts, experts).numpy()
            probs = (LEVELS * routing.probs[:, :experts].double().clamp(0, 1).sqrt()).round().to(torch.uint8)
            first = first_choice(routing).numpy()
            first = np.where(first < 0, np.iinfo(kind).max, first).astype(kind)[:, None].view(np.uint8)
            parts += [probs.numpy(), first, np.packbits(chosen, axis=1, bitorder="little")]
            usage[str(k)][name] = most_taken(chosen, tokens)
    at = np.unique(np.linspace(0, len(tokens) - 1, min(points, len(tokens))).astype(int))
    first_at = {name: first_choice(routings[top_k][name])[at].tolist() for name in inputs}
    return {
        "format": EXPLORER_FORMAT,
        "tokens": list(tokens),
        "top_k": ks,
        "num_experts": experts,
        "layers": layers,
        "routing": base64.b64encode(zlib.compress(np.concatenate(parts, 1).tobytes(), 9)).decode(),
        "usage": usage,
        "map": {
            "top_k": top_k,
            "method": "pca",
            "tokens": [tokens[one] for one in at],
            "layers": {name: _positions(hidden[at]) for name, hidden in inputs.items()},
            "first": {name: [None if one < 0 else one for one in of] for name, of in first_at.items()},
        },
    }


def _positions(hidden: Tensor) -> list[list[int]]:
    """x and y of [n, dim], from 0 to 1000."""
    flat = pca(hidden.double().nan_to_num(0, 0, 0).numpy())
    low, span = flat.min(0), np.ptp(flat, axis=0).max() or 1.0
    return [[round(1000 * float(v)) for v in column] for column in ((flat - low) / span).T]


def most_taken(chosen: NDArray[np.bool_], tokens: Sequence[str]) -> list[list[list[Any]]]:
    """For each expert its most frequent tokens: [token, assignments, share of the token's occurrences]."""
    occurrences = Counter(tokens)
    table = []
    for expert in range(chosen.shape[1]):
        taken = Counter(tokens[index] for index in np.flatnonzero(chosen[:, expert]).tolist())
        best = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:TOKENS_PER_EXPERT]
        table.append([[token, count, float(f"{count / occurrences[token]:.3g}")] for token, count in best])
    return table


def pca(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first two principal components [n, 2]; each with its largest entry positive, so that the sign is fixed."""
    centred = points - points.mean(0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    found = np.zeros((len(points), 2))
    width = min(2, left.shape[1])
    found[:, :width] = left[:, :width] * singular[:width]
    signs = np.sign(found[np.abs(found).argmax(0), range(2)])
    return found * np.where(signs == 0, 1.0, signs)
