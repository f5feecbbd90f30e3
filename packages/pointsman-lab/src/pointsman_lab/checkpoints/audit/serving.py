"""What a model costs to serve at each k: counts from its shapes and the measured routing, and a time by roofline."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics import Diagnostics
from pointsman.hf.counterpart import virtual_experts_of
from pointsman.hf.gates import Gate, find_gates
from pointsman.hf.listen import GateListener
from pointsman_lab.checkpoints.audit.trials import measured
from pointsman_lab.checkpoints.text import TEXT, Batches

MACHINES = {
    "H100 SXM": (3.35e12, 989e12),
    "A100 80 GB": (2.04e12, 312e12),
    "RTX 4090": (1.01e12, 165e12),
    "DDR5-5600 x 2": (89.6e9, 1.5e12),
}
"""Bytes and bf16 operations a second, as the makers state them; the last: two channels, eight cores."""
BATCHES = (1, 16, 256)
DTYPES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}


def distinct(share: Sequence[float], k: float, batch: int) -> float:
    """Experts that a batch of independent tokens needs: sum over e of 1 - (1 - p_e)^batch, p_e = the share of tokens
    that choose e."""
    p = (torch.tensor(share, dtype=torch.float64) * k).clamp(0, 1)
    return float((1 - (1 - p) ** batch).sum())


Loads = Mapping[str, tuple[int, Sequence[float | None]]]
"""Layer -> its k, and each expert's share of the choices, virtual ones last."""


def serving(model: nn.Module, gates: Sequence[Gate], loads: Mapping[Any, Loads]) -> dict[str, Any]:
    """Weights by dtype; for each entry (called "top_k") and batch the distinct experts a layer, FLOPs, bytes, a time.

    One decoded token: 2 operations for each weight that it meets, weights in bf16 read once a batch; the attention over
    the context and its cache are left out, and so are virtual experts, which have no weights. Time: the larger of bytes
    / bandwidth and operations / peak; an estimate.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    of_one = {gate.layer: _expert_size(gate) for gate in gates}
    real = {gate.layer: gate.num_experts - virtual_experts_of(gate) for gate in gates}
    experts = sum(parameter.numel() for gate in gates for parameter in gate.experts.parameters())
    always = total - experts - _embedding(model)
    rows = []
    for name, layers in loads.items():
        weighed = {layer: (k, [x or 0.0 for x in share[: real[layer]]]) for layer, (k, share) in layers.items()}
        active: float = always
        for layer, (k, share) in weighed.items():
            active += of_one[layer] * k * (sum(share) if real[layer] < len(layers[layer][1]) else 1)
        for batch in BATCHES:
            need = {layer: distinct(share, k, batch) for layer, (k, share) in weighed.items()}
            read = 2.0 * (always + sum(of_one[layer] * count for layer, count in need.items())) / batch
            seconds = {machine: max(read / width, 2.0 * active / peak) for machine, (width, peak) in MACHINES.items()}
            rows.append(
                {"top_k": name, "batch": batch, "distinct": sum(need.values()) / max(1, len(need)),
                 "flops": 2.0 * active, "bytes": read, "seconds": seconds}
            )  # fmt: skip
    memory = {name: size * total for name, size in DTYPES.items()}
    return {"parameters": total, "experts": experts, "memory": memory, "rows": rows}


def served(model: nn.Module, batches: Batches, k: int) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Layer -> the load of the text's tokens at the model's own k, and what it costs to serve it."""
    found, mask = Diagnostics("load"), torch.zeros(0)

    def observe(layer: str, routing: Any, context: object, hidden: Tensor) -> None:
        found.update(layer, routing, mask.to(hidden.device))

    with GateListener(model, "compress").listen(observe):
        for batch in batches:
            mask = (batch.kinds == TEXT).reshape(-1)
            measured(model, [batch])
    loads = found.result()
    shares: Loads = {layer: (k, of["load"]["share"]) for layer, of in loads.items()}
    return loads, serving(model, find_gates(model), {k: shares})


def _expert_size(gate: Gate) -> int:
    """Weights of one expert of a layer: of LongCat's stacked ones, some have rows for virtual experts, too."""
    stacked = [one for one in gate.experts.parameters() if one.dim() == 3]
    rest = sum(one.numel() for one in gate.experts.parameters() if one.dim() != 3)
    return sum(one[0].numel() for one in stacked) + rest // gate.num_experts


def _embedding(model: Any) -> int:
    """Weights of the input embedding, of which a token reads one row; 0 where the output uses them, too."""
    weight = getattr(model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None, "weight", None)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = output is not None and getattr(output, "weight", None) is weight
    return 0 if tied or not isinstance(weight, Tensor) else weight.numel()
