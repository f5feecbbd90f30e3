"""Router = score -> normalize -> mix -> choose (`stages`), then the steps that its options ask for, and its losses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pointsman import auxiliary
from pointsman.ops.linear import autocast_enabled, upcast
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame import fused
from pointsman.routers.frame.balance import Balance
from pointsman.routers.frame.capacity import Capacity
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores, Selection, Step, Tensors
from pointsman.routers.frame.stages import Mixer, Selector, Stage, Stages
from pointsman.routing import RouterState, Routing, RoutingContext, check_padding_mask

PLAIN_CONTEXT = RoutingContext()


class Router(nn.Module):
    """Four stages, and what every router has: k, losses, precision, masks.

    Computes in at least float32 whatever the dtype of its input and its parameters.

    Args:
        balancing: the balance loss.
        balance, z_loss: weights of the balance loss and of the z-loss.
        limit: how many assignments an expert takes; None: all of them.
        steps: what is done with a selection after the choice, in order; `limit.step` among them.
        scale: factor of the combine weights, which one of the steps applies.
        weigh: what a weight multiplies: the expert's "output" or its "input".
        virtual: the kinds of the virtual experts, whose scores come after those of the E experts.
        fixed_k: whether k is always E.

    Attributes:
        spec: what `build_router` was asked for; the router's name in every table.
        num_experts, top_k: E, and k (set by `set_top_k`).
        ranks: who shares the batch; set by `parallel.parallelize`.
        lr_scale: factor of the learning rate for the router's parameters, for training loops that read it.
        losses: the router's own losses by name, besides balance and z-loss.
        causal, batch_invariant, stochastic: the contract in evaluation; training_causal, …: in training.
        ragged, needs, objective: the rest of the contract.
        replayed: experts [N, width] that `replay_routing` has set in place of the selector's choice; None: none.
        needs_moe: whether only `MoE` can apply its routings, and not experts that take weights of outputs.
    """

    role = "router"
    causal: bool
    batch_invariant: bool
    stochastic: bool
    training_causal: bool
    training_batch_invariant: bool
    training_stochastic: bool
    ranks: Ranks = ALONE

    def __init__(
        self,
        stages: Stages,
        select: Selector,
        *,
        mix: Mixer | None,
        spec: str,
        dim: int,
        num_experts: int,
        top_k: int,
        balancing: Balance,
        balance: float = 0.0,
        z_loss: float = 0.0,
        limit: Capacity | None = None,
        steps: tuple[Step, ...] = (),
        scale: float = 1.0,
        lr_scale: float = 1.0,
        weigh: str = "output",
        virtual: tuple[str, ...] = (),
        fixed_k: bool = False,
    ) -> None:
        super().__init__()
        self.score = stages.score
        self.normalize = stages.normalize
        self.mix = mix
        self.select = select
        self.limit = limit
        self.balancing = balancing
        self.steps = steps
        self.spec = spec
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = check_top_k(top_k, num_experts)
        self.balance = balance
        self.z_loss = z_loss
        self.losses: Mapping[str, Loss] = dict(stages.losses)
        self.scale = scale
        self.lr_scale = lr_scale
        self.weigh = weigh
        self.virtual = virtual
        self.fixed_k = fixed_k
        self.objective = stages.objective
        self.objective_weight = stages.objective_weight
        parts = [part for _, part in self._stages()]
        for flag, combine in (("causal", all), ("batch_invariant", all), ("stochastic", any)):
            setattr(self, flag, combine(getattr(part, flag) for part in parts))
            setattr(self, f"training_{flag}", combine(_in_training(part, flag) for part in parts))
        self.ragged = select.ragged or bool(virtual)
        self.needs_moe = select.needs_moe or weigh == "input" or stages.score.asks_experts or bool(virtual)
        self.needs: frozenset[str] = frozenset().union(*(part.needs for part in parts))
        self.needs_step_end = any(part.needs_step_end for part in parts)
        self.replayed: Tensor | None = None
        self._frozen = False
        self._moved_since_step_end: int | None = None
        self._warned: set[str] = set()

    def _stages(self) -> Iterator[tuple[str, Stage]]:
        for name in ("score", "normalize", "mix", "select", "limit", "balancing"):
            stage = getattr(self, name)
            if stage is not None:
                yield name, stage

    def forward(self, hidden: Tensor, context: RoutingContext | None = None) -> Routing:
        """Routes hidden states [B, T, dim] (or [tokens, dim]: one sequence)."""
        context = PLAIN_CONTEXT if context is None else context
        hidden = hidden.unsqueeze(0) if hidden.dim() == 2 else hidden
        self._check(hidden, context)
        if torch.compiler.is_compiling():
            from pointsman.ops.tracing import allow_a_graph_for_each_k

            allow_a_graph_for_each_k(self.num_experts)
        if not autocast_enabled(hidden.device.type):
            return self._route(hidden, context)
        with torch.autocast(hidden.device.type, enabled=False):
            return self._route(hidden, context)

    def _route(self, hidden: Tensor, context: RoutingContext) -> Routing:
        statistics: dict[str, Tensor] = {}
        if self.mix is not None or not getattr(self.score, "accepts_half", False):
            hidden = upcast(hidden)
        at_once = None
        if self.mix is None and self.replayed is None:
            stages = self.score, self.normalize, self.select
            at_once = fused.route(stages, self.num_experts, self.top_k, hidden, context)
        if at_once is None:
            scored, scores, carry = self._score(hidden, context, statistics)
            selection = self._choose(scores, context)
        else:
            scored, scores, carry = Scored(at_once.logits), Scores(at_once.logits, at_once.probs, at_once.logits), None
            selection = at_once.selection
        mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
        if mask is not None:
            experts = selection.experts.masked_fill(~mask[:, None], -1)
            selection = replace(selection, experts=experts, weights=selection.weights.masked_fill(experts < 0, 0))
        logits, probs = scores.logits.flatten(0, 1), scores.probs.flatten(0, 1)
        unmixed = probs if scores.unmixed is None else scores.unmixed.flatten(0, 1)
        losses: dict[str, Tensor] = {}
        if self.steps or self._has_losses:
            given = LossInput(
                logits=logits,
                unmixed=unmixed,
                probs=probs,
                choice=scores.choice.flatten(0, 1),
                experts=selection.experts,
                weights=selection.weights,
                extra=scores.extra,
                mask=mask,
                batch=hidden.shape[0],
                length=hidden.shape[1],
                context=context,
                k=self.top_k,
                num_experts=self.num_experts,
                replayed=self.replayed is not None,
                ranks=self.ranks,
            )
            for step in self.steps:
                selection = step(selection, given)
            if self._has_losses:
                asked = selection if selection.asked is None else selection.asked
                losses = self._losses(replace(given, experts=asked.experts, weights=asked.weights), statistics)
        _gather(statistics, "select", selection.statistics)
        return Routing(
            experts=selection.experts,
            weights=selection.weights,
            probs=probs,
            logits=logits,
            losses=losses,
            carry=carry,
            unmixed=unmixed,
            statistics=statistics,
            above={**(context.below or {}), **scored.above} or None,
            how=selection.how,
        )

    def _score(
        self, hidden: Tensor, context: RoutingContext, statistics: dict[str, Tensor]
    ) -> tuple[Scored, Scores, RouterState | None]:
        """Score, normalize and mix: what the scorer gave, what the selector gets, and what to carry on."""
        mix, normalize = self.mix, self.normalize
        scored = Scored.of(self.score(hidden, context))
        _gather(statistics, "score", scored.statistics)
        logits = scored.logits
        probs, unmixed, carry = normalize(logits), None, None
        if mix is not None:
            unmixed = probs
            probs, carry, mixed = mix(unmixed, hidden, context)
            _gather(statistics, "mix", mixed)
        if scored.carry:
            carry = {**(carry or {}), **scored.carry}
        choice = logits if mix is None and normalize.increasing else probs
        return scored, Scores(logits, probs, choice, scored.extra, unmixed), carry

    def _choose(self, scores: Scores, context: RoutingContext) -> Selection:
        if self.replayed is None:
            selection = self.select(scores, self.top_k, context)
            return selection if isinstance(selection, Selection) else Selection(*selection)
        tokens = scores.logits.shape[:2].numel()
        if len(self.replayed) != tokens:
            raise ValueError(
                f"{self.spec}: the replayed routing is of {len(self.replayed)} tokens, the input of {tokens}"
            )
        return self.select.replay(scores, self.replayed.to(scores.logits.device))

    @property
    def _has_losses(self) -> bool:
        return bool(self.balance or self.z_loss or any(loss.weight for loss in self.losses.values()))

    def _losses(self, given: LossInput, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weighted losses by name; the statistics of the balance loss go into `statistics`."""
        if torch.compiler.is_exporting():  # for inference
            return {}
        every = {"balance": Loss(self.balancing, self.balance), "z_loss": Loss(_z_loss, self.z_loss), **self.losses}
        if self.balance:
            _gather(statistics, "balancing", self.balancing.statistics(given))
        weighted = ((name, loss) for name, loss in every.items() if loss.weight)
        return {name: loss.weight * self.ranks.part(loss.function(given)) for name, loss in weighted}

    def without_limit(self) -> None:
        """Takes the limit of capacity away."""
        if self.limit is not None:
            self.steps = tuple(step for step in self.steps if getattr(step, "__self__", None) is not self.limit)
            self.limit = None

    @property
    def capacity(self) -> float | None:
        """The capacity factor of the present mode; None: nothing is dropped."""
        return None if self.limit is None else self.limit.factor

    @property
    def frozen(self) -> bool:
        """Whether `freeze` holds it: its state then stays too, whatever `step_end` would do. `requires_grad_(True)`, of
        the router or of one of its parameters, ends that; so does setting this to False."""
        return self._frozen and not any(parameter.requires_grad for parameter in self.parameters())

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._frozen = frozen

    def requires_grad_(self, requires_grad: bool = True) -> Router:
        super().requires_grad_(requires_grad)
        if requires_grad:
            self._frozen = False  # one without parameters, too
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, parameter in self.named_parameters():  # one number, with or without a dimension (`parallelize`)
            saved = state_dict.get(prefix + name)
            if saved is not None and saved.numel() == parameter.numel() == 1 and saved.dim() != parameter.dim():
                state_dict[prefix + name] = saved.reshape(parameter.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._moved_since_step_end = None  # loading is no step

    def gather(self, statistics: Tensors) -> None:
        """Hands one micro-batch's statistics to the stages; called in backward, once per micro-batch."""
        if self.frozen:
            return
        for name, stage in self._stages():
            own = {key.partition(".")[2]: value for key, value in statistics.items() if key.startswith(f"{name}.")}
            if own:
                stage.gather(own)

    def gathered(self) -> list[Tensor]:
        """The sums that the next `step_end` reads: many processes add them up in place before it."""
        return [value for stage in self._sums() for value in stage.values()]

    def _sums(self) -> Iterator[dict[str, Tensor]]:
        return (module.sums for module in self.modules() if isinstance(module, Stage))

    def step_end(self, unless: Tensor | None = None) -> None:
        """Once after each optimizer step: norms kept, running statistics taken over.

        Args:
            unless: bool []; where it is true, parameters and buffers stay as they are. Nobody waits to know.
        """
        if not self.frozen:
            for _, stage in self._stages():
                own = [] if unless is None else _own(stage)  # `step_end` may freeze some of them
                before = [tensor.clone() for tensor in own]
                stage.step_end()
                if unless is not None:
                    for tensor, value in zip(own, before, strict=True):
                        tensor.copy_(torch.where(unless, value, tensor))
                    stage.restored()
            self._moved_since_step_end = self._parameter_version()
        for sums in self._sums():
            sums.clear()

    def _parameter_version(self) -> int:
        return sum(parameter._version for parameter in self.parameters())

    def _check(self, hidden: Tensor, context: RoutingContext) -> None:
        if hidden.dim() != 3 or hidden.shape[-1] != self.dim:
            raise ValueError(
                f"{self.spec}: hidden must be [B, T, {self.dim}] or [tokens, {self.dim}], got {list(hidden.shape)}"
            )
        if context.padding_mask is not None:
            check_padding_mask(context.padding_mask, hidden.shape[:2], f"{self.spec}: ")
        for need in self.needs:
            if getattr(context, need) is None:
                raise ValueError(f"{self.spec}: the router needs RoutingContext.{need}, which this model does not give")
        if not self.training or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (
            self.top_k == 1
            and getattr(self.select, "renormalize", False)
            and any(p.requires_grad for p in self.score.parameters())
        ):
            self._warn(
                f"{self.spec}: with top_k=1 and renormalised weights every weight is exactly 1, so the router gets no "
                "gradient from the output; use renormalize=false or a larger k"
            )
        if self.needs_step_end and self.ranks.count == 1:  # shards are not the tensors of the forward
            version = self._parameter_version()
            if self._moved_since_step_end is not None and version != self._moved_since_step_end:
                self._warn(
                    f"{self.spec}: parameters moved without step_end; call pointsman.step_end(model) after "
                    "optimizer.step(), or pointsman.track_steps(model, optimizer) once"
                )
            self._moved_since_step_end = version

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def extra_repr(self) -> str:
        return f"{self.spec}, dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}"


def _gather(statistics: dict[str, Tensor], stage: str, found: Tensors) -> None:
    """Adds a stage's statistics under their names in a `Routing`."""
    if found:
        statistics |= {f"{stage}.{name}": value for name, value in found.items()}


def _own(stage: Stage) -> list[Tensor]:
    """What a `step_end` may change."""
    if type(stage).step_end is Stage.step_end:
        return []
    return [*(parameter for parameter in stage.parameters() if parameter.requires_grad), *stage.buffers()]


def _in_training(part: Stage, flag: str) -> bool:
    own: bool | None = getattr(part, f"training_{flag}")
    return bool(getattr(part, flag)) if own is None else own


def _z_loss(given: LossInput) -> Tensor:
    return auxiliary.z_loss(given.logits, given.mask, given.ranks)


def check_top_k(top_k: int, num_experts: int) -> int:
    """k as it is, or ValueError."""
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k!r}: allowed are whole numbers from 1 to {num_experts} (the number of experts)")
    return top_k
