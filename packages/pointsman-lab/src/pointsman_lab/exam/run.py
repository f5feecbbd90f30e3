"""One run: a row trained on a task with one seed and one learning rate."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman import MoE, Routing, add_losses, step_end
from pointsman.auxiliary import assignment_counts
from pointsman_lab.exam.student import Student
from pointsman_lab.exam.task import BLOCK, Batch, Task, World
from pointsman_lab.training.optimizer import lr_scales, trainable

WARM_UP = 20  # steps
POINTS = 10  # of the learning curve
DEAREST = 1.05
"""A router with more than this times `top_k` experts a token is judged at a lower k, where a task `lowers_k`."""


def rate_at(task: Task, step: int) -> float:
    """The factor of the learning rate: a warm-up, then in each cycle constant, and half a cosine down to 0."""
    length = task.steps / task.cycles
    place = (step % length) / length
    decay = max(0.0, place - task.flat) / (1 - task.flat)
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * decay))


def parameter_groups(student: Student, rate: float) -> list[dict[str, Any]]:
    """Trained parameters; those of a router have the rate times its `lr_scale`."""
    scales = lr_scales(student)
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in trainable(student).values():
        groups.setdefault(rate * scales.get(id(parameter), 1.0), []).append(parameter)
    return [{"params": members, "lr": lr, "initial": lr} for lr, members in groups.items()]


def objective(task: Task, student: Student, batch: Batch) -> torch.Tensor:
    """The loss of a step with the router's own losses; of THOR that of two passes and of their distance."""
    output, _ = student(batch)
    loss = task.loss(output, batch)
    router = student.layer.router if isinstance(student.layer, MoE) else None
    if router is None:
        return loss
    router.objective_known = True
    if router.objective == "consistency":
        other, _ = student(batch)
        distance = task.distance(output, other, batch)
        loss = (loss + task.loss(other, batch) + router.objective_weight * distance) / 2
    return add_losses(loss, student.layer)


def judged(task: Task, student: Student, test: Batch, world: World) -> tuple[float, Routing | None]:
    """The value on test data, and the routing."""
    student.eval()
    with torch.no_grad():
        if task.judged_at:
            values, routings = zip(*(_at(task, student, test, k) for k in task.judged_at), strict=True)
            found = sum(values) / len(values), routings[-1]
        else:
            found = _at(task, student, test, None)
            k = student.layer.router.top_k if task.lowers_k and isinstance(student.layer, MoE) else 1
            while k > 1 and found[1] is not None and experts_per_token(found[1]) > DEAREST * task.top_k:
                k -= 1
                found = _at(task, student, test, k)
    student.train()
    return found


def _at(task: Task, student: Student, test: Batch, k: int | None) -> tuple[float, Routing | None]:
    output, routing = student(test, k)
    return task.value(output, test), routing


