"""Hash layers (Roller et al. 2021, arXiv 2106.04426): a fixed table says which experts a token id goes to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scored, Scores, Selection
from pointsman.routers.frame.stages import GATES, Scorer, Selector, Stages
from pointsman.routers.papers.thor import equal_weights, no_scores
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext


class ByTokenIds(Scorer):
    """Reads token ids, and has the scores of `gate` inside (None: 0).

    Attributes:
        counted: the option that needs the counts of token ids first (`calibrate`); "": none.
    """

    needs = frozenset({"token_ids"})
    name = counted = ""
    ready: Tensor

    def __init__(self, gate: Scorer | None, num_experts: int, vocab_size: int) -> None:
        super().__init__()
        self.gate, self.num_experts, self.vocab_size = gate, num_experts, vocab_size
        self.tells_apart = gate is not None
        if gate is not None:
            self.training_stochastic = gate.training_stochastic
            self.needs_step_end = self.needs_step_end or gate.needs_step_end

    def step_end(self) -> None:
        if self.gate is not None:
            self.gate.step_end()

    @property
    def below(self) -> Mapping[str, int]:
        return {} if self.gate is None else self.gate.below

    def ids(self, context: RoutingContext) -> Tensor:
        """The context's token ids [B, T]; 0 for padding. ValueError for an id that is not in the table: on a GPU, which
        would have to be waited for, and under torch.compile the look-up itself raises."""
        ids = context.token_ids
        assert ids is not None  # `needs` was checked
        if context.padding_mask is not None:
            ids = ids.masked_fill(~context.padding_mask, 0)
        looked_at = ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling()
        if looked_at and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"{self.name}: a token id is outside 0 to {self.vocab_size - 1}, the ids of the table")
        if not torch.compiler.is_compiling() and self.needs_counts:
            told = f"{self.counted} needs the counts of token ids: call router.score.calibrate(counts)"
            raise ValueError(f"{self.name}: {told}")
        return ids if looked_at else ids.masked_fill(ids < 0, self.vocab_size)  # which would count from the end

    def calibrate(self, counts: Sequence[int] | Tensor) -> None:
        """Makes what the option needs (`fill`) of `counts` [V]: how often each id is in the training data.

        Raises:
            ValueError: not one count for every id, or a negative one.
        """
        numbers = torch.as_tensor(counts)
        if numbers.shape != (self.vocab_size,) or bool((numbers < 0).any()):
            raise ValueError(f"{self.name}: calibrate needs {self.vocab_size} counts from 0, one for each token id")
        self.fill(numbers)
        self.ready.fill_(True)

    def fill(self, counts: Tensor) -> None:
        """What `calibrate` makes of checked counts [V], in a scorer that has `counted`."""
        raise NotImplementedError

    @property
    def needs_counts(self) -> bool:
        """Whether `calibrate` must be called first."""
        return bool(self.counted) and not bool(self.ready)

    def strides(self, draw: torch.Generator) -> Tensor:
        """[V]: a number coprime to E for each id, so that (e_0 + j stride) mod E is an order of all experts."""
        coprime = [step for step in range(1, max(2, self.num_experts)) if math.gcd(step, self.num_experts) == 1]
        return torch.tensor(coprime)[torch.randint(len(coprime), (self.vocab_size,), generator=draw)]

    def inside(self, hidden: Tensor, context: RoutingContext, **extra: Tensor) -> Scored:
        """What `gate` gives, and further `extra`."""
        if self.gate is None:
            return Scored(hidden.new_zeros(*hidden.shape[:2], self.num_experts), extra)
        scored = Scored.of(self.gate(hidden, context))
        return replace(scored, extra={**scored.extra, **extra})


class TableScorer(ByTokenIds):
    """Looks token ids up: the first experts of an id, and the stride at which its further ones follow.

    e_j = (e_0 + j stride) mod E, with a stride coprime to E: an order of all experts for every id, without a table of
    that size. Logits are 0, or those of a trained linear map which weighs the chosen experts.

    Args:
        vocab_size: V.
        kind: "random": each id's experts drawn uniformly. "balanced": by `calibrate`.
        seed: of the table.
        gate: the scores that weigh the chosen experts; None: logits are 0.
        columns: how many experts of an id the table names: `table` is [V], or [V, columns].
    """

    name = "hash"

    def __init__(
        self, gate: Scorer | None, num_experts: int, vocab_size: int, kind: str, seed: int, columns: int = 1
    ) -> None:
        super().__init__(gate, num_experts, vocab_size)
        self.kind, self.counted = kind, "" if kind == "random" else f"kind={kind}"
        draw = torch.Generator().manual_seed(seed)
        table = torch.randint(num_experts, (vocab_size,), generator=draw)
        if columns > 1:
            table = torch.rand(vocab_size, num_experts, generator=draw).topk(columns).indices
        self.table = nn.Buffer(table)
        self.stride = nn.Buffer(self.strides(draw))
        self.ready = nn.Buffer(torch.tensor(kind == "random"))

    def fill(self, counts: Tensor) -> None:
        """The table of `kind=balanced`: ids by falling count, each to the expert with the least counted tokens."""
        numbers, loads, table = counts.tolist(), [0] * self.num_experts, [0] * self.vocab_size
        for index in sorted(range(self.vocab_size), key=lambda one: -numbers[one]):
            table[index] = loads.index(min(loads))
            loads[table[index]] += int(numbers[index])
        self.table.copy_(torch.tensor(table))

    def set_table(self, table: Tensor) -> None:
        """Takes a table of a trained model.

        Args:
            table: [V, columns], or [V] for one column: the experts of each id, different ones.

        Raises:
            ValueError: another shape, an expert that does not exist, or one that is named twice for an id.
        """
        if table.shape != self.table.shape or table.is_floating_point():
            raise ValueError(f"hash: the table must be whole numbers {list(self.table.shape)}, got {list(table.shape)}")
        if not 0 <= int(table.min()) <= int(table.max()) < self.num_experts:
            raise ValueError(f"hash: the table names an expert outside 0 to {self.num_experts - 1}")
        if table.dim() > 1 and bool((table.sort(-1).values.diff(dim=-1) == 0).any()):
            raise ValueError("hash: the table names an expert twice for a token id")
        self.table.copy_(table)
        self.ready.fill_(True)

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        ids = self.ids(context)
        columns = self.table[ids] if self.table.dim() > 1 else self.table[ids][..., None]
        return self.inside(hidden, context, columns=columns, stride=self.stride[ids])


def walk(columns: Tensor, stride: Tensor, k: int, num_experts: int) -> Tensor:
    """The first k experts [N, k] of each token: those of the table [N, w], then (e_0 + j stride) mod E without them."""
    width = columns.shape[1]
    if k <= width:
        return columns[:, :k]
    places = torch.arange(k if width == 1 else num_experts, device=columns.device)
    order = (columns[:, :1] + places * stride[:, None]) % num_experts
    if width == 1:
        return order
    taken = torch.zeros_like(order).scatter(1, columns, 1).gather(1, order)
    further = order.gather(1, taken.argsort(dim=1, stable=True))
    return torch.cat([columns, further[:, : k - width]], 1)


class Walk(Selector):
    """The first k experts of each token's `walk`; weights 1/k, or their probabilities, renormalised."""

    def __init__(self, gated: bool, renormalize: bool) -> None:
        super().__init__()
        self.gated, self.renormalize = gated, renormalize if gated else None
        self.overrides = frozenset() if gated else frozenset({"balance", "z_loss", "mixer"})  # of scores that are all 0

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs = scores.probs.flatten(0, 1)
        columns, stride = scores.extra["columns"].flatten(0, 1), scores.extra["stride"].flatten()
        experts = walk(columns, stride, k, probs.shape[-1])
        if not self.gated:
            return experts, torch.full(experts.shape, 1 / k, dtype=probs.dtype, device=probs.device)
        return experts, self.renormalized(probs.gather(-1, experts))

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        return super().replay(scores, experts) if self.gated else equal_weights(scores, experts)


