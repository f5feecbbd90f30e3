"""The compact format of the report's routing explorer: a sample of tokens with their routing at every k and layer."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pointsman.diagnostics.base import first_choice
from pointsman.ops.selection import members
from pointsman.routing import Routing

TOKENS_PER_EXPERT = 10
LEVELS = 127  # of the square root of a probability: the error is at most 0.008, near 1


def pack(routings: Mapping[int, Mapping[str, Routing]], tokens: Sequence[str]) -> dict[str, Any]:
    """The routing of T tokens for every k and layer (k -> layer -> routing) in a compact form.

    `routing` is base64 of zlib of, for each layer, for each k: probabilities [T, E] as bytes round(127 sqrt(p)), the
    expert with the largest weight [T] (255: none), and the chosen experts as bits [T, ceil(E / 8)], little-endian. For
    more than 255 experts the expert takes two bytes (65535: none), and `format` is 2.
    """
    ks = sorted(routings)
    layers = list(routings[ks[0]])
    usage: dict[str, dict[str, Any]] = {str(k): {} for k in ks}
    blob = bytearray()
    experts = routings[ks[0]][layers[0]].num_experts
    kind = np.dtype(np.uint8 if experts <= 255 else "<u2")
    none = np.iinfo(kind).max
    for name in layers:
        for k in ks:  # the first layer's probabilities are equal at every k; side by side zlib removes the repetition
            routing = routings[k][name]
            chosen = members(routing.experts, experts).numpy()
            probs = (LEVELS * routing.probs[:, :experts].double().clamp(0, 1).sqrt()).round().to(torch.uint8)
            first = first_choice(routing).numpy()
            blob += probs.numpy().tobytes()
            blob += np.where(first < 0, none, first).astype(kind).tobytes()
            blob += np.packbits(chosen, axis=1, bitorder="little").tobytes()
            usage[str(k)][name] = most_taken(chosen, tokens)
    return {
        "format": kind.itemsize,
        "tokens": list(tokens),
        "top_k": ks,
        "num_experts": experts,
        "layers": layers,
        "routing": base64.b64encode(zlib.compress(bytes(blob), 9)).decode(),
        "usage": usage,
    }


def most_taken(chosen: NDArray[np.bool_], tokens: Sequence[str]) -> list[list[list[Any]]]:
    """For each expert its most frequent tokens: [token, assignments, share of the token's occurrences]."""
    occurrences = Counter(tokens)
    table = []
    for expert in range(chosen.shape[1]):
        taken = Counter(tokens[index] for index in np.flatnonzero(chosen[:, expert]).tolist())
        best = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:TOKENS_PER_EXPERT]
        table.append([[token, count, float(f"{count / occurrences[token]:.3g}")] for token, count in best])
    return table
