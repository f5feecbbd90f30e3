"""Quality of a language model at any k: bits per character or perplexity, and what its routers did meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers, set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.lab.data import EvalStream
from pointsman.lab.data.catalog import Level
from pointsman.lab.data.streams import IGNORE
from pointsman.lab.data.vocabulary import IdArray
from pointsman.lab.evaluation.graph import GraphedForward
from pointsman.lab.evaluation.over_ranks import divides_rows
from pointsman.lab.evaluation.routing import RoutingSummary
from pointsman.lab.models.capture import Recorder
from pointsman.lab.models.transformer_xl import Memory, TransformerXL
from pointsman.lab.progress import Progress, Stop, check_stop
from pointsman.ranks import ALONE, Ranks


@dataclass(frozen=True)
class EvalProtocol:
    """How a model is evaluated; two figures with different protocols do not compare.

    Attributes:
        batch_size: rows of text read side by side.
        segment_length: tokens a segment.
        memory_length: tokens of memory before it, so that a token sees up to segment + memory.
        tokens: how many targets at most, whole segments evenly spaced; None = all.
        seed: of routers that draw at random in evaluation.
    """

    batch_size: int
    segment_length: int
    memory_length: int
    tokens: int | None = None
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class MarkedText:
    """A text in rows, read side by side, some of whose tokens are marked: those that an attack put there.

    Attributes:
        rows: ids of each row; its first token is context and no target.
        marks: of each row, [tokens] bool.
    """

    rows: Sequence[IdArray]
    marks: Sequence[NDArray[np.bool_]]


def quality(level: Level, nats: float) -> tuple[str, float | None]:
    """Name and value of the figure that a level is judged by: bits per character nats / ln 2, or perplexity e^nats.

    At byte level a character is a byte, as everywhere in the enwik8 literature; of words and subwords it is the
    perplexity of a token, which compares between runs with the same vocabulary. None if it is no finite number.
    """
    words = level in ("word", "subword")
    try:
        value = math.exp(nats) if words else nats / math.log(2)
    except OverflowError:
        value = math.inf
    return "perplexity" if words else "bits_per_character", value if math.isfinite(value) else None


def eval_top_k(model: nn.Module, top_k: Sequence[int]) -> tuple[int | None, ...]:
    """The k values that make sense for a model: those asked for, checked, or one None if k cannot be chosen.

    Raises:
        RunError: a k that is no whole number from 1 to the number of experts.
    """
    routers = [router for _, router in named_routers(model)]
    if not routers or any(router.fixed_k for router in routers):
        return (None,)
    experts = [router.num_experts for router in routers]
    for k in top_k:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= min(experts):
            raise RunError(f"top_k={k!r}: allowed are whole numbers from 1 to {min(experts)} (the number of experts)")
    return tuple(top_k)


@torch.no_grad()
def evaluate(
    model: TransformerXL,
    tokens: IdArray | MarkedText,
    level: Level,
    *,
    split: str,
    top_k: Sequence[int],
    protocol: EvalProtocol,
    routing: bool = True,
    precision: AbstractContextManager[Any] | None = None,
    progress: Progress | None = None,
    phase: str = "evaluate",
    stop: Stop | None = None,
    ranks: Ranks = ALONE,
    recorder: Recorder | None = None,
) -> list[dict[str, Any]]:
    """Evaluates a model at every k of `top_k`, one pass over the text each.

    The text is read as `EvalStream` cuts it, with a memory that starts empty at the head of each row. Random routers
    draw from a generator state of their own (`protocol.seed`); the default generator's state, the model's k and its
    mode are as before afterwards.

    Args:
        tokens: ids [n] of the part (`corpus.split(split)`), in the model's vocabulary; or a marked text, of which
            all is read.
        level: what a token is; decides between bits per character and perplexity.
        split: name of the part, for the record.
        top_k: k values; of a model without routers one result comes back, with the number of experts as its k.
        routing: whether entropies and loads are gathered.
        precision: an autocast context.
        progress: a display, in segments over all k values.
        stop: asks the evaluation to stop.
        recorder: captures the forward at each k as a graph; None: forwards run eagerly.
        ranks: who shares the rows; every rank gets the results of all. Where a row's figures depend on what is read
            beside it, or on draws, every rank reads all rows.

    Returns:
        For each k: {"split", "top_k", "nats", "metric", "value", "tokens",
        "routers": {layer: {"entropy", "entropy_std", "load"}}}. Entropies are of the full distribution before mixing,
        means and deviations over tokens in nats; with a mixer "mixed_entropy" is that of what selection saw. `load` [E]
        is each expert's share of the assignments. Of a marked text also "unmarked": {"nats", "value", "tokens"}, with
        the marked tokens not counted as targets.

    Raises:
        RunError: a k outside 1 … N, or a text shorter than one segment.
        Stopped: `stop` was set; nothing is saved.
    """
    device = next(model.parameters()).device
    marks: EvalStream | None = None
    if isinstance(tokens, MarkedText):
        stream = EvalStream.of_rows(tokens.rows, protocol.segment_length, device)
        marks = EvalStream.of_rows([row.astype(np.uint8) for row in tokens.marks], protocol.segment_length, device)
    else:
        stream = EvalStream(tokens, protocol.batch_size, protocol.segment_length, device, protocol.tokens)
    values = eval_top_k(model, top_k)
    if marks is not None or not divides_rows(model):
        ranks = ALONE
    if progress:
        progress.phase(phase, len(stream) * len(values))
    results = []
    with evaluating(model, protocol.seed):
        for index, k in enumerate(values):
            gathered = RoutingSummary(model) if routing else None
            with set_top_k(model, k) if k else nullcontext():
                sums = _sums(
                    model, stream, marks, protocol, gathered, precision, progress, index * len(stream), stop, ranks,
                    recorder,
                )  # fmt: skip
            if gathered:
                gathered.gather(ranks)
            metric, figures = quality(level, 0.0)[0], [_figures(level, *pair) for pair in sums]
            result: dict[str, Any] = {"split": split, "top_k": k or model.config.num_experts}
            result |= {"nats": figures[0]["nats"], "metric": metric, **figures[0]}
            if marks:
                result["unmarked"] = figures[1]
            results.append(result | ({"routers": gathered.result()} if gathered else {}))
    return results


def _figures(level: Level, nats: float, count: int) -> dict[str, Any]:
    """Of `count` targets with `nats` together."""
    mean = nats / count if count else math.nan
    return {"nats": mean if count else None, "value": quality(level, mean)[1], "tokens": count}


def _sums(
    model: TransformerXL,
    stream: EvalStream,
    marks: EvalStream | None,
    protocol: EvalProtocol,
    gathered: RoutingSummary | None,
    precision: AbstractContextManager[Any] | None,
    progress: Progress | None,
    done: int,
    stop: Stop | None,
    ranks: Ranks,
    recorder: Recorder | None,
) -> list[tuple[float, int]]:
    """(nats, targets) of all targets, and of the unmarked ones."""
    device = next(model.parameters()).device  # nothing waits for it before the last segment
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    whole = stream.rows % ranks.count == 0  # otherwise some ranks have rows of padding
    memory: Memory | None = None

    def plain(inputs: Tensor, targets: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        output = model(inputs, targets, memory, memory_length=protocol.memory_length, reduction="none")
        assert output.loss is not None
        return output.loss, output.memory

    def watch() -> AbstractContextManager[Any]:
        return gathered.watch(model) if gathered else nullcontext()

    def watched(*given: Any) -> tuple[Tensor, Memory | None]:
        with watch():
            return plain(*given)

    lengths = protocol.segment_length, protocol.memory_length
    forward = watched if recorder is None else GraphedForward(model, plain, watch, *lengths, recorder)
    for index, (inputs, targets) in enumerate(stream):
        check_stop(stop)
        inputs, targets = (_own_rows(tensor, fill, ranks) for tensor, fill in ((inputs, 0), (targets, IGNORE)))
        real = targets >= 0
        if gathered:
            gathered.mask = None if whole and stream.is_whole(index) else real.reshape(-1)
        with precision or nullcontext():
            each, memory = forward(inputs, targets, memory)
        losses = each.double()
        counted = real if marks is None else marks.batch(index)[1] == 0
        totals += torch.stack([losses.sum(), losses.masked_fill(~counted, 0.0).sum()])
        counts += torch.stack([real.sum(), counted.sum()])
        done += 1
        if progress:
            progress.advance(done, {})
    totals, counts = ranks.total(totals.cpu(), counts.cpu())
    return list(zip(totals.tolist(), counts.tolist(), strict=True))


def _own_rows(tensor: Tensor, fill: int, ranks: Ranks) -> Tensor:
    """This rank's share of rows [rows, t]; as many on every rank, if need be with rows of `fill`."""
    if ranks.count == 1:
        return tensor
    each = -(-len(tensor) // ranks.count)
    own = tensor[ranks.rank * each : (ranks.rank + 1) * each]
    return torch.cat([own, own.new_full((each - len(own), *own.shape[1:]), fill)])