def gate_scores(layer: LayerSpec, *, gate: Literal["none", "softmax", "sigmoid", "sqrtsoftplus"] = "none") -> Stages:
    """None, or a trained linear map W h.

    gate: none = weights 1/k; else those of a trained linear map (DeepSeek-V4's first layers: sqrtsoftplus).
    """
    if gate == "none":
        return no_scores(layer)
    return Stages(LinearScorer(layer.dim, layer.columns, bias=False), GATES[gate]())


@register_router("hash", paper="Roller et al. 2021, arXiv 2106.04426", scores=gate_scores, needs="nothing|positive")
def hash_router(
    layer: LayerSpec, stages: Stages, *, kind: Literal["random", "balanced"] = "random", seed: int = 0,
    columns: int = 1,
) -> Stages:  # fmt: skip
    """A fixed table of token ids says which experts a token goes to; nothing of it is trained.

    kind: a random table, or one balanced over the counts that `router.score.calibrate(counts)` is given.
    seed: of the table.
    columns: how many experts of an id the table names; the further ones follow at a stride of the id's own
        (DeepSeek-V4: k columns). `router.score.set_table(table)` takes the table of a trained model.
    """
    if not 1 <= columns <= layer.num_experts:
        raise ValueError(f"hash: option columns={columns}: allowed are whole numbers from 1 to {layer.num_experts}")
    if columns > 1 and kind != "random":
        raise ValueError(f"hash: option columns={columns}: kind={kind} makes a table of one column")
    vocabulary = layer.need_vocab_size("hash")
    gate = stages.score if stages.score.tells_apart else None
    scorer = TableScorer(gate, layer.num_experts, vocabulary, kind, seed, columns)
    return replace(stages, score=scorer, select=Walk(gate is not None, layer.renormalize))
