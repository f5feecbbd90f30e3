"""What `balance` keeps of a model: what its gates returned, the loss of that, and the bias that moves instead."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pointsman import auxiliary
from pointsman.auxiliary import assignment_counts
from pointsman.control import added_up
from pointsman.hf.counterpart import correction_bias, counterpart
from pointsman.hf.gates import PROBE_TOKENS, Gate, run_gate, tensor_of
from pointsman.hf.given import CACHE, real_tokens, say_once
from pointsman.hf.layouts import Form, full_scores, read_any
from pointsman.hf.surgery.replace import replace_routers
from pointsman.ranks import every_rank
from pointsman.routers.frame.registry import parse_spec
from pointsman.routers.papers.loss_free import BiasedTopK, SignUpdate

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
        for module in home.get_submodule(self.gate if self.added else self.owner).modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if not self.added or isinstance(module, BiasedTopK):
                yield from (tensor for name, tensor in own if name == (self.name or "bias"))


def biases_for(home: nn.Module, gates: Sequence[Gate], rate: float) -> tuple[Bias, ...]:
    """The class's correction biases; gates without one get `loss-free` routers, all or none.

    ValueError names a gate for which `loss-free` cannot be.
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
        module = home.get_submodule(owner)
        if module._parameters.pop(name, None) is not None:  # fully_shard would divide it
            module.register_buffer(name, bias.detach())
        found.append(Bias(gate.name, gate.num_experts, rate, owner, name))
    return tuple(found)


@torch.no_grad()
def _bias_of_choice(gate: Gate) -> Tensor | None:
    """The correction bias, where raising it makes every token choose an expert; other tensors [E] only weigh."""
    bias = correction_bias(gate)
    if bias is None or bias.is_meta or _is_loss_free(gate):
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_TOKENS, gate.dim, generator=generator).to(bias.device, tensor_of(gate.module).dtype)
    kept = bias.clone()
    try:
        bias.view(-1)[0] += 1e3
        experts = gate.routed(run_gate(gate.module, hidden, gate.arguments(PROBE_TOKENS))[0])[2]
    finally:
        bias.copy_(kept)
    return bias if bool((experts.reshape(PROBE_TOKENS, -1) == 0).any(-1).all()) else None


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
            raise ValueError(f"hf.balance: how='bias': {type(gate.module).__name__} (gate {gate.name!r}) has no "
                             "correction bias, and no loss-free router chooses as it does; use how='loss'")  # fmt: skip
        options = {"gate": "softmax", **{k: v for k, v in parsed.options.items() if k != "bias"}, "rate": f"{rate:g}"}
        specs.append(":".join(["loss-free", *(f"{name}={value}" for name, value in options.items())]))
    try:
        replace_routers(home, specs)
    except ValueError as error:
        told = str(error).removeprefix("replace_routers: ")
        raise ValueError(f"hf.balance: how='bias': no correction bias, and no loss-free router: {told}") from None


def count(counts: dict[str, Tensor], biases: Iterable[Bias], chosen: Iterable[tuple[str, Tensor]]) -> None:
    """Adds the assignments of one training forward: (gate, experts [tokens, k], -1 for padding)."""
    of = {bias.gate: bias for bias in biases}
    for gate, experts in chosen:
        if gate in of:
            new = assignment_counts(experts.long(), of[gate].experts)
            counts[gate] = counts[gate] + new if gate in counts else new


@torch.no_grad()
def settle(home: Any, biases: Sequence[Bias], counts: dict[str, Tensor]) -> None:
    """Moves every bias once by what was counted, over all ranks; nothing where nothing was."""
    gates: dict[str, Any] = {bias.gate: home.get_submodule(bias.gate) for bias in biases}
    of = {bias.gate: bias for bias in biases if _moves(gates[bias.gate], bias)}
    for gate, bias in of.items():  # this rank may have run none of it
        counts.setdefault(gate, next(bias.tensors(home)).new_zeros(bias.experts, dtype=torch.int64))
    every_rank().add_up([counts[gate] for gate in of])
    for gate, bias in of.items():
        for tensor in bias.tensors(home):
            tensor.data = tensor.data.float()  # bf16 would lose steps of 0.001
            SignUpdate(bias.rate, False).move(tensor.view(-1), {"counts": counts[gate].to(tensor.device)})
        if bias.added:
            gates[gate].pointsman.select.sums.clear()  # counted above, without padding
    routers = [gates[bias.gate].pointsman for bias in biases if bias.added]
    added_up(home, every_rank())([tensor for router in routers for tensor in router.gathered()])
    for router in routers:
        router.step_end()


