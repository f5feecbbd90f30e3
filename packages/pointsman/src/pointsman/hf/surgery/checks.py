"""Which gate a router spec is for, and whether its class takes that router."""

from __future__ import annotations

from collections.abc import Sequence

from pointsman.hf.counterpart import counterpart, same_forward, virtual_experts_of
from pointsman.hf.gates import BY_TOKEN_ID, Gate
from pointsman.hf.surgery.scorers import check_spec, has_own_rule
from pointsman.routers.frame.registry import parse_spec


def assigned(gates: Sequence[Gate], specs: Sequence[str]) -> list[tuple[Gate, str]]:
    """The gates to replace, each with its spec; tables of token ids take those of `hash` alone, others all others."""
    tables = [gate for gate in gates if gate.form.table]
    if not tables:
        return [(gate, specs[place % len(specs)]) for place, gate in enumerate(gates)]
    found = []
    for kind, hashed in ((tables, True), ([gate for gate in gates if not gate.form.table], False)):
        own = [spec for spec in specs if (parse_spec(spec).router == "hash") == hashed]
        found += [(gate, own[place % len(own)]) for place, gate in enumerate(kind) if own]
    if not found:
        kind_of = type(tables[0].module).__name__
        raise ValueError(f"replace_routers: {specs[0]!r}: {kind_of} {BY_TOKEN_ID}; it takes 'hash' alone")
    return found


def check(gate: Gate, spec: str) -> None:
    """Raises ValueError unless a router of this spec can take the place of the gate."""
    layout = gate.layout
    if layout is not None and layout.write is None and has_own_rule(spec):
        own = counterpart(gate)
        if own is None or not same_forward(spec, own):
            raise ValueError(
                f"replace_routers: layer {gate.layer!r}: {type(gate.block).__name__} chooses and weighs the experts "
                f"itself, after the logits; its own rule is {own or 'another one'!r}"
            )
    else:
        check_spec(spec, gate.form)
    where = f"replace_routers: layer {gate.layer!r}"
    router = getattr(gate.module, "pointsman", None)
    if router is not None:
        raise ValueError(f"{where} already has the router {router.spec!r}; materialize(model) first")
    if not gate.form.linear:
        raise ValueError(f"{where}: the logits of {type(gate.module).__name__} are not the product with one weight")
    if layout is None and has_own_rule(spec) and (gate.form.sequence > gate.form.flat or gate.form.outputs != 3):
        raise ValueError(
            f"{where}: {type(gate.module).__name__} returns more than logits, weights and experts; {spec!r} does not"
        )
    options, virtual = parse_spec(spec).options, virtual_experts_of(gate)
    has_bias = getattr(gate.module.get_submodule(gate.form.owner), "bias", None) is not None
    if (options.get("bias", str(has_bias)).lower() == "true") != has_bias:
        raise ValueError(
            f"{where}: option 'bias' of {spec!r}: {type(gate.module).__name__} has {'a' if has_bias else 'no'} bias"
        )
    if (given := options.get("nulls", "0")) != "0" and (given != str(virtual) or options.get("kind") != "copy"):
        has = f"nulls={virtual}:kind=copy" if virtual else "none"
        raise ValueError(f"{where}: virtual experts are the class's own: {type(gate.module).__name__} has {has}")
    if parse_spec(spec).mixer is not None and gate.form.kind == "other":
        raise ValueError(
            f"{where}: {type(gate.module).__name__} uses neither softmax nor sigmoid; mixers need one of them"
        )
