"""Quality of a language model at any k: bits per character or perplexity, and what its routers did meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pointsman.ranks import ALONE, Ranks
from pointsman_lab.data.catalog import Level
from pointsman_lab.data.streams import IGNORE, EvalStream
from pointsman_lab.data.vocabulary import IdArray
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, Pass, divides_rows, evaluated
from pointsman_lab.models.memory import Memory
from pointsman_lab.models.transformer_xl import TransformerXL


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


@torch.no_grad()
def evaluate(
    model: TransformerXL,
    tokens: IdArray | tuple[IdArray, ...],
    level: Level,
    *,
    split: str,
    top_k: Sequence[int],
    protocol: EvalProtocol,
    how: EvaluationContext = PLAIN,
) -> list[dict[str, Any]]:
    """Evaluates a model at every k of `top_k`, one pass over the text each.

    The text is read as `EvalStream` cuts it, with a memory that starts empty at the head of each row. Random routers
    draw from a generator state of their own (`protocol.seed`).

    Args:
        tokens: ids [n] of the part (`corpus.split(split)`), in the model's vocabulary; or rows of ids, read side by
            side, of which all is read.
        level: what a token is; decides between bits per character and perplexity.
        split, top_k, how: as of `passes.evaluated`, also for errors. The ranks share the rows. Where a row's figures
            depend on what is read beside it, or on draws, every rank reads all rows.

    Returns:
        For each k: {"split", "top_k", "nats", "metric", "value", "tokens",
        "routers": {layer: {"entropy", "entropy_std", "load"}}}. Entropies are of the full distribution before mixing,
        means and deviations over tokens in nats; with a mixer "mixed_entropy" is that of what selection saw. `load` [E]
        is each expert's share of the assignments.
    """
    device = next(model.parameters()).device
    if isinstance(tokens, tuple):
        stream = EvalStream.of_rows(tokens, protocol.segment_length, device)
    else:
        stream = EvalStream(tokens, protocol.batch_size, protocol.segment_length, device, protocol.tokens)
    ranks = how.ranks if divides_rows(model) else ALONE

    def one_pass(one: Pass) -> dict[str, Any]:
        total, count = _sums(stream, protocol, one)
        mean = total / count if count else math.nan
        metric, value = quality(level, mean)
        return {"nats": mean if count else None, "metric": metric, "value": value, "tokens": count}

    return evaluated(model, top_k, one_pass, split=split, batches=len(stream), how=how, seed=protocol.seed, ranks=ranks)


def _sums(stream: EvalStream, protocol: EvalProtocol, one: Pass) -> tuple[float, int]:
    """The nats of all targets together, and how many they are."""
    model, ranks = one.model, one.ranks
    device = next(model.parameters()).device  # nothing waits for it before the last segment
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    whole = stream.rows % ranks.count == 0  # otherwise some ranks have rows of padding
    memory: Memory | None = None
    for index, (inputs, targets) in enumerate(one.read(stream)):
        inputs, targets = (_own_rows(tensor, fill, ranks) for tensor, fill in ((inputs, 0), (targets, IGNORE)))
        real = targets >= 0
        mask = None if whole and stream.is_whole(index) else real.reshape(-1)
        with one.how.precision or nullcontext(), one.watch(mask):
            output = model(inputs, targets, memory, memory_length=protocol.memory_length, reduction="none")
        memory = output.memory
        total += output.loss.double().sum()
        count += real.sum()
    total, count = ranks.total(total.cpu(), count.cpu())
    return float(total), int(count)


def _own_rows(tensor: Tensor, fill: int, ranks: Ranks) -> Tensor:
    """This rank's share of rows [rows, t]; as many on every rank, if need be with rows of `fill`."""
    if ranks.count == 1:
        return tensor
    each = -(-len(tensor) // ranks.count)
    own = tensor[ranks.rank * each : (ranks.rank + 1) * each]
    return torch.cat([own, own.new_full((each - len(own), *own.shape[1:]), fill)])
