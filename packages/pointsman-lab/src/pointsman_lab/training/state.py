"""What a run consists of while it trains, one step of it, its way to a checkpoint and back, and its early end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._errors import RunError, Stopped
from pointsman.control import named_routers, set_top_k, step_end, undecayed
from pointsman.delivery import deliveries
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.ops.exchange import local_part
from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import clip_gradient, gradient_norm, parallelize
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.models.memory import Memory
from pointsman_lab.progress import Stop
from pointsman_lab.runs.checkpoints import Checkpoint, CheckpointError
from pointsman_lab.training.checkpoint import checkpoint_tensors, load_weights, under
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import autocast, in_bfloat16, seed_step
from pointsman_lab.training.objectives import with_a_target
from pointsman_lab.training.optimizer import (
    build_adam,
    learning_rate,
    lr_scales,
    optimizer_tensors,
    restore_optimizer,
    trainable,
)
from pointsman_lab.training.sharded import restore_sharded, rows_of_all
from pointsman_lab.training.task import Task, check_ranks


class Interrupted(Stopped):
    """The run was asked to stop and has saved."""

    def __init__(self, out: Path, step: int) -> None:
        where = f"(--out {shlex.quote(str(out))})"
        super().__init__(f"stopped after step {step}; saved: the same command with --resume {where} goes on")
        self.out, self.step = out, step


class Diverged(RunError):  # noqa: N818
    """The loss or the gradient is not finite; the message names the step, the layer and the last good checkpoint."""


def first_bad_layer(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Runs `forward` again, without gradients, and names the first layer whose output is not finite."""
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and any(not tensor.isfinite().all() for tensor in tensors_in(output)):
                found.append(name)

        return look

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(hook(name)).remove)
        forward()
    return found[0] if found else None


