"""Which experts could go: prunings and merges of several sizes, verified on held-out text beside random prunings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics import Diagnostics
from pointsman.hf.gates import find_gates, survey
from pointsman.hf.listen import GateListener
from pointsman.hf.top_k import gate_top_k
from pointsman_lab.checkpoints.audit.serving import serving
from pointsman_lab.checkpoints.audit.trials import Rows, mean_of, measured, paired, verdict
from pointsman_lab.checkpoints.choosing import drawn, plan
from pointsman_lab.checkpoints.cutting import cut, fewest, groups_of, why_uncut
from pointsman_lab.checkpoints.text import TEXT, TextBatch

SIZES = (7 / 8, 3 / 4, 1 / 2)
METHODS = ("reap", "m-smoe")
RANDOM = 3


def prunings(
    model: nn.Module, search: Sequence[TextBatch], held_out: Sequence[TextBatch], margin: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Each method at each size: chosen on the first half, its loss measured on the other; and why there is none.

    Returns:
        Rows of {"method", "kept", "experts", "groups" (layer -> the experts that become one each), "dropped" (layer
        -> experts without a place), the paired rise of the loss as `ratio` gives it, "share" and "share_half" of the
        loss, "within" the margin: True, False, or None where the text does not decide, "random": the loss minus the
        mean of random prunings, "serving"}; and the reason.
    """
    gates, reasons = survey(model)
    numbers = {gate.num_experts for gate in gates}
    reason = reasons[0] if reasons else None if len(numbers) == 1 else "its layers differ in their number of experts"
    reason = reason or next((why for gate in gates if (why := why_uncut(gate))), None) or _too_large(model)
    if reason or not search or not held_out:
        return [], f"experts that can go left out: {reason or 'the text is too short to be divided in two'}"
    number, groups = numbers.pop(), max(map(groups_of, gates))
    least = max(map(fewest, gates))
    sizes = dict.fromkeys(round(number * size / groups) * groups for size in SIZES)
    tried = [
        (size, method) for size in sizes if least <= size < number for method in METHODS[: 1 if groups > 1 else None]
    ]
    base = measured(model, held_out)
    scale, own, chance = mean_of(base), gate_top_k(gates[0]).value, dict[int, Rows]()
    rows = []
    for size, method in tried:
        if size not in chance:
            same = {gate.layer: size for gate in gates}
            lost = [measured(cut(model, gates, drawn(gates, same, 1 + one)), held_out) for one in range(RANDOM)]
            chance[size] = [(sum(one[0] for one in each) / RANDOM, each[0][1]) for each in zip(*lost, strict=True)]
        smaller = cut(model, gates, *(made := plan(model, gates, search, size, method)), method == "m-smoe")
        after = measured(smaller, held_out)
        rise = paired(after, base, len(tried))
        gone = {
            layer: sorted({*range(number)} - {one for group in of for one in group}) for layer, of in made[0].items()
        }
        load = {layer: (own, of["load"]["share"]) for layer, of in loads(smaller, held_out).items()}
        rows.append(
            {"method": method, "kept": size, "experts": number, "groups": made[0], "dropped": gone, **rise,
             **verdict(rise, scale, margin), "random": paired(after, chance[size], len(tried)),
             "serving": serving(smaller, find_gates(smaller), {own: load})}
        )  # fmt: skip
    return rows, None


def _too_large(model: nn.Module) -> str | None:
    """Why a copy of most of the experts does not fit beside the model."""
    parameters = list(model.parameters())
    if any(one.is_meta for one in parameters):
        return "they need a copy of the experts in memory"
    needed, device = sum(one.numel() * one.element_size() for one in parameters), parameters[0].device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - needed
    else:
        return None
    if needed <= 0.9 * free:
        return None
    return f"a copy of the experts takes up to {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are left"


def loads(model: nn.Module, batches: Sequence[TextBatch]) -> Mapping[str, Any]:
    """Layer -> the load of the text's tokens."""
    found, mask = Diagnostics("load"), torch.zeros(0)

    def observe(layer: str, routing: Any, context: object, hidden: Tensor) -> None:
        found.update(layer, routing, mask.to(hidden.device))

    with GateListener(model, "compress").listen(observe):
        for batch in batches:
            mask = (batch.kinds == TEXT).reshape(-1)
            measured(model, [batch])
    return found.result()
