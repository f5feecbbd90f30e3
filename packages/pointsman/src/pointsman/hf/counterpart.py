"""The router spec that computes what a Hugging Face gate computes: its exact counterpart in this library.

A candidate spec is built with random weights and biases, and compared with a float32 copy of the gate that has the same
ones. It is the counterpart if it chooses the same experts with the same weights for all of `TOKENS` random tokens. The
result depends on the gate's code and settings alone, not on its trained weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.hf.gates import Gate, distinct_table, run_gate
from pointsman.hf.layouts import first_k
from pointsman.hf.top_k import GROUPS, gate_top_k
from pointsman.routers.frame.registry import build_router, list_routers, parse_spec
from pointsman.routers.frame.router import Router
from pointsman.routing import RoutingContext

TOKENS = 64
TOLERANCE = 1e-5
KEPT = ("topk_group", "limited_groups", "num_limited_groups")
TRAINING_OPTIONS = ("update", "rate", "centre", "bins", "jitter")
"""Options that do not change what a forward computes."""


def counterpart(gate: Gate) -> str | None:
    """The spec of the router with the same choice and weights, such as `loss-free:groups=8:kept=4:scale=2.5`.

    None if there is none: the class does something that no router here does.
    """
    router = getattr(gate.module, "pointsman", None)
    if router is not None:
        return str(router.spec)
    if not gate.form.linear:
        return None
    try:
        k = gate_top_k(gate).value if gate.layout is None else first_k(gate.module, gate.block, gate.form)
        random = _with_random_weights(gate)
        hidden = torch.randn(TOKENS, gate.dim, generator=torch.Generator().manual_seed(1))
        wanted = routed_by(random, hidden)
    except (ValueError, RuntimeError, TypeError):
        return None
    for head, options in _candidates(gate):
        spec = ":".join([head, *options])
        try:
            real = gate.num_experts - virtual_experts_of(gate)
            built = build_router(spec, dim=gate.dim, num_experts=real, top_k=k, vocab_size=vocabulary(gate))
            router = load_gate(built, random)
        except ValueError:
            continue
        found = _dense(router.eval(), hidden)
        if not torch.equal(found > 0, wanted > 0):
            continue
        scale = f"{float(wanted.double().sum() / found.double().sum()):.5g}"
        if torch.allclose(found * float(scale), wanted, rtol=TOLERANCE, atol=TOLERANCE):
            return spec if scale == "1" else f"{spec}:scale={scale}"
    return None


def same_forward(spec: str, other: str) -> bool:
    """Whether two specs are equal up to the order of options and those that only matter in training."""

    def essential(one: str) -> tuple[Any, ...]:
        parsed = parse_spec(one)
        return parsed.router, {k: v for k, v in parsed.options.items() if k not in TRAINING_OPTIONS}, parsed.mixer

    return essential(spec) == essential(other)


def load_gate(router: Router, gate: Gate) -> Router:
    """Copies a gate's weight, bias, correction bias and table of token ids into a router, in place; returns the router.

    ValueError if the router has no bias, no correction bias or no table for that of the gate.
    """
    owner = gate.module.get_submodule(gate.form.owner)
    weight, bias, correction = owner.get_parameter("weight"), getattr(owner, "bias", None), correction_bias(gate)
    score: Any = router.score
    if gate.form.table:
        score.set_table(gate.module.get_buffer(gate.form.table).reshape(score.table.shape))
        score = score.gate
    with torch.no_grad():
        score.weight.copy_(weight * gate.form.multiplier)
        if (bias is None) != (score.bias is None):
            raise ValueError(f"load_gate: {router.spec!r} and the gate differ in the bias of the logits")
        if bias is not None:
            score.bias.copy_(bias * gate.form.multiplier)
        own: Any = getattr(router.select, "bias", None)
        if correction is not None and own is None:
            raise ValueError(f"load_gate: {router.spec!r} has no correction bias")
        if correction is not None:
            own.copy_(correction.reshape(-1))
    return router


def vocabulary(gate: Gate) -> int | None:
    """The number of token ids of a gate that chooses by them."""
    return len(gate.module.get_buffer(gate.form.table)) if gate.form.table else None


def correction_bias(gate: Gate) -> Tensor | None:
    """The tensor [E] (or [1, E]) that a gate adds to its scores before the choice; None without one."""
    owner = f"{gate.form.owner}." if gate.form.owner else ""
    own = [*gate.module.named_parameters(), *gate.module.named_buffers()]
    scoring = (f"{owner}weight", f"{owner}bias")
    tensors = [tensor for name, tensor in own if name not in scoring and not name.startswith("pointsman.")]
    tensors += [getattr(gate.block, name) for name in gate.form.extras]
    found = [tensor for tensor in tensors if tensor.numel() == gate.num_experts and tensor.is_floating_point()]
    return found[0] if len(found) == 1 else None


def routed_by(gate: Gate, hidden: Tensor) -> Tensor:
    """The combine weights [tokens, E] of a gate for `hidden` [tokens, dim]; 0 for experts that are not chosen."""
    with torch.no_grad():
        output, _ = run_gate(gate.module, hidden, gate.arguments(len(hidden)))
    logits, weights, experts = (one.reshape(len(hidden), -1) for one in gate.routed(output))
    zeros = torch.zeros(len(hidden), logits.shape[-1] + 1)
    return zeros.scatter(1, experts.long() + 1, weights.float())[:, 1:]


def _dense(router: Router, hidden: Tensor) -> Tensor:
    ids = None
    if "token_ids" in router.needs:
        score: Any = router.score
        ids = (torch.arange(len(hidden)) % score.vocab_size)[None]
    with torch.no_grad():
        routing = router(hidden, RoutingContext(token_ids=ids))
    found: Tensor = routing.dense_weights.float()
    return found


def _with_random_weights(gate: Gate) -> Gate:
    """A float32 copy of the gate on the CPU with random weight, bias and correction bias."""
    generator = torch.Generator().manual_seed(0)
    module = copy.deepcopy(gate.module).cpu().float().eval()
    block: Any = nn.Module()
    for name in gate.form.extras:
        setattr(block, name, getattr(gate.block, name).detach().cpu().clone())
    if hasattr(gate.block, "top_k"):
        block.top_k = gate.block.top_k
    distinct_table(module, gate.form.table)
    copied = replace(gate, module=module, block=block)
    owner = module.get_submodule(gate.form.owner)
    weight, bias, correction = owner.get_parameter("weight"), getattr(owner, "bias", None), correction_bias(copied)
    with torch.no_grad():
        spread = weight.shape[1] ** -0.5 / gate.form.multiplier  # logits of variance 1
        weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
        for tensor in (bias, correction):
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return copied


def _candidates(gate: Gate) -> Iterator[tuple[str, list[str]]]:
    """Names and options of specs that may be the counterpart, the plainest first; scale is found by comparison."""
    owner = gate.module.get_submodule(gate.form.owner)
    bias = [] if getattr(owner, "bias", None) is not None else ["bias=false"]
    renormalized: tuple[list[str], ...] = ([], ["renormalize=false"])
    nulls = [f"nulls={virtual}", "kind=copy"] if (virtual := virtual_experts_of(gate)) else []
    if gate.form.table:
        columns = f"columns={gate.module.get_buffer(gate.form.table).shape[1]}"
        for kind, renormalize in product(("softmax", "sigmoid", "sqrtsoftplus"), renormalized):
            yield "hash", [columns, f"gate={kind}", *renormalize]
        return
    if gate.layout is not None:
        yield from _candidates_of_layout(gate, bias)
        return
    reach = getattr(gate.module, "router_jitter_noise", None)
    if isinstance(reach, float) and not nulls:
        yield "sparsemixer", [f"r={reach:g}"]
    for kind, renormalize in product(("softmax", "sigmoid"), renormalized):
        yield "smoe", [*([] if kind == "softmax" else [f"gate={kind}"]), *bias, *nulls, *renormalize]
    if "loss-free" not in list_routers():
        return
    for kind, groups, renormalize in product(("sigmoid", "softmax", "sqrtsoftplus"), _groups(gate), renormalized):
        yield "loss-free", [*([] if kind == "sigmoid" else [f"gate={kind}"]), *groups, *nulls, *renormalize]
    for renormalize in renormalized:
        yield "loss-free", ["biased=logits", *nulls, *renormalize]


def _candidates_of_layout(gate: Gate, bias: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Those of a class that is known by name."""
    layout = gate.layout
    assert layout is not None
    kind = [] if layout.kind == "softmax" else [f"gate={layout.kind}"]
    if "switch" in layout.rules:
        jitter = getattr(gate.module, "jitter_noise", 0)
        noise = [f"jitter={jitter:g}"] if jitter else []
        yield "switch", [*bias, *noise, f"capacity={gate.module.expert_capacity}", "capacity_unit=tokens"]
        return
    for renormalize in ([], ["renormalize=false"]):
        yield "smoe", [*kind, *bias, *renormalize, *layout.options]


def virtual_experts_of(gate: Gate) -> int:
    """How many of the gate's last experts are virtual (LongCat's, which give their input)."""
    return int(getattr(gate.experts, "zero_expert_num", 0) or 0)


def _groups(gate: Gate) -> list[list[str]]:
    """Options for groups by the gate's settings, also none and both kinds of group score."""
    homes = (gate.module, getattr(gate.module, "config", None))
    groups, kept = (
        next((value for home in homes for name in names if isinstance(value := getattr(home, name, None), int)), 1)
        for names in (GROUPS, KEPT)
    )
    if groups <= 1:
        return [[]]
    options = [f"groups={groups}", f"kept={kept}"]
    return [[], options, [*options, "group_score=max"]]
