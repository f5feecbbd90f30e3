"""Monitors routing during training at low cost: rows for metrics.jsonl, scalars, and warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._values import check_whole
from pointsman.auxiliary import assignment_counts
from pointsman.control import named_routers
from pointsman.diagnostics.base import Moments, unmixed
from pointsman.diagnostics.statistics import Margin, entropies, load_summary
from pointsman.ops.linear import in_backward
from pointsman.ranks import ALONE
from pointsman.recording import Listened, listener
from pointsman.routing import Routing, RoutingContext

logger = logging.getLogger("pointsman.routing")
ENOUGH = 20  # mean assignments per expert from which on a dead expert causes a warning
COLLAPSED = 0.1  # (effective number of experts - k) / (E - k) below this is a collapse; k: mean experts a token
WARNINGS = ("dead", "collapse")
MOST_LAYERS = 16  # scalars are written per layer up to this number, above it only their minimum, mean and maximum


class _Window:
    """The statistics of one layer since its last row."""

    def __init__(self, num_experts: int, biased: bool = False) -> None:
        self.sums = {"assigned": torch.zeros(num_experts, dtype=torch.float64), "tokens": torch.zeros(1).double()}
        if biased:
            self.sums["raw"] = torch.zeros(num_experts, dtype=torch.float64)
        self.clear()

    @property
    def assigned(self) -> Tensor:
        return self.sums["assigned"]

    @property
    def tokens(self) -> float:
        return float(self.sums["tokens"])

    def clear(self) -> None:
        for total in self.sums.values():
            total.zero_()
        self.entropy, self.margin = Moments(), Margin()  # of the sampled forwards
        self.dropped, self.scale = Moments(), Moments()

    def count(self, routing: Routing, mask: Tensor | None) -> None:
        if self.assigned.device != routing.experts.device:
            self.sums = {name: total.to(routing.experts.device) for name, total in self.sums.items()}
        experts = routing.experts if mask is None else routing.experts.masked_fill(~mask[:, None], -1)
        self.assigned.add_(assignment_counts(experts, routing.num_experts))
        self.sums["tokens"] += len(routing.experts) if mask is None else mask.sum()
        if "raw" in self.sums:
            raw = routing.logits.topk(min(routing.experts.shape[-1], routing.num_experts), dim=-1).indices
            raw = raw.masked_fill(raw >= routing.num_experts, -1)  # a virtual expert
            raw = raw if mask is None else raw.masked_fill(~mask[:, None], -1)
            self.sums["raw"].add_(assignment_counts(raw, routing.num_experts))

    def to_cpu(self) -> None:
        self.sums = {name: total.cpu() for name, total in self.sums.items()}
        for moments in (self.entropy, self.margin.margin, self.dropped, self.scale):
            moments.tensors = [tensor.cpu() for tensor in moments.tensors]

    def merge(self, other: _Window) -> None:
        for name, total in other.sums.items():
            self.sums[name] += total
        for name in ("entropy", "margin", "dropped", "scale"):
            getattr(self, name).merge(getattr(other, name))

    def experts_per_token(self) -> float:
        return float(self.assigned.sum()) / max(self.tokens, 1.0)

    def sample(self, routing: Routing, mask: Tensor | None) -> None:
        self.entropy.add(entropies(unmixed(routing)), mask)
        self.margin.update(routing, mask)
        self.dropped.add((routing.chosen < 0).all(-1).double(), mask)
        self.scale.add(routing.logits.double().std(-1, correction=0), mask)


class RoutingMonitor:
    """Counts the load in every observed forward, entropy and margin only at every N-th step.

    One row for each layer at every N-th step:
    `{"kind": "routing", "step", "layer", "entropy", "load", "margin", "dead", "experts_per_token", "dropped",
    "logit_scale", "tokens", "batches"}`, and "raw_load" where a bias enters the choice.
    `load` is the share of each expert [E] over the `batches` and `tokens` observed since the previous row (X-MoE uses
    windows of 100 batches), `dead` the number of experts without a token, and `experts_per_token` the mean over those
    tokens, without dropped assignments: k, unless the router gives each token its own number. `entropy` (nats, before
    mixing), `margin` (p_(k) - p_(k+1)), `dropped` (1 for a token that no expert took) and `logit_scale` (the standard
    deviation of a token's logits) are means over the tokens of this step. `raw_load` is the `load` of the k largest
    logits: what would be chosen without the bias (and without groups, noise and capacity). None stands for no value.

    Two things are warned of by name: an expert that got no token in a window, and a collapsed layer. A layer has
    collapsed if its effective number of experts exp(H(load)) is close to the mean number of experts a token, so that
    nearly all tokens share the same experts. This is judged only while that mean is at most E/2: above it any two
    tokens share most of their experts.
    Warnings go to the logger `pointsman.routing`, with router and seed, and into rows
    `{"kind": "warning", "step", "layer", "experts", "message"}`; the same warning comes again only after twice as many
    steps.

    With several ranks every rank counts its own tokens, and rows are of all of them: each rank must ask for them.

    Args:
        model: any model with MoE layers (after `parallel.parallelize`, with several ranks), or a mixture of experts of
            transformers.
        every: N.
        seed: of the run, for the warnings; None: they name none.

    Raises:
        ValueError: the model has no router.
    """

    def __init__(self, model: nn.Module, every: int = 100, seed: int | None = None) -> None:
        check_whole("RoutingMonitor: every", every)
        self.every = every
        self.seed = seed
        self._listener = listener(model, "RoutingMonitor")
        self._windows = {name: _Window(of.num_experts, of.biased) for name, of in self._listener.layers.items()}
        self._ranks = next((router.ranks for _, router in named_routers(model)), ALONE)
        self._batches = 0
        self._step = -1
        self._next_warning: dict[tuple[str, str], int] = {}

    @contextmanager
    def observe(self, step: int) -> Iterator[None]:
        """Observes the forwards inside; what activation checkpointing repeats in backward is not counted again.

        Micro-batches with the same `step` count as one batch.
        """
        self._batches += step != self._step
        self._step = step
        with ExitStack() as inside:
            for handle in self._listener.hooks(self._update):
                inside.enter_context(handle)
            yield

    def _update(self, name: str, routing: Routing, context: RoutingContext | None, hidden: Tensor) -> None:
        if in_backward():
            return  # a backward repeats the forward: activation checkpointing
        window = self._windows.setdefault(name, _Window(routing.num_experts))
        mask = None if context is None or context.padding_mask is None else context.padding_mask.reshape(-1)
        window.count(routing, mask)
        if self._step % self.every == 0:
            window.sample(routing, mask)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the last observed step, returned once; empty except at every N-th step.

        Raises:
            ValueError: no router ran in the observed steps.
        """
        if self._batches == 0 or self._step % self.every:
            return []
        if not any(window.tokens or window.entropy.tensors for window in self._windows.values()):
            raise ValueError(f"RoutingMonitor: no router ran in {self._batches} observed steps; if the model was "
                             "compiled and has run before, call torch.compiler.reset() first: compiled code calls no "
                             "hooks that came later")  # fmt: skip
        rows: list[dict[str, Any]] = []
        for name, window in self._over_ranks().items():
            if window.entropy.tensors:
                summary = load_summary(window.assigned)
                row = {
                    "kind": "routing", "step": self._step, "layer": name, "entropy": window.entropy.mean,
                    "load": summary["share"], "margin": window.margin.margin.mean, "dead": len(summary["dead"]),
                    "experts_per_token": window.experts_per_token() if window.tokens else None,
                    "dropped": window.dropped.mean, "logit_scale": window.scale.mean, "tokens": int(window.tokens),
                    "batches": self._batches,
                }  # fmt: skip
                if "raw" in window.sums:
                    row["raw_load"] = load_summary(window.sums["raw"])["share"]
                rows.append(row)
                rows.extend(self._warnings(name, window, summary))
        for window in self._windows.values():
            window.clear()
        self._batches = 0
        return rows

    def _over_ranks(self) -> dict[str, _Window]:
        """The windows of all ranks' tokens, on every rank."""
        if self._ranks.count == 1:
            return self._windows
        for window in self._windows.values():
            window.to_cpu()
        whole, *others = self._ranks.gather(self._windows)
        for other in others:
            for name, window in other.items():
                whole[name].merge(window)
        return whole

    def _warnings(self, name: str, window: _Window, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
        experts, mean = window.assigned.numel(), window.experts_per_token()
        total = float(window.assigned.sum())
        if total < ENOUGH * experts:
            return []
        found: dict[str, tuple[list[int], str]] = {}
        if dead := summary["dead"]:
            found["dead"] = dead, f"{_names(dead)} of {experts} got no token in {self._batches} batches"
        if 2 * mean <= experts and (summary["effective"] - mean) / (experts - mean) < COLLAPSED:
            top = sorted(window.assigned.topk(max(1, round(mean))).indices.tolist())
            taken = float(window.assigned[top].sum()) / total
            found["collapse"] = top, f"routing has collapsed: {_names(top)} took {taken:.0%} of all assignments"
        rows = []
        for kind, (which, message) in found.items():
            if self._step >= self._next_warning.get((name, kind), 0):
                self._next_warning[name, kind] = 2 * self._step
                if self._ranks.first:
                    of = self._listener.layers.get(name, Listened(0, "unknown", False)).router
                    of = of if self.seed is None else f"{of}, seed {self.seed}"
                    logger.warning("router %s, step %d, layer %s: %s", of, self._step, name, message)
                row = {"kind": "warning", "step": self._step, "layer": name, "experts": which, "message": message}
                rows.append(row)
        return rows

    def state_dict(self) -> dict[str, Tensor]:
        """The counts since the last row, of all ranks, and when to warn again: a resumed run writes identical rows."""
        state = {"batches": torch.tensor(self._batches)}
        for name, window in self._windows.items():
            for key, total in zip(window.sums, self._ranks.total(*window.sums.values()), strict=True):
                state[f"{name}.{key}"] = total.cpu().clone()
            for kind in WARNINGS:
                state[f"{name}.{kind}"] = torch.tensor(self._next_warning.get((name, kind), 0))
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._batches = int(state["batches"])
        for name, window in self._windows.items():
            for kind in WARNINGS:  # checkpoints of earlier versions have none
                self._next_warning[name, kind] = int(state.get(f"{name}.{kind}", 0))
            share = 1 if self._ranks.first else 0  # the sums over ranks go on as before
            window.sums = {key: state[f"{name}.{key}"].reshape(old.shape) * share for key, old in window.sums.items()}


def _names(experts: list[int]) -> str:
    shown = ", ".join(str(expert) for expert in experts[:8]) + (", …" if len(experts) > 8 else "")
    return f"expert {shown}" if len(experts) == 1 else f"experts {shown}"


def scalars(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Rows of one step as tag -> value for experiment trackers; the number of tags does not depend on that of experts.

    `routing/<layer>/entropy|cv|dead|largest|dropped|logit_scale` for each layer: the coefficient of variation of the
    load, the number of experts without a token, the largest share of an expert. Where a bias enters the choice also
    `raw_cv|raw_largest`, of what would be chosen without it. With more than 16 layers instead
    `routing/least|mean|greatest/…` over layers.
    """
    by_layer: dict[str, dict[str, float]] = {}
    by_key: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] != "routing":
            continue
        values = {name: row.get(name) for name in ("entropy", "dead", "dropped", "logit_scale")}
        for prefix in ("", "raw_"):
            load = torch.tensor([share or 0.0 for share in row.get(f"{prefix}load", ())], dtype=torch.float64)
            if len(load):
                values |= {f"{prefix}cv": load_summary(load)["cv"], f"{prefix}largest": float(load.max())}
        by_layer[row["layer"]] = {key: float(value) for key, value in values.items() if value is not None}
        for key, value in by_layer[row["layer"]].items():
            by_key.setdefault(key, []).append(value)
    if len(by_layer) > MOST_LAYERS:
        of_all: dict[str, Any] = {"least": min, "mean": lambda of: sum(of) / len(of), "greatest": max}
        by_layer = {name: {key: one(of) for key, of in by_key.items()} for name, one in of_all.items()}
    tags = {name: f"routing/{name}/" if name else "routing/" for name in by_layer}  # a bare layer has the name ""
    return {f"{tags[name]}{key}": value for name, of in by_layer.items() for key, value in of.items()}
