"""What every check of a trainer needs: a setting, batches, what a trainer offers, and the balance loss in float64.

B sequences, T tokens each, E experts, k chosen ones. A trainer takes one optimizer step on a list of micro-batches. The
gradients that reach its optimizer are read where `torch.optim` is about to use them, whatever the trainer did before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

VOCABULARY, DIM, LENGTH = 64, 32, 12
RATE = 0.1
"""The learning rate of every step."""
BIAS_RATE = 0.01
Batch = dict[str, Tensor]


class NotApplicable(Exception):  # noqa: N818 - nothing went wrong
    """A trainer has no such thing: the message says what is missing."""


@dataclass(frozen=True)
class Setting:
    """What a check asks of a trainer.

    Attributes:
        coefficient: of the balance loss; 0: none.
        balance: "own": the model class's or the engine's; "pointsman": ours in its place.
        bias: a bias that is moved instead of a loss.
        max_norm: the gradients' norm is clipped to it.
        bf16: mixed precision, the weights in float32.
    """

    coefficient: float = 0.0
    balance: str = "own"
    k: int = 2
    layers: int = 1
    experts: int = 4
    bias: bool = False
    checkpointing: bool = False
    compiled: bool = False
    max_norm: float | None = None
    bf16: bool = False


class Trainer:
    """What a check knows of a trainer; a subclass a trainer.

    Attributes:
        name: as `pointsman check NAME` takes it.
        packages: the distributions whose versions the matrix names.
        sigmoid: whether the router's probabilities are sigmoids divided by their sum.
        starts_group: whether torch.distributed is initialised for it; others do it themselves.
    """

    name = ""
    packages: Sequence[str] = ()
    sigmoid = False
    starts_group = False

    def model(self, setting: Setting) -> nn.Module:
        """A tiny language model, the same weights at every call.

        Raises:
            NotApplicable: the trainer has no such setting.
        """
        raise NotImplementedError

    def train(self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting) -> None:
        """One optimizer step on each list of micro-batches."""
        raise NotImplementedError

    def gates(self, model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
        """Each layer's gate, whose first argument is hidden states, and its weight [E, dim]."""
        raise NotImplementedError

    def patched(self) -> AbstractContextManager[Any]:
        """What lets the trainer's code run on a CPU."""
        return nullcontext()

    def read(self, hidden: Tensor) -> Tensor:
        """What a gate was given, as [tokens, dim] in the order of the batch."""
        return hidden.reshape(-1, hidden.shape[-1])

    def experts(self, model: nn.Module) -> list[Tensor]:
        """Weights [E, …] of the experts of the first layer as the forward uses them."""
        raise NotImplementedError

    def biases(self, model: nn.Module) -> list[Tensor]:
        """The bias [E] that enters each layer's choice."""
        raise NotApplicable("it has no bias that balances")

    def evaluate(self, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> None:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                model(**batch)
        model.train()

    def resumed(self, steps: Sequence[Sequence[Batch]], setting: Setting) -> tuple[nn.Module, nn.Module]:
        """A model after all steps, and one after the first, saved, loaded into another model, and the others."""
        whole, first, second = (self.model(setting) for _ in range(3))
        self.train(whole, steps, setting)
        with tempfile.TemporaryDirectory() as folder:
            self.interrupted(first, second, steps, setting, folder)
        return whole, second

    def interrupted(
        self, first: nn.Module, second: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting, folder: str
    ) -> None:
        """`first` takes the first step and is saved in this folder; `second` is loaded from it and takes the others."""
        self.train(first, steps[:1], setting)
        second.load_state_dict(first.state_dict())
        self.train(second, steps[1:], setting)


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rows(count: int, seed: int = 1, equal: bool = True) -> Tensor:
    """[count, T] token ids; equal rows, so that each division of a batch has the same loss, or other ones."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(3, VOCABULARY, (1 if equal else count, LENGTH), generator=generator)
    return found.expand(count, -1).clone()


def batch(ids: Tensor, padding: int = 0) -> Batch:
    """A micro-batch; the last `padding` tokens of each row are padding."""
    labels, mask = ids.clone(), torch.ones_like(ids)
    if padding:
        labels[:, -padding:], mask[:, -padding:] = -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed(ids: Tensor) -> Batch:
    """All rows one after the other in one row: positions begin anew, and no token predicts another row's first."""
    labels, positions = ids.clone(), torch.arange(ids.shape[1]).expand_as(ids)
    labels[:, 0] = -100
    return {key: value.reshape(1, -1).clone() for key, value in zip(
        ("input_ids", "labels", "position_ids"), (ids, labels, positions), strict=True
    )}  # fmt: skip


@contextmanager
def gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inside: each parameter's gradient in float64 as the first step of its optimizer has it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, loss: Any = None) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is not None and name not in found and parameter.grad is not None:
                    found[name] = parameter.grad.detach().double().clone()
        return loss

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        def kept(one: Any) -> Any:  # a closure makes the gradients in the step; LBFGS calls it at other weights again
            return (lambda: keep(optimizer, one())) if callable(one) else one

        if not any(map(callable, (*args[1:], *kwargs.values()))):
            keep(optimizer)
        return (*args[:1], *map(kept, args[1:])), {name: kept(one) for name, one in kwargs.items()}

    with register_optimizer_step_pre_hook(before):
        yield found


def stepped(trainer: Trainer, steps: Sequence[Sequence[Batch]], setting: Setting) -> dict[str, Tensor]:
    """The gradients of the first of these steps; AssertionError if no optimizer made one on the model's parameters."""
    model = trainer.model(setting)
    with gradients(model) as found:
        trainer.train(model, steps, setting)
    if not found:
        raise AssertionError("no optimizer of torch.optim made a step on the model's parameters")
    return found


def effect(trainer: Trainer, batches: Sequence[Batch], setting: Setting) -> Tensor:
    """What the balance loss adds to the gradient of the last layer's gate [E, dim], divided by its coefficient."""
    model = trainer.model(setting)
    own = trainer.gates(model)[-1][1]
    name = next(name for name, parameter in model.named_parameters() if parameter is own)
    found = []
    for coefficient in (1.0, 0.0):
        gradient = stepped(trainer, [batches], replace(setting, coefficient=coefficient))
        if name not in gradient:
            raise NotApplicable("the gate does not train")
        found.append(gradient[name])
    return (found[0] - found[1]).reshape(own.shape)


def hidden_states(trainer: Trainer, model: nn.Module, batches: Sequence[Batch]) -> list[list[Tensor]]:
    """For each micro-batch what each gate reads, [tokens, dim], in a plain forward."""
    found: list[list[Tensor]] = []
    gates = [gate for gate, _ in trainer.gates(model)]

    def keep(place: int, _: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        found[-1][place] = trainer.read(hidden.detach())

    with ExitStack() as inside:
        for place, gate in enumerate(gates):
            inside.enter_context(gate.register_forward_pre_hook(partial(keep, place), with_kwargs=True))
        inside.enter_context(torch.no_grad())
        inside.enter_context(trainer.patched())
        for one in batches:
            found.append([torch.empty(0)] * len(gates))
            model(**one)
    return found


def oracle(trainer: Trainer, batches: Sequence[Batch], setting: Setting) -> Tensor:
    """The gradient [E, dim] of E sum_i f_i P_i over these micro-batches at the last gate, in float64.

    f_i is the share of expert i in the assignments of real tokens, P_i its mean probability (Switch Transformer, (4)).
    """
    model = trainer.model(replace(setting, coefficient=0.0, compiled=False, checkpointing=False))
    weight = trainer.gates(model)[-1][1].detach().double().requires_grad_()
    hidden = torch.cat([one[-1] for one in hidden_states(trainer, model, batches)]).double()
    masks = [one.get("attention_mask", torch.ones_like(one["input_ids"])) for one in batches]
    hidden = hidden[torch.cat([mask.reshape(-1) for mask in masks]).bool()]
    logits = hidden @ weight.reshape(-1, hidden.shape[-1]).T
    probs = torch.softmax(logits, -1)
    if trainer.sigmoid:
        probs = torch.sigmoid(logits) / torch.sigmoid(logits).sum(-1, keepdim=True)
    experts = logits.detach().topk(setting.k, -1).indices.reshape(-1)
    share = torch.bincount(experts, minlength=probs.shape[-1]).double() / len(experts)
    (probs.shape[-1] * (share * probs.mean(0)).sum()).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return weight.grad


def ratio(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How many times `wanted` is in `found`, and the cosine between them."""
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    if float(found.norm()) == 0:
        return 0.0, 0.0
    cosine = nn.functional.cosine_similarity(found, wanted, dim=0)
    return float(found @ wanted / (wanted @ wanted)), float(cosine)