def _moves(gate: Any, bias: Bias) -> bool:
    """Whether its bias moves by signs here: one that `freeze` holds stays, another update's is its router's."""
    if bias.added:
        return type(gate.pointsman.select.update) is SignUpdate and not gate.pointsman.frozen
    return not hasattr(gate, "pointsman_frozen") or any(one.requires_grad for one in gate.parameters())


class Seat:
    """What a gate returned in the forward that runs, while it is `open`: (output, shape of its tokens).

    `known`: it was open in a forward before; `outside`: in this step the gate ran in training while it was not.
    """

    def __init__(self) -> None:
        self.open = self.known = self.outside = False
        self.seen: list[tuple[Any, torch.Size]] = []

    def __getstate__(self) -> dict[str, Any]:  # a copy is made of no forward, as of one that ended in an error
        return {**self.__dict__, "open": False, "seen": []}


@dataclass(frozen=True)
class Place:
    """A gate of a model: its path, its form (None: read what it returns), and whether the decoder's mask is its own."""

    path: str
    form: Form | None
    decoder: bool

    def seats(self, home: nn.Module) -> Iterator[tuple[nn.Module, Seat]]:
        """The gates at this place: PEFT keeps the one it trains beside the one it was."""
        for module in home.get_submodule(self.path).modules():
            seat = module.__dict__.get("pointsman_seat")
            if seat is not None:
                yield module, seat


@dataclass(frozen=True)
class Balancing:
    """The settings of one balanced model; kept at the model as `pointsman_balancing`."""

    coefficient: float
    how: Literal["loss", "bias"]
    like: Literal["transformers"] | None
    places: tuple[Place, ...]
    names: tuple[str, ...]
    shifts: bool
    biases: tuple[Bias, ...] = ()

    def routings(self, home: Any, given: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """(place, distribution [tokens, E], logits, experts [tokens, k], mask [tokens] or None) of what gates saw."""
        past = 0 if all(given.get(name) is None for name in CACHE) else None
        for place in self.places:
            block = home.get_submodule(place.path.rpartition(".")[0])
            for gate, seat in place.seats(home):
                for output, shape in seat.seen:
                    logits, weights, experts = read_any(place.form, gate, block, output, shape.numel())
                    scores = full_scores(place.form, logits, weights, experts, shares=True)
                    name = "decoder_attention_mask" if place.decoder else "attention_mask"
                    if (real := _real(given.get(name), len(logits), past)) is not None:
                        real = real.reshape(-1).to(logits.device)
                        experts = experts.masked_fill(~real[:, None], -1)
                    yield place, scores, logits, experts, real

    def loss(self, found: Sequence[tuple[Any, ...]]) -> Tensor:
        """The mean over layers of E sum_i f_i P_i; with `like`, transformers' value over all layers at once."""
        if self.like is None:
            values = [auxiliary.balance(probs, experts, mask) for _, probs, _, experts, mask in found]
            return torch.stack([value.to(values[0].device) for value in values]).mean()
        device, k = found[0][2].device, found[0][3].shape[-1]
        logits = torch.cat([one[2].to(device) for one in found]).float()
        probs = torch.softmax(logits, -1)
        experts = probs.topk(k, dim=-1).indices
        masks = [torch.ones(len(one[2]), dtype=torch.bool) if one[4] is None else one[4] for one in found]
        mask = torch.cat([one.to(device) for one in masks]) if any(one[4] is not None for one in found) else None
        experts = experts if mask is None else experts.masked_fill(~mask[:, None], -1)
        pooled: Tensor = k * auxiliary.balance(probs, experts, mask)
        return pooled


def _real(mask: Any, tokens: int, past: int | None) -> Tensor | None:
    """`real_tokens`; None, once said, where the mask does not say it."""
    try:
        return real_tokens(mask, tokens, past)
    except ValueError as error:
        say_once(str(error))
        return None
