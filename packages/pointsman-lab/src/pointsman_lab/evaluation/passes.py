"""What all evaluations share: a pass over the data at each k with progress and autocast, and what routers do in it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers, set_top_k
from pointsman.diagnostics.base import unmixed
from pointsman.diagnostics.collection import Diagnostics
from pointsman.diagnostics.observe import evaluating
from pointsman.ranks import ALONE, Ranks
from pointsman.recording import record_routing
from pointsman.routing import Routing, RoutingContext
from pointsman_lab.progress import Progress, Quiet, Stop, check_stop

T = TypeVar("T")


class AgreedStop:
    """A `Stop` that is set on all ranks as soon as it is on one; every rank must ask it equally often."""

    def __init__(self, ranks: Ranks, stop: Stop | None) -> None:
        self._ranks, self._stop = ranks, stop

    def is_set(self) -> bool:
        asked = torch.tensor(self._stop is not None and self._stop.is_set(), dtype=torch.float64)
        return bool(self._ranks.total(asked)[0])


@contextmanager
def each_its_own(model: nn.Module) -> Iterator[None]:
    """Inside, routers look at the rows of their own rank alone: for ranks that read the same rows, or rows apart."""
    parts: list[Any] = [part for part in model.modules() if isinstance(getattr(part, "ranks", None), Ranks)]
    before = [part.ranks for part in parts]
    for part in parts:
        part.ranks = ALONE
    try:
        yield
    finally:
        for part, ranks in zip(parts, before, strict=True):
            part.ranks = ranks


def own_share(batches: Iterable[T], count: int, ranks: Ranks) -> Iterator[tuple[T, bool]]:
    """This rank's part of `count` batches, and whether each counts.

    Rank r reads the batches r, r + W, …. Ranks read equally many, since a model over ranks runs on all of them at once:
    one that lacks a batch reads another that does not count.
    """
    given = 0
    last: T | None = None
    for number, last in enumerate(batches):
        if number % ranks.count == ranks.rank:
            given += 1
            yield last, True
    while last is not None and given < -(-count // ranks.count):
        given += 1
        yield last, False


def draws(model: nn.Module) -> bool:
    """Whether an evaluation draws at random, so that ranks cannot share the batches out."""
    return any(router.stochastic for _, router in named_routers(model))


def divides_rows(model: nn.Module) -> bool:
    """Whether a sequence gets the same figures whatever is evaluated beside it, so that ranks may share them out."""
    return not draws(model) and all(router.batch_invariant for _, router in named_routers(model))


@dataclass(frozen=True)
class EvaluationContext:
    """How an evaluation runs.

    Attributes:
        precision: an autocast context, entered at every forward.
        progress: a display, in batches over all k values.
        stop: asks it to stop; then `Stopped` is raised, and nothing is saved.
        final: whether it is the evaluation of the finished run, which gathers entropies and loads; otherwise a
            validation during training.
        ranks: who evaluates, each with the same arguments; every rank gets the results of the whole. An evaluation that
            does not divide its rows has every rank read all of them.
        name: of the phase on the display; "": "evaluate" or "validate".
    """

    precision: AbstractContextManager[Any] = field(default_factory=nullcontext)
    progress: Progress = field(default_factory=Quiet)
    stop: Stop | None = None
    final: bool = True
    ranks: Ranks = ALONE
    name: str = ""


PLAIN = EvaluationContext()


class Pass:
    """One pass over the data at one k, and in a final evaluation entropy, load and experts a token of every router."""

    def __init__(self, model: Any, k: int | None, how: EvaluationContext, ranks: Ranks, first: int, count: int) -> None:
        self.model, self.how, self.ranks = model, how, ranks
        self.top_k: int = k or model.config.num_experts
        self._mixed = {name: router.mix is not None for name, router in named_routers(model)} if how.final else {}
        self._diagnostics = Diagnostics("entropy", "load")
        self._mask: Tensor | None = None  # [tokens], True where a token counts
        self._done, self._count, self._end = first, count, first + count

    def read(self, batches: Iterable[T], each: int = 1) -> Iterator[T]:
        """The batches; each counts as `each` on the display."""
        for batch in batches:
            check_stop(self.how.stop)
            yield batch
            self._done = min(self._done + each, self._end)
            self.how.progress.advance(self._done, {})

    def share(self, batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """This rank's part of the batches, and whether each counts (`own_share`)."""
        return self.read(own_share(batches, self._count, self.ranks), self.ranks.count)

    def watch(self, mask: Tensor | None = None) -> AbstractContextManager[Any]:
        """Inside, what the routers do is gathered; `mask` [tokens] is False where a token does not count."""
        self._mask = mask
        return record_routing(self.model, self._take) if self._mixed else nullcontext()

    def _take(self, name: str, routing: Routing, context: RoutingContext | None) -> None:
        self._diagnostics.update(name, routing, self._mask)

    def routers(self) -> dict[str, dict[str, Any]]:
        """What the routers of all ranks did: {layer: {"entropy", "entropy_std", "load", …}}."""
        gathered = self._diagnostics.gather(self.ranks.group) if self.ranks.count > 1 else self._diagnostics
        results = {}
        for name, found in gathered.result().items():
            entropy, load = found["entropy"], found["load"]
            results[name] = {"entropy": entropy["mean"], "entropy_std": entropy["std"], "load": load["share"]}
            if load["tokens"]:
                results[name]["experts_per_token"] = load["assignments"] / load["tokens"]
            if self._mixed[name]:
                results[name]["mixed_entropy"] = entropy["mixed_mean"]
        return results

    @contextmanager
    def forward(self, mask: Tensor | None = None, *, counts: bool = True) -> Iterator[None]:
        """A forward: autocast, and `watch` unless the batch does not count."""
        with self.how.precision, self.watch(mask) if counts else nullcontext():
            yield