def first_bad_gradient(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """The parameter nearest to the loss whose gradient is not finite: backward met it first.

    Of several ranks each looks at the parts that it holds.
    """
    for name, parameter in reversed(list(parameters.items())):
        gradient = local_part(parameter.grad)
        if gradient is not None and not gradient.isfinite().all():
            return name
    return None


def first_of_ranks(name: str | None, order: Sequence[str], ranks: Ranks) -> str | None:
    """Of the names that the ranks found, the first in this order."""
    found = [one for one in ranks.gather(name) if one is not None]
    return min(found, key=order.index, default=None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returned: tensors, tuples, dicts, dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


class TrainingState:
    """Model, optimizer, memories and the number of finished steps.

    What a step does follows from these, the settings and the data: batch, k and learning rate are functions of the
    step's number, and each step seeds the default generator from (seed, step). So dropout masks agree between routers
    that draw nothing, and a checkpoint needs no random state.

    Args:
        config: the settings, with the data's vocabulary size.
        ranks: who shares each batch. Each rank has its rows of each micro-batch, so that micro-batches hold the same
            rows for every number of ranks.
        layout: how the ranks divide the model; None: in shards.

    Attributes:
        stopping: whether some rank was asked to stop before the end of the last step; of several ranks.
    """

    def __init__(
        self, config: RunConfig, task: Task, device: torch.device, *, ranks: Ranks = ALONE, layout: Layout | None = None
    ) -> None:
        if ranks.count > 1:
            check_ranks(config, ranks)
        self.config, self.task, self.device, self.ranks = config, task, device, ranks
        self.stopping, self.step = False, 0
        # one rank draws the weights; a model that starts from a run's is read by each
        on_meta = not ranks.first and not config.own.get("start_from")
        with torch.device("meta") if on_meta else nullcontext():
            self.model = task.build_model(config)
        self.layout = layout or Layout(ranks.count)
        if ranks.count > 1:
            gather = torch.bfloat16 if in_bfloat16(config, device) else None
            parallelize(self.model, self.layout, ranks, device=device.type, gather=gather)
        else:
            self.model.to(device)
        self.batches = task.batches(config, device)
        self.objective = task.objective(self.model, config)
        self.tokens_per_step = self.batches.tokens_per_step
        self.parameters = trainable(self.model)
        left_out = undecayed(self.model) if config.decay_on == "matrices" else ()
        self.optimizer = build_adam(config, self.parameters, lr_scales(self.model), left_out)
        self.schedule = config.top_k_schedule
        fixed = [router.fixed_k for _, router in named_routers(self.model)]
        self.sparse = bool(fixed) and not any(fixed)  # whether k can be set
        self.memories: list[Memory | None] = [None] * config.accumulation
        self._deliveries = list(deliveries(self.model).values())
        for delivery in self._deliveries:
            delivery.how = "collect"  # whatever a model from elsewhere says

    def train_step(self, monitor: RoutingMonitor | None = None, stop: Stop | None = None) -> dict[str, Any]:
        """One optimizer step; returns its line of metrics, which is that of all ranks.

        Raises:
            Diverged: loss or gradient are not finite; no weight has changed.
        """
        began = time.perf_counter()
        config, step = self.config, self.step
        if self.batches.is_epoch_start(step):
            self.memories = [None] * config.accumulation
        seed_step(config.seed, step)
        k = self.schedule(step)
        if self.sparse:
            set_top_k(self.model, k)
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        batches = self._micro_batches()
        work_began = time.perf_counter()
        mean, norm, memories = self._pass(batches, monitor)
        loss, size = self._over_ranks(mean, norm, stop)  # the one wait for a GPU
        if not (math.isfinite(loss) and math.isfinite(size)):
            raise Diverged(self._what_diverged(loss, size))
        if config.clip_norm:
            clip_gradient(self.parameters.values(), norm, config.clip_norm)
        self.optimizer.step()
        step_end(self.model)
        ended = time.perf_counter()
        self.memories = memories
        self.step += 1
        return {
            "kind": "train", "step": self.step, "top_k": k, "learning_rate": rate, "loss": loss,
            "bits": loss / math.log(2), "gradient_norm": size, "step_seconds": ended - began,
            "work_seconds": ended - work_began,
        }  # fmt: skip

    def _pass(
        self, batches: Sequence[tuple[Tensor, Tensor]], monitor: RoutingMonitor | None
    ) -> tuple[Tensor, Tensor, list[Memory | None]]:
        """Leaves gradients of the (weighted) mean over micro-batches; returns it, the gradient's norm and memories."""
        losses: list[Tensor] = []
        kept: list[Memory | None] = []
        even = self.task.fixed_shapes
        factor = 1 / (self.config.accumulation * self.objective.passes)  # of the routers' losses
        shares = self.objective.shares([targets for _, targets in batches], self.ranks, even=even)
        for index, ((inputs, targets), memory) in enumerate(zip(batches, self.memories, strict=True)):
            targets = targets if self.ranks.count == 1 or even else with_a_target(targets)
            observed = monitor.observe(self.step + 1) if monitor else nullcontext()
            with observed, autocast(self.config, self.device):
                outcome = self.objective.run(self.model, inputs, targets, memory, self.config.memory_length)
            loss = outcome.loss / self.config.accumulation if shares is None else outcome.loss * shares[index]
            own = [one for each in self._deliveries for one in each.take()]
            (loss + torch.stack(own).sum() * factor if own else loss).backward()  # type: ignore[no-untyped-call]
            losses.append(outcome.nats)
            kept.append(outcome.memory)
        each = torch.stack(losses)
        mean = each.mean() if shares is None else (each * torch.stack(shares)).sum()
        return mean, gradient_norm(self.parameters.values(), self.ranks).to(mean.dtype), kept

    def _over_ranks(self, loss: Tensor, norm: Tensor, stop: Stop | None) -> tuple[float, float]:
        """The loss of all ranks and the norm; notes whether one was asked to stop."""
        if self.ranks.count > 1:
            asked = loss.new_tensor(stop is not None and stop.is_set(), dtype=torch.float64)
            loss, asked = self.ranks.total(loss, asked)
            self.stopping = bool(asked)
        total, size = torch.stack([loss, norm]).tolist()
        return total, size

    def _micro_batches(self) -> Sequence[tuple[Tensor, Tensor]]:
        inputs, targets = self.batches.batch(self.step)
        parts = self.config.accumulation
        whole = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
        if self.ranks.count == 1:
            return list(whole)
        return [tuple(tensor[self.ranks.rows(len(tensor))] for tensor in both) for both in whole]  # type: ignore[misc]

    def _what_diverged(self, loss: float, size: float) -> str:
        """In words what was not finite first: forward once more with the same masks, then the gradients backwards."""
        if self.sparse:
            set_top_k(self.model, self.schedule(self.step))

        def forward() -> None:
            seed_step(self.config.seed, self.step)
            for (inputs, targets), memory in zip(self._micro_batches(), self.memories, strict=True):
                with autocast(self.config, self.device):
                    self.objective.run(self.model, inputs, targets, memory, self.config.memory_length)

        layers = [name for name, _ in self.model.named_modules()]
        layer = first_of_ranks(first_bad_layer(self.model, forward), layers, self.ranks)
        what = f"the gradient's norm is {size}" if math.isfinite(loss) else f"the loss is {loss}"
        order = list(reversed(self.parameters))
        if layer:
            where = f"the first output that is not finite is that of layer {layer}"
        elif not math.isfinite(loss):
            where = "every layer's output is finite, so the fault is in the softmax's loss"
        elif name := first_of_ranks(first_bad_gradient(self.parameters), order, self.ranks):
            where = f"the first gradient that is not finite is that of {name}"
        else:
            where = "the sum over layers overflows"
        return f"step {self.step + 1}: {what}; {where}"

    def tensors(self, monitor: RoutingMonitor | None = None) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: "model", and "trainer" with optimizer, memories and monitor; parts of several ranks'
        tensors as DTensors."""
        rest = {f"optimizer.{name}": of for name, of in optimizer_tensors(self.optimizer, self.parameters).items()}
        for index, memory in enumerate(self.memories):
            tensors = memory.to_tensors() if memory else {}
            if self.ranks.count > 1:
                tensors = {name: rows_of_all(rows, self.device, self.ranks) for name, rows in tensors.items()}
            rest |= {f"memory.{index}.{name}": value for name, value in tensors.items()}
        if monitor:
            rest |= {f"monitor.{name}": value for name, value in monitor.state_dict().items()}
        return {"model": self.model.state_dict(), "trainer": rest}

    def restore(self, checkpoint: Checkpoint, monitor: RoutingMonitor | None = None) -> None:
        """Continues from a checkpoint of the same run.

        Raises:
            CheckpointError: its tensors belong to another model; this state is then unusable.
        """
        if self.ranks.count > 1:
            rest = restore_sharded(checkpoint, self.model, self.parameters, self.ranks, self.device)
        else:
            load_weights(self.model, checkpoint)
            rest = checkpoint_tensors(checkpoint, "trainer")
        try:
            restore_optimizer(self.optimizer, self.parameters, under("optimizer.", rest))
        except ValueError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} is foreign: {error}") from None
        for index in range(self.config.accumulation):
            tensors = under(f"memory.{index}.", rest)
            self.memories[index] = Memory.from_tensors(tensors).to(self.device) if tensors else None
        watched = under("monitor.", rest)
        if monitor and watched:
            monitor.load_state_dict(watched)
        self.step = checkpoint.step
