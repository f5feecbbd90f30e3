"""The bias of `balance(how="bias")`: whose it is, what is counted for it, and how it moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pointsman.auxiliary import assignment_counts
from pointsman.hf.counterpart import correction_bias, counterpart
from pointsman.hf.gates import PROBE_TOKENS, Gate, run_gate
from pointsman.hf.surgery.replace import replace_routers
from pointsman.routers.frame.registry import parse_spec
from pointsman.routers.papers.loss_free import SignUpdate

BIAS_RATE = 1e-3


@dataclass(frozen=True)
class Bias:
    """The bias of one gate: how far it moves, and its tensor as (module, name), both ""  for that of a `loss-free`."""

    gate: str
    experts: int
    rate: float
    owner: str = ""
    name: str = ""

    @property
    def added(self) -> bool:
        return not self.name

    def tensors(self, home: nn.Module) -> Iterator[Tensor]:
        """Also that of a copy that PEFT trains."""
        for module in home.get_submodule(self.owner).modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            yield from (tensor for name, tensor in own if name == self.name)


def biases_for(home: nn.Module, gates: Sequence[Gate], rate: float) -> tuple[Bias, ...]:
    """The class's correction biases, in float32 from now on; gates without one get `loss-free` routers, all or none.

    Raises:
        ValueError: a gate for which `loss-free` cannot be.
    """
    gates = [gate for gate in gates if not gate.form.table]
    own = {gate.name: _bias_of_choice(gate) for gate in gates}
    without = [gate for gate in gates if own[gate.name] is None and not _is_loss_free(gate)]
    if without and len(without) < len(gates):
        raise ValueError(f"hf.balance: how='bias': gate {without[0].name!r} has no correction bias, others have one")
    if without:
        _replace(home, without, rate)
    names = {id(one): name for name, one in [*home.named_parameters(), *home.named_buffers()]}
    found = []
    for gate in gates:
        bias = own[gate.name]
        if bias is None or without:
            found.append(Bias(gate.name, gate.num_experts, rate))
            continue
        owner, _, name = names[id(bias)].rpartition(".")
        bias.data = bias.data.float()  # bf16 would lose steps of 0.001
        bias.requires_grad_(False)
        found.append(Bias(gate.name, gate.num_experts, rate, owner, name))
    return tuple(found)


@torch.no_grad()
def _bias_of_choice(gate: Gate) -> Tensor | None:
    """The correction bias, where raising it makes every token choose an expert; other tensors [E] only weigh."""
    bias = correction_bias(gate)
    if bias is None or bias.is_meta:
        return None
    router = getattr(gate.module, "pointsman", None)
    if router is not None and parse_spec(router.spec).router == "loss-free":
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_TOKENS, gate.dim, generator=generator).to(bias.device, _dtype(gate))
    kept, training = bias.clone(), gate.module.training
    gate.module.eval()
    try:
        bias.view(-1)[0] += 1e3
        experts = gate.routed(run_gate(gate.module, hidden, gate.arguments(PROBE_TOKENS))[0])[2]
    finally:
        bias.copy_(kept)
        gate.module.train(training)
    return bias if bool((experts.reshape(PROBE_TOKENS, -1) == 0).any(-1).all()) else None


def _dtype(gate: Gate) -> torch.dtype:
    return next(gate.module.parameters()).dtype


def _is_loss_free(gate: Gate) -> bool:
    router = getattr(gate.module, "pointsman", None)
    return router is not None and parse_spec(router.spec).router == "loss-free"


def _replace(home: nn.Module, gates: Sequence[Gate], rate: float) -> None:
    """`loss-free` routers with the choice and weights of the gates, for gates without a correction bias."""
    specs = []
    for gate in gates:
        spec = counterpart(gate)
        parsed = None if spec is None else parse_spec(spec)
        if parsed is None or parsed.router != "smoe" or parsed.mixer is not None:
            raise ValueError(
                f"hf.balance: how='bias': {type(gate.module).__name__} (gate {gate.name!r}) has no correction bias, "
                "and no loss-free router chooses as it does; use how='loss'"
            )
        options = {"gate": "softmax", **{k: v for k, v in parsed.options.items() if k != "bias"}, "rate": f"{rate:g}"}
        specs.append(":".join(["loss-free", *(f"{name}={value}" for name, value in options.items())]))
    try:
        replace_routers(home, specs)
    except ValueError as error:
        told = str(error).removeprefix("replace_routers: ")
        raise ValueError(f"hf.balance: how='bias': no correction bias, and no loss-free router: {told}") from None


def count(home: Any, biases: Iterable[Bias], chosen: Iterable[tuple[str, Tensor]]) -> None:
    """Adds the assignments of one training forward: (gate, experts [tokens, k], -1 for padding)."""
    of = {bias.gate: bias for bias in biases if not bias.added}
    counts = home.__dict__.setdefault("pointsman_counts", {})
    for gate, experts in chosen:
        if gate in of:
            new = assignment_counts(experts.long(), of[gate].experts)
            counts[gate] = counts[gate] + new if gate in counts else new


@torch.no_grad()
def settle(home: Any, biases: Sequence[Bias]) -> None:
    """Moves every bias once by what was counted since the last time, over all ranks; nothing where nothing was."""
    counts = home.__dict__.pop("pointsman_counts", {})
    frozen = {bias.gate for bias in biases if hasattr(home.get_submodule(bias.gate), "pointsman_frozen")}
    of = {bias.gate: bias for bias in biases if not bias.added and bias.gate not in frozen}
    add_up([counts[gate] for gate in of if gate in counts])
    for gate, bias in of.items():
        if gate in counts:
            for tensor in bias.tensors(home):
                flat = tensor.view(-1)
                move = SignUpdate(bias.rate, False).move
                move(flat, {"counts": counts[gate].to(flat.device)})
    routers = [home.get_submodule(bias.gate).pointsman for bias in biases if bias.added]
    add_up([tensor for router in routers for tensor in router.gathered()])
    for router in routers:
        router.step_end()


def add_up(tensors: Sequence[Tensor]) -> None:
    """Sums each tensor over the ranks of the default group, in place."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)
