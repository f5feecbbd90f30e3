"""What this library calls the router of every layer, or why it has none, and how many experts are shared."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pointsman.hf.counterpart import counterpart, virtual_experts_of
from pointsman.hf.gates import Gate, survey

GEMMA = "normalises its input, and multiplies each expert's weight by a trained factor"
WITHOUT = {
    "Gemma4TextRouter": GEMMA,
    "DiffusionGemmaTextRouter": GEMMA,
    "InklingTopkRouter": "scores its shared experts, too; their weights and those of the chosen experts sum to 1",
    "NllbMoeTop2Router": "draws its second expert, or renormalises the weights that its capacity leaves",
}
"""Class -> why it has no counterpart, where that is known."""
DOWN = ("down_proj", "w2", "output_linear")
"""Names of an expert's last projection."""


def routers_of(model: nn.Module) -> dict[str, dict[str, str | float | None]]:
    """Layer -> router: the spec with the same choice and weights, or None; without: why; shared_experts: how many."""
    gates, reasons = survey(model)
    specs: dict[Any, str | None] = {}
    found: dict[str, dict[str, str | float | None]] = {}
    for name, _, reason in (one.partition(": ") for one in reasons):
        found[name.rpartition(".")[0]] = {"router": None, "without": reason, "shared_experts": 0.0}
    for gate in gates:
        key = _settings(gate)
        if key not in specs:  # gates of equal class and settings are compared once
            specs[key] = counterpart(gate)
        name = type(gate.module).__name__
        general = "has a rule that no router here has" if gate.form.linear else "does not score with one weight"
        why = f"{name} {WITHOUT.get(name, general)}" if specs[key] is None else None
        found[gate.layer] = {"router": specs[key], "without": why, "shared_experts": shared_experts(gate)}
    return found


def _settings(gate: Gate) -> tuple[Any, ...]:
    """Everything on which a counterpart depends."""
    values = {name: value for name, value in vars(gate.module).items() if isinstance(value, int | float | str)}
    router = getattr(getattr(gate.module, "pointsman", None), "spec", None)
    return (
        type(gate.module),
        virtual_experts_of(gate),
        gate.num_experts,
        gate.dim,
        gate.form,
        tuple(sorted(values.items())),
        getattr(gate.block, "top_k", None),
        router,
    )


def shared_experts(gate: Gate) -> float:
    """The width of the block's always-active shared experts, in hidden widths of one expert; 0 without any."""
    shared = [child for name, child in gate.block.named_children() if "shared" in name]
    parts = [(path.rpartition(".")[2], part) for child in shared for path, part in child.named_modules()]
    width = sum(part.in_features for name, part in parts if isinstance(part, nn.Linear) and name in DOWN)
    down = getattr(gate.experts, "down_proj", None)
    if not width or not isinstance(down, Tensor):
        return 0.0
    hidden = [size for size in down.shape[1:] if size != gate.dim] or [gate.dim]
    return width / hidden[0]
