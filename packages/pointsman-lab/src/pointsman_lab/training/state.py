"""What a run consists of while it trains, one step of it, and its way into a checkpoint and back."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pointsman.control import named_routers, set_top_k, step_end, undecayed
from pointsman.delivery import deliveries
from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import parallelize
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.data.streams import BatchStream
from pointsman_lab.models.capture import Recorder
from pointsman_lab.models.memory import Memory
from pointsman_lab.progress import Monitor, Stop
from pointsman_lab.runs.checkpoints import Checkpoint, CheckpointError
from pointsman_lab.training.checkpoint import checkpoint_tensors, load_weights, under
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.failures import (
    Diverged,
    Finite,
    first_bad_gradient,
    first_bad_layer,
    first_of_ranks,
    what_diverged,
)
from pointsman_lab.training.graph import Batches, GraphedStep, Memories, Observe, PassResult, cuda_recorder
from pointsman_lab.training.kernels import autocast, in_bfloat16, seed_step
from pointsman_lab.training.objectives import with_a_target
from pointsman_lab.training.optimizer import (
    build_adam,
    clip_gradient,
    gradient_norm,
    learning_rate,
    lr_scales,
    optimizer_tensors,
    rates_on_device,
    restore_optimizer,
    set_learning_rate,
    trainable,
)
from pointsman_lab.training.sharded import restore_sharded, rows_of_all
from pointsman_lab.training.task import Task, check_ranks


class TrainingState:
    """Model, optimizer, memories and the number of finished steps.

    What a step does follows from these, the settings and the data: batch, k and learning rate are functions of the
    step's number, and each step seeds the default generator from (seed, step). So dropout masks agree between routers
    that draw nothing, and a checkpoint needs no random state.

    Args:
        config: the settings, with the data's vocabulary size.
        recorder: what captures and replays steps with `cuda_graph`; None: CUDA graphs.
        ranks: who shares each batch. Each rank has its rows of each micro-batch, so that micro-batches hold the same
            rows for every number of ranks.
        layout: how the ranks divide the model; None: in shards.

    Attributes:
        stopping: whether some rank was asked to stop before the end of the last step; of several ranks.

    Raises:
        RunError: ranks that do not divide a micro-batch, or settings that one process only can have.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        device: torch.device,
        recorder: Recorder | None = None,
        *,
        ranks: Ranks = ALONE,
        layout: Layout | None = None,
    ) -> None:
        if ranks.count > 1:
            check_ranks(config, ranks)
        self.config = config
        self.ranks = ranks
        self.stopping = False
        self.device = device
        self.task = task
        # one rank draws the weights; a model that starts from a run's is read by each
        on_meta = not ranks.first and not config.own.get("start_from")
        with torch.device("meta") if on_meta else nullcontext():
            self.model = task.build_model(config)
        if config.cuda_graph and recorder is None:
            routers = [router for _, router in named_routers(self.model)]
            recorder = cuda_recorder(config, device, routers, fixed_shapes=task.fixed_shapes)
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
        if config.cuda_graph or (device.type == "cuda" and ranks.count == 1):  # no tensor joins sharded parameters
            rates_on_device(self.optimizer, device)
        self.schedule = config.top_k_schedule
        fixed = [router.fixed_k for _, router in named_routers(self.model)]
        self.sparse = bool(fixed) and not any(fixed)  # whether k can be set
        self.memories: list[Memory | None] = [None] * config.accumulation
        self.step = 0
        self._deliveries = list(deliveries(self.model).values())
        for delivery in self._deliveries:
            delivery.how = "collect"  # whatever a model from elsewhere says
        self.graph: GraphedStep | None = None
        self._resident: BatchStream | None = None  # a corpus on the device, and where the step's batch begins there
        self._place = torch.zeros((), dtype=torch.int64, device=device)
        self._finite, self._unread = Finite(device), 0  # of graphed steps, and how many of them nobody has read
        self._seconds = self._work = 0.0  # of unread steps
        if config.cuda_graph and recorder:
            if isinstance(self.batches, BatchStream) and self.batches.reside():
                self._resident = self.batches
            given = self.model, self._pass, self._finish, config.memory_length, recorder
            self.graph = GraphedStep(*given, self._resident is not None)

    def train_step(
        self, monitor: Monitor | None = None, stop: Stop | None = None, *, read: bool = True
    ) -> dict[str, Any]:
        """One optimizer step; returns its line of metrics, which is that of all ranks.

        Args:
            stop: of this rank; all of them learn in `stopping` whether one was set.
            read: whether the line has to hold loss and norm. A replayed graph is not waited for otherwise; what this
                step does if it is not finite, and all after it, is nothing, and `check` or the next line says so.
                "step_seconds" is then the mean since the last line, "work_seconds" the sum.

        Raises:
            Diverged: loss or gradient are not finite; no weight has changed.
        """
        began = time.perf_counter()
        config, step = self.config, self.step
        if self.batches.is_epoch_start(step):
            self.check()
            self.memories = [None] * config.accumulation
        seed_step(config.seed, step)
        k = self.schedule(step)
        if self.sparse:
            set_top_k(self.model, k)
        rate = learning_rate(config, step)
        set_learning_rate(self.optimizer, rate)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        batches = None if self.graph else self._micro_batches()
        work_began = time.perf_counter()
        passed = self._forward_and_backward(k, batches, monitor)
        self._unread += 1
        read = read or self.graph is None or not self.graph.replayed
        figures = self._read(passed.figures, stop, step + 1) if read else None  # the one wait for a GPU
        if self.graph is None:
            clip_gradient(self.parameters, passed.figures[1], config.clip_norm)
            self.optimizer.step()
        step_end(self.model, unless=None if read else self._finite.bad)
        ended = time.perf_counter()
        self.memories = passed.memories
        self.step += 1
        row: dict[str, Any] = {"kind": "train", "step": self.step, "top_k": k, "learning_rate": rate}
        self._seconds, self._work = self._seconds + ended - began, self._work + ended - work_began
        if figures is None:
            return row
        (loss, size, steps), seconds, worked = figures, self._seconds, self._work
        self._seconds = self._work = 0.0
        row |= {"loss": loss, "bits": loss / math.log(2), "gradient_norm": size}
        return row | {"step_seconds": seconds / steps, "work_seconds": worked}

    def check(self) -> None:
        """Waits for steps that nobody has read.

        Raises:
            Diverged: the loss or the gradient of one is not finite; no weight has changed since.
        """
        if self._unread:
            self._read(None, None, self.step)

    def _read(self, figures: Tensor | None, stop: Stop | None, done: int) -> tuple[float, float, int]:
        """Loss and norm of the last of `done` steps, and how many nobody had read. Raises Diverged."""
        steps, self._unread = self._unread, 0
        if self.graph is None:
            assert figures is not None
            loss, size = self._over_ranks(figures, stop).tolist()
            bad = not (math.isfinite(loss) and math.isfinite(size))
        else:
            loss, size, bad, good = self._finite.read()
            self.step = done - steps + good if bad else self.step
        if bad:
            raise Diverged(self._what_diverged(loss, size))
        return loss, size, steps

    def _forward_and_backward(self, k: int, batches: Batches | None, monitor: Monitor | None) -> PassResult:
        """As a graph, and whenever steps may become one, with `_finish`; the others without."""
        step = self.step + 1

        def observe() -> AbstractContextManager[None]:
            return monitor.observe(step) if monitor else nullcontext()

        if self.graph is None:
            assert batches is not None
            return self._pass(batches, self.memories, observe)
        if self._resident:
            self._place.fill_(self._resident.start(self.step))
        return self.graph(k if self.sparse else 1, self._micro_batches, self.memories, observe)

    def _finish(self, figures: Tensor) -> Tensor:
        """Clips the gradient and steps, unless loss or gradient of this or an unread step are not finite; nothing waits
        for the device."""
        bad = self._finite.add(figures)
        clip_gradient(self.parameters, figures[1].masked_fill(bad, 0), self.config.clip_norm)
        self.optimizer.found_inf = bad.to(torch.float32)  # type: ignore[attr-defined]
        self.optimizer.step()
        return bad

    def _pass(self, batches: Batches, memories: Memories, observe: Observe) -> PassResult:
        """Leaves gradients of the (weighted) mean over micro-batches, and nothing else: a graph may stand for it."""
        losses: list[Tensor] = []
        kept: list[Memory | None] = []
        even = self.task.fixed_shapes
        factor = 1 / (self.config.accumulation * self.objective.passes)  # of the routers' losses
        shares = self.objective.shares([targets for _, targets in batches], self.ranks, even=even)
        for index, ((inputs, targets), memory) in enumerate(zip(batches, memories, strict=True)):
            targets = targets if self.ranks.count == 1 or even else with_a_target(targets)
            with observe(), autocast(self.config, self.device):
                outcome = self.objective.run(self.model, inputs, targets, memory, self.config.memory_length)
            loss = outcome.loss / self.config.accumulation if shares is None else outcome.loss * shares[index]
            own = [one for each in self._deliveries for one in each.take()]
            (loss + torch.stack(own).sum() * factor if own else loss).backward()  # type: ignore[no-untyped-call]
            losses.append(outcome.nats)
            kept.append(outcome.memory)
        each = torch.stack(losses)
        mean = each.mean() if shares is None else (each * torch.stack(shares)).sum()
        norm = gradient_norm(self.parameters, self.ranks)
        return PassResult(torch.stack([mean, norm.to(mean.dtype)]), kept)

    def _over_ranks(self, figures: Tensor, stop: Stop | None) -> Tensor:
        """The figures with the loss of all ranks, and whether one was asked to stop."""
        if self.ranks.count == 1:
            return figures
        asked = figures.new_tensor(stop is not None and stop.is_set(), dtype=torch.float64)
        loss, asked = self.ranks.total(figures[0], asked)
        self.stopping = bool(asked)
        return torch.stack([loss, figures[1]])

    def _micro_batches(self) -> Batches:
        inputs, targets = self._resident.at(self._place) if self._resident else self.batches.batch(self.step)
        parts = self.config.accumulation
        whole = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
        if self.ranks.count == 1:
            return list(whole)
        return [tuple(tensor[self.ranks.rows(len(tensor))] for tensor in both) for both in whole]  # type: ignore[misc]

    def _what_diverged(self, loss: float, size: float) -> str:
        """Finds the layer: forward once more with the same masks, then the gradients from the loss backwards."""
        if self.sparse:
            set_top_k(self.model, self.schedule(self.step))
        if self._resident:
            self._place.fill_(self._resident.start(self.step))

        def forward() -> None:
            seed_step(self.config.seed, self.step)
            for (inputs, targets), memory in zip(self._micro_batches(), self.memories, strict=True):
                with autocast(self.config, self.device):
                    self.objective.run(self.model, inputs, targets, memory, self.config.memory_length)

        def gradient() -> str | None:
            if self.graph:  # later steps may have left theirs
                self.optimizer.zero_grad(set_to_none=True)
                seed_step(self.config.seed, self.step)
                self._pass(self._micro_batches(), self.memories, nullcontext)
            return first_of_ranks(first_bad_gradient(self.parameters), list(reversed(self.parameters)), self.ranks)

        layers = [name for name, _ in self.model.named_modules()]
        layer = first_of_ranks(first_bad_layer(self.model, forward), layers, self.ranks)
        return what_diverged(self.step + 1, loss, size, layer, gradient)

    def tensors(self, monitor: Monitor | None = None) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: "model", and "trainer" with optimizer, memories and monitor; parts of several ranks'
        tensors as DTensors."""
        rest = {
            f"optimizer.{name}": value for name, value in optimizer_tensors(self.optimizer, self.parameters).items()
        }
        for index, memory in enumerate(self.memories):
            tensors = memory.to_tensors() if memory else {}
            if self.ranks.count > 1:
                tensors = {name: rows_of_all(rows, self.device, self.ranks) for name, rows in tensors.items()}
            rest |= {f"memory.{index}.{name}": value for name, value in tensors.items()}
        if monitor:
            rest |= {f"monitor.{name}": value for name, value in monitor.state_dict().items()}
        return {"model": self.model.state_dict(), "trainer": rest}

    def restore(self, checkpoint: Checkpoint, monitor: Monitor | None = None) -> None:
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