def evaluated(
    model: Any,
    top_k: Sequence[int],
    one_pass: Callable[[Pass], dict[str, Any]],
    *,
    split: str,
    batches: int,
    how: EvaluationContext,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> list[dict[str, Any]]:
    """A pass at every k of `top_k`; of a model without a choice of k one pass, with the number of experts as its k.

    A router that draws draws the same at a k whatever others are asked for. The default generator's state, the model's
    k and its mode are as before afterwards.

    Returns:
        For each k: {"split", "top_k", figures, "routers": what `Pass.routers` has, of a final evaluation}.

    Raises:
        Stopped: `how.stop` was set.
    """
    values = eval_top_k(model, top_k)
    how.progress.phase(how.name or ("evaluate" if how.final else "validate"), batches * len(values))
    results = []
    for index, k in enumerate(values):
        one = Pass(model, k, how, ranks, index * batches, batches)
        with evaluating(model, seed), set_top_k(model, k) if k else nullcontext():
            result = {"split": split, "top_k": one.top_k, **one_pass(one)}
        results.append({**result, "routers": one.routers()} if how.final else result)
    return results


def eval_top_k(model: nn.Module, top_k: Sequence[int]) -> tuple[int | None, ...]:
    """The k values that make sense for a model: those asked for, checked, or one None if k cannot be chosen."""
    routers = [router for _, router in named_routers(model)]
    if not routers or any(router.fixed_k for router in routers):
        return (None,)
    experts = [router.num_experts for router in routers]
    for k in top_k:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= min(experts):
            raise RunError(f"top_k={k!r}: allowed are whole numbers from 1 to {min(experts)} (the number of experts)")
    return tuple(top_k)


def map_routing(routing: Routing, function: Callable[[Tensor], Tensor]) -> Routing:
    """`function` applied to each tensor of a row for each token: to select tokens or move to a device."""
    fields = (routing.experts, routing.weights, routing.probs, routing.logits)
    experts, weights, probs, logits = map(function, fields)
    before = None if routing.unmixed is None else function(routing.unmixed)
    return Routing(experts, weights, probs, logits, unmixed=before, how=routing.combine.rows(function))


def join_routings(routings: Sequence[Routing]) -> Routing:
    """One routing of the tokens of all `routings`, in order."""
    fields = [(one.experts, one.weights, one.probs, one.logits, unmixed(one)) for one in routings]
    experts, weights, probs, logits, before = (torch.cat(tensors) for tensors in zip(*fields, strict=True))
    combine = routings[0].combine.joined([one.combine for one in routings])
    return Routing(experts, weights, probs, logits, unmixed=before, how=combine)
