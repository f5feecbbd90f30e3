"""The compact format of the report's routing explorer: a sample of tokens with their routing at every k and layer."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.diagnostics.base import first_choice
from pointsman.routing import Routing

TOKENS_PER_EXPERT = 10
LEVELS = 127  # of the square root of a probability: the error is at most 0.008, near 1


@dataclass
class LayerSample:
    """The input of one layer's router, hidden [T, dim], and its routing of all T tokens."""

    hidden: Tensor
    routing: Routing


def pack(samples: dict[int, dict[str, LayerSample]], tokens: Sequence[str]) -> dict[str, Any]:
    """The routing of T tokens for every k and layer (k -> layer -> sample) in a compact form.

    `routing` is base64 of zlib of, for each layer, for each k: probabilities [T, E] as bytes round(127 sqrt(p)), the
    expert with the largest weight [T] (255: none), and the chosen experts as bits [T, ceil(E / 8)], little-endian. For
    more than 255 experts the expert takes two bytes (65535: none), and `format` is 2.
    """
    ks = sorted(samples)
    layers = list(samples[ks[0]])
    usage: dict[str, dict[str, Any]] = {str(k): {} for k in ks}
    blob = bytearray()
    experts = samples[ks[0]][layers[0]].routing.num_experts
    kind = np.dtype(np.uint8 if experts <= 255 else "<u2")
    none = np.iinfo(kind).max
    for name in layers:
        for k in ks:  # the first layer's probabilities are equal at every k; side by side zlib removes the repetition
            routing = samples[k][name].routing
            chosen = _members(routing.experts, experts)
            probs = (LEVELS * routing.probs.double().clamp(0, 1).sqrt()).round().to(torch.uint8)
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


def _members(experts: Tensor, num_experts: int) -> NDArray[np.bool_]:
    hot = torch.zeros(experts.shape[0], num_experts + 1, dtype=torch.bool)
    members: NDArray[np.bool_] = hot.scatter_(1, experts + 1, True)[:, 1:].numpy()
    return members


def most_taken(chosen: NDArray[np.bool_], tokens: Sequence[str]) -> list[list[list[Any]]]:
    """For each expert its most frequent tokens: [token, assignments, share of the token's occurrences]."""
    occurrences = Counter(tokens)
    table = []
    for expert in range(chosen.shape[1]):
        taken = Counter(tokens[index] for index in np.flatnonzero(chosen[:, expert]).tolist())
        best = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:TOKENS_PER_EXPERT]
        table.append([[token, count, float(f"{count / occurrences[token]:.3g}")] for token, count in best])
    return table