def run(task: Task, row: str, seed: int, rate: float, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Trains and judges.

    Returns:
        value (the primary measure; None where it is not finite), curve [[step, value], ...], and of routed rows ami,
        used, cost (experts a token) and confusion (clusters x experts, the last column is none).

    Raises:
        ValueError: the router cannot take this task.
    """
    world = task.world(seed)
    student = Student(task, row, seed)
    groups = parameter_groups(student, rate)
    optimizer = torch.optim.Adam(groups, fused=True)
    torch.manual_seed(seed)  # what routers draw
    curve: dict[int, float] = {}
    loss = torch.zeros(())
    every = task.steps // POINTS
    for step in range(task.steps):
        if step % BLOCK == 0:
            check()
            if not math.isfinite(float(loss.detach())):
                return diverged(curve)
            block = task.block(world, seed, step)
        if step and step % (task.steps // task.cycles) == 0:
            optimizer.state.clear()  # a training of its own: its first steps move nothing by momentum of before
        for group in groups:
            group["lr"] = group["initial"] * rate_at(task, step)
        try:
            loss = objective(task, student, block.at(step % BLOCK))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            step_end(student)
            if (step + 1) % every == 0 or step + 1 == task.steps:
                test = task.test(world, seed, (step + 1) / task.steps)
                curve[step + 1], routing = judged(task, student, test, world)
        except (ValueError, RuntimeError):
            if step and makes_nan(task, student, block.at(step % BLOCK)):
                return diverged(curve)
            raise
    value = task.judge(curve)
    result: dict[str, Any] = {
        "value": value if math.isfinite(value) else None,
        "curve": [[step, one if math.isfinite(one) else None] for step, one in curve.items()],
    }
    if routing is not None:
        clusters = int(test.cluster.max()) + 1
        counts = table(test.cluster, heaviest(routing), clusters, task.experts + 1)
        result |= {
            "ami": adjusted_mutual_information(counts),
            "used": used(routing),
            "cost": experts_per_token(routing),
            "confusion": counts.tolist(),
        }
    return result


def diverged(curve: Mapping[int, float]) -> dict[str, Any]:
    """The result of a run whose loss is not finite any more."""
    return {"value": None, "curve": [[at, one] for at, one in curve.items() if math.isfinite(one)]}


def makes_nan(task: Task, student: Student, batch: Batch) -> bool:
    """Whether a step computes a NaN before it ends or raises, as distributions do at a NaN."""
    seen = _SeesNan()  # type: ignore[no-untyped-call]
    with seen, suppress(Exception):
        objective(task, student, batch)
    return seen.found


class _SeesNan(TorchDispatchMode):  # type: ignore[no-untyped-call]
    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" not in func.__name__:  # whose memory holds anything
            made = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.is_floating_point()]
            self.found = self.found or any(bool(one.isnan().any()) for one in made)
        return result


def table(first: Tensor, second: Tensor, rows: int, columns: int) -> np.ndarray:
    """[rows, columns] counts of the pairs (first, second), both [N] int64."""
    pairs = first.reshape(-1) * columns + second.reshape(-1)
    return pairs.bincount(minlength=rows * columns).view(rows, columns).numpy()


def adjusted_mutual_information(counts: np.ndarray) -> float:
    """AMI = (I - E[I]) / (mean(H) - E[I]) of a table of counts: 1 for the same partition, 0 for chance.

    E[I] is exact, over all tables with the same sums (Vinh, Epps and Bailey 2010, JMLR 11, Eq. 24a); the mean of the
    two entropies is arithmetic.
    """
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0].astype(np.int64)
    if 1 in counts.shape:
        return float(counts.shape == (1, 1))
    n, a, b = int(counts.sum()), counts.sum(1), counts.sum(0)
    logs = np.concatenate([[0.0, 0.0], np.log(np.arange(2, n + 2))]).cumsum()  # log m!

    def entropy(sums: np.ndarray) -> float:
        return float(-(sums / n * np.log(sums / n)).sum())

    held = counts > 0
    mutual = float((counts[held] / n * np.log(n * counts[held] / np.outer(a, b)[held])).sum())
    expected = 0.0
    for i in a:
        for j in b:
            m = np.arange(max(1, i + j - n), min(i, j) + 1)
            chance = logs[i] + logs[j] + logs[n - i] + logs[n - j] - logs[n] - logs[m] - logs[i - m] - logs[j - m]
            expected += float((m / n * np.log(n * m / (i * j)) * np.exp(chance - logs[n - i - j + m])).sum())
    mean = (entropy(a) + entropy(b)) / 2
    return (mutual - expected) / max(mean - expected, np.finfo(float).eps)


def heaviest(routing: Routing) -> Tensor:
    """[N] the expert of each token with the largest weight; E where it has none."""
    place = routing.weights.masked_fill(routing.experts < 0, -1).argmax(-1, keepdim=True)
    expert = routing.experts.gather(-1, place)[:, 0]
    return expert.masked_fill(expert < 0, routing.num_experts)


def experts_per_token(routing: Routing) -> float:
    """How many experts a token has, on average."""
    return float((routing.experts >= 0).sum() / len(routing.experts))


def used(routing: Routing) -> int:
    """How many experts have more than a fifth of an equal share of the assignments."""
    loads = assignment_counts(routing.experts, routing.num_experts)
    return int((loads > 0.2 * loads.sum() / routing.num_experts).sum())
