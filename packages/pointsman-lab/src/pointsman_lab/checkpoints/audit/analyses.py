"""The parts of an audit that follow from what was recorded, and those that try something on the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics.base import number
from pointsman.hf.gates import survey
from pointsman.traces import RoutingTrace
from pointsman_lab.checkpoints.audit.blocks import Blocks
from pointsman_lab.checkpoints.audit.prunings import prunings
from pointsman_lab.checkpoints.audit.serving import serving
from pointsman_lab.checkpoints.audit.trials import halves, predicts, schedules, super_experts
from pointsman_lab.checkpoints.text import TextBatch
from pointsman_lab.traces.placement import cache, place

TIMES = (1, 16, 128)
"""Numbers of choices that an expert should get from a text for calibration."""
LEAST_TOGETHER = 10  # tokens of a pair of experts, or choices of a token, that are named
TYPICAL = 8
DEVICES = 8


def analysed(
    model: nn.Module,
    blocks: Blocks,
    trace: RoutingTrace,
    probes: Sequence[TextBatch],
    quality: Sequence[Mapping[str, Any]],
    margin: float,
    notes: list[str],
) -> dict[str, Any]:
    """All parts by name; `notes` gets why one is missing."""
    layers = list(trace.layers)
    every = survey(model)[0]
    gates = [gate for gate in every if gate.layer in layers]
    loads = {
        row["top_k"]: {name: (row["top_k"], of["load"]) for name, of in row["routers"].items()}
        for row in quality
        if row["top_k"]
    }
    found: dict[str, Any] = {
        "domains": {name: sum(block.read for block in blocks.of(name)) for name in blocks.domains},
        "divergence": blocks.divergences(layers),
        "specialists": blocks.specialists(layers),
        "coverage": blocks.coverage(layers, TIMES) if layers else [],
        "across": across(trace) if layers else [],
        "serving": serving(model, gates, loads),
    }
    found["super_experts"], found["schedules"], found["prunings"] = [], [], []
    if probes and any(row["loss"] for row in quality):  # without a loss nothing can be tried
        search, held_out = (half if predicts(half) else [] for half in halves(probes))
        found["super_experts"], reason = super_experts(model, gates, search, held_out)
        notes += [reason] if reason else []
        try:
            ks = [row["top_k"] for row in quality if row["top_k"]]
            found["schedules"], reason = schedules(model, gates, ks, search, held_out, margin)
            notes += [reason] if reason else []
            chosen = {
                one["kind"]: {name: loads[k][name] for name, k in one["ks"].items()} for one in found["schedules"]
            }
            rows = serving(model, gates, chosen)["rows"]
            for one in found["schedules"]:
                one["serving"] = [row for row in rows if row["top_k"] == one["kind"]]
        except ValueError as error:
            notes.append(f"k by layer left out: {error}")
        try:
            if len(gates) == len(every):
                found["prunings"], reason = prunings(model, search, held_out, margin)
                notes += [reason] if reason else []
        except (ValueError, torch.OutOfMemoryError) as error:
            notes.append(f"experts that can go left out: {str(error).removeprefix('compress: ')}")
    experts = min(trace.num_experts.values(), default=0)
    if experts > 2 and trace.tokens > 1:
        found["placement"] = place(trace, min(DEVICES, experts), spare=min(DEVICES, experts), batch=256)
        found["cache"] = {"size": max(1, experts // 4), "layers": cache(trace, max(1, experts // 4))}
    return found


def typical(layers: Mapping[str, Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """The tokens that an expert takes more than others do: of its most frequent ones, those with the largest lift.

    {"layer", "expert", "tokens": [{"text", "count", "lift"}]}, at most `TYPICAL` tokens. Count: of the expert; lift:
    the share of the token's choices that are this expert's, over the expert's share of all choices.
    """
    found = []
    for layer, of in layers.items():
        load = of["load"]["share"]
        for expert, top in enumerate((of.get("specialisation") or {}).get("top") or ()):
            lifts = [
                [share / load[expert], one, count]
                for one, count, share in top
                if count >= LEAST_TOGETHER and share > load[expert]
            ]
            best = [
                {"text": tokenizer.decode([one]), "count": count, "lift": lift}
                for lift, one, count in sorted(lifts, reverse=True)[:TYPICAL]
            ]
            found.append({"layer": layer, "expert": expert, "tokens": best})
    return found


def across(trace: RoutingTrace) -> list[dict[str, Any]]:
    """What the experts of a layer say of the next layer's: mutual information, and pairs that go together.

    `bits`: of one choice in each layer, taken at random, less the expectation under independence. `pairs`: the three
    with the highest lift (joint tokens over those under independence) of those with at least ten joint tokens.
    """
    found = []
    for one, two in zip(trace.layers, trace.layers[1:], strict=False):
        mine, its = (_members(trace.experts[name], trace.num_experts[name]) for name in (one, two))
        joint = mine.T @ its
        lift = joint * trace.tokens / torch.outer(mine.sum(0), its.sum(0)).clamp_min(1)
        lift = torch.where(joint >= LEAST_TOGETHER, lift, 0.0)
        best = [divmod(at, lift.shape[1]) for at in lift.reshape(-1).topk(min(3, lift.numel())).indices.tolist()]
        p = joint / joint.sum().clamp_min(1)
        entropy = [float(torch.special.entr(each).sum()) for each in (p.sum(1), p.sum(0), p.reshape(-1))]
        used = [int((each > 0).sum()) for each in (p.sum(1), p.sum(0))]
        chance = (used[0] - 1) * (used[1] - 1) / (2 * max(1, trace.tokens))
        bits = max(0.0, entropy[0] + entropy[1] - entropy[2] - chance) / 0.6931471805599453
        pairs = [
            {"experts": [i, j], "tokens": int(joint[i, j]), "lift": number(lift[i, j])} for i, j in best if lift[i, j]
        ]
        found.append({"layers": [one, two], "bits": bits, "pairs": pairs})
    return found


def _members(experts: Tensor, num_experts: int) -> Tensor:
    """[N, E]: 1 where a token chose the expert."""
    hot = torch.zeros(len(experts), num_experts + 1, dtype=torch.float64)
    return hot.scatter_(1, experts.clamp_min(-1).long() + 1, 1.0)[:, 1:]
