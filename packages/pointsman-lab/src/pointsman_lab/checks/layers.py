"""MoE layers of this library and of engines for many GPUs, in a tiny language model, trained as each engine does it.

The engines' own code routes, balances and scales; the loop around it is written here as their trainers have it. Two
processes share the batch through DistributedDataParallel.
"""

# mypy: disable-error-code="no-any-return"
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman.testing.trainers.case import BIAS_RATE, DIM, RATE, VOCABULARY, Batch, Setting, Trainer
from pointsman.testing.trainers.own import prepared

HIDDEN = 24
IGNORED = -100


@dataclass
class Output:
    """Loss summed over the labels, and their number."""

    total: Tensor
    labels: Tensor

    @property
    def loss(self) -> Tensor:
        return self.total / self.labels


class Tiny(nn.Module):
    """Embedding, sparse layers with a norm before each, logits; no attention.

    Args:
        layers: called with hidden states [B, T, dim] and the mask [B, T] bool of real tokens.
    """

    def __init__(self, layers: Sequence[nn.Module], checkpointing: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers, self.checkpointing = nn.ModuleList(layers), checkpointing
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        with torch.no_grad():
            self.embedding.weight[:, 0] = 1.0  # a part that all tokens share, for collapsed layers

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Output:
        hidden = F.normalize(self.embedding(input_ids), dim=-1) * DIM**0.5
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for layer in self.layers:
            if self.checkpointing:
                hidden = hidden + checkpoint(layer, hidden, real.bool(), use_reentrant=False)
            else:
                hidden = hidden + layer(hidden, real.bool())
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        return Output(F.cross_entropy(logits.float(), targets, reduction="sum"), (targets != IGNORED).sum())


class Layer(nn.Module):
    """A layer of an engine, called as `Tiny` calls it."""

    def __init__(self, moe: nn.Module, call: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.moe, self.call = moe, call

    def forward(self, hidden: Tensor, real: Tensor) -> Tensor:
        return self.call(self.moe, hidden, real)


class OfLayers(Trainer):
    """A trainer of `Tiny` with layers of an engine, with the engine's own router or ours in them; a subclass each."""

    starts_group = True

    def layer(self, setting: Setting, place: int) -> Layer:
        raise NotImplementedError

    def labels(self, batches: Sequence[Batch]) -> Tensor:
        return torch.stack([(one["labels"][:, 1:] != IGNORED).sum() for one in batches]).sum()

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        """All micro-batches of a step, forward and backward, divided by the labels of the whole step."""
        labels = self.labels(batches)
        for one in batches:
            (model(**one).total / labels).backward()

    def before_step(self, model: Any) -> None:
        """What the engine does after the backward passes and before the optimizer step."""

    def after_step(self, model: Any) -> None:
        """What the engine does after the optimizer step."""
        from pointsman.engines.common import step_end

        if any(hasattr(module, "step_end") for module in model.modules()):
            step_end(model)

    def experts(self, model: Any) -> list[Tensor]:
        return [parameter for parameter in model.layers[0].moe.experts.parameters() if parameter.dim() == 3]

    def own(self, moe: Any) -> Any:
        """What the engine's layer calls as its router."""
        return moe.router

    def ours(self, moe: Any) -> Any:
        """Our router in it; None where it is the engine's own."""
        return getattr(self.own(moe), "router", None)

    def gate(self, moe: Any) -> nn.Module:
        return self.ours(moe) or self.own(moe)

    def weight(self, moe: Any) -> Tensor:
        ours = self.ours(moe)
        return self.own(moe).weight if ours is None else ours.score.weight

    def bias(self, moe: Any) -> Tensor:
        """The bias of the engine's own router."""
        raise NotImplementedError

    def biases(self, model: Any) -> list[Tensor]:
        pairs = [(layer.moe, self.ours(layer.moe)) for layer in model.layers]
        return [self.bias(moe) if ours is None else ours.select.bias for moe, ours in pairs]

    def patched(self) -> Any:
        """What lets the engine's code run on a CPU."""
        return mock.patch.object(torch.cuda, "current_device", return_value="cpu")

    def spec(self, setting: Setting) -> str:
        """The router of ours with what a setting asks for."""
        if setting.bias:
            return f"loss-free:rate={BIAS_RATE}"
        return "smoe:bias=false" + (f":balance={setting.coefficient}" if setting.coefficient else "")

    def model(self, setting: Setting) -> nn.Module:
        torch.manual_seed(0)
        with self.patched():
            model = Tiny([self.layer(setting, place) for place in range(setting.layers)], setting.checkpointing)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if not parameter.is_floating_point() or parameter is model.embedding.weight:
                    continue
                parameter.normal_(std=0.1, generator=generator)
            for place, (_, weight) in enumerate(self.gates(model)):
                weight.mul_(2)
                if setting.layers > 1:  # every layer prefers another expert
                    weight.view(setting.experts, -1)[place % setting.experts, 0] += 1.0
        return model.to(torch.bfloat16 if setting.bf16 else torch.float32).train()

    def gates(self, model: Any) -> list[tuple[nn.Module, Tensor]]:
        return [(self.gate(layer.moe), self.weight(layer.moe)) for layer in model.layers]

    def train(self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting) -> None:
        ready = prepared(model, replace(setting, checkpointing=False))  # `Tiny` has it itself
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        with self.patched():
            for batches in steps:
                self.backward(ready, batches, setting)
                self.before_step(model)
                if setting.max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                self.after_step(model)

    def evaluate(self, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> None:
        with self.patched():
            super().evaluate(model, batches, setting)


class Pointsman(OfLayers):
    """Layers of this library in a loop with `add_losses`."""

    name = "pointsman"
    packages = ("pointsman", "torch")

    def layer(self, setting: Setting, place: int) -> Layer:
        from pointsman import MoE, RoutingContext

        moe = MoE(DIM, HIDDEN, setting.experts, top_k=setting.k, router=self.spec(setting))
        return Layer(moe, lambda moe, hidden, real: moe(hidden, RoutingContext(padding_mask=real)))

    def backward(self, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> None:
        from pointsman import add_losses

        for one in batches:
            (add_losses(model(**one).loss, model) / len(batches)).backward()  # type: ignore[no-untyped-call]

    def ours(self, moe: Any) -> Any:
        return moe.router
