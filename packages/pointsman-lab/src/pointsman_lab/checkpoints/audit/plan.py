"""What an audit measures: the values of k that a model accepts, and the diagnostics with a small state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pointsman.control import set_top_k
from pointsman.diagnostics import Diagnostics
from pointsman.hf.gates import survey
from pointsman.hf.listen import GateListener
from pointsman.hf.top_k import gate_top_k, max_top_k

MAX_BYTES = 1 << 30
"""Of one diagnostic's state in all layers. A larger diagnostic is left out; a note says so."""


def values_of_k(model: nn.Module, wanted: Sequence[int] | None) -> tuple[int | None, list[int | None], list[str]]:
    """The model's own k, the values to measure (own k first), and notes. A k of None means that it is unknown.

    Raises:
        ValueError: a k is out of range, or differs from the model's own where k cannot be set.
    """
    gates, reasons = survey(model)
    notes = [f"k cannot be set here: {reason}" for reason in reasons[:1]]
    try:
        own = gate_top_k(gates[0]).value if gates else None
    except ValueError as error:
        own, notes = None, [*notes, str(error)]
    if own is not None and own < 1:
        raise ValueError(f"audit: the model's own k is {own}: its config.json is damaged; a token needs an expert")
    if notes or own is None:
        if wanted is not None and list(wanted) != [own]:
            raise ValueError(f"audit: top_k={list(wanted)}: {(notes or ['the gates keep no k'])[0]}")
        return own, [own], notes or ["k cannot be set here: the gates keep no k"]
    if wanted is None:
        most = min(4 * own, *(max_top_k(gate) for gate in gates))
        values = sorted({own, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
    else:
        values = list(dict.fromkeys(wanted))
    checked: list[int | None] = [own]
    for k in values:
        try:
            with set_top_k(model, k):
                checked += [k] if k != own else []
        except ValueError as error:
            if wanted is not None:
                raise
            notes.append(str(error))
    return own, checked, list(dict.fromkeys(notes))[:2]


def small_diagnostics(model: nn.Module, listener: GateListener, notes: list[str]) -> Diagnostics:
    """The diagnostics whose state takes at most `MAX_BYTES`; a note for each one left out."""
    gates, _ = survey(model)
    notes.extend({gate.layout.note: None for gate in gates if gate.layout is not None and gate.layout.note})
    kinds = ["entropy", "margin", "load", "co_activation"]
    dim = max((gate.dim for gate in gates), default=0)
    experts = max((gate.num_experts for gate in gates), default=0)
    vocabulary = min(int(getattr(getattr(model, "config", None), "vocab_size", 0) or 0), 1 << 16)
    states = {"collapse": 8 * dim * (dim + experts), "specialisation": 4 * vocabulary * experts}
    for kind, size in states.items():
        if size * len(listener.gates) <= MAX_BYTES:
            kinds.append(kind)
        else:
            notes.append(f"{kind} left out: it needs {size * len(listener.gates) / 2**30:.1f} GiB for this model")
    return Diagnostics(*kinds)
