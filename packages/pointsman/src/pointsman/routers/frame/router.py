"""Router = score -> normalize -> mix -> select (`stages`), and its losses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pointsman import auxiliary
from pointsman.ops.linear import autocast_enabled, upcast
from pointsman.ops.selection import members
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame import fused
from pointsman.routers.frame.balance import Balance
from pointsman.routers.frame.capacity import Capacity
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores, Selection, Tensors
from pointsman.routers.frame.stages import Mixer, Selector, Stage, Stages
from pointsman.routers.frame.virtual import apart, weightless
from pointsman.routing import Means, Routing, RoutingContext, check_padding_mask

PLAIN_CONTEXT = RoutingContext()


class Router(nn.Module):
    """Four stages, and what every router has: k, losses, precision, masks.

    Computes in at least float32 whatever the dtype of its input and its parameters.

    Args:
        balancing: the balance loss; None: over the micro-batch, on softmax(logits).
        balance, z_loss: weights of the balance loss and of the z-loss.
        limit: how many assignments an expert takes; None: all of them.
        scale: factor of the combine weights.
        weigh: what a weight multiplies: the expert's "output" or its "input".
        fixed_k: whether k is always E.

    Attributes:
        spec: what `build_router` was asked for; the router's name in every table.
        num_experts, top_k: E, and k (set by `set_top_k`).
        ranks: who shares the batch; set by `parallel.parallelize`.
        lr_scale: factor of the learning rate for the router's parameters, for training loops that read it.
        losses: the router's own losses by name, besides balance and z-loss.
        causal, batch_invariant, stochastic: the contract in evaluation; training_causal, …: in training.
        ragged, needs, objective: the rest of the contract.
        virtual: the kinds of the virtual experts, whose scores come after those of the E experts.
        replayed: experts [N, width] that `replay_routing` has set in place of the selector's choice; None: none.
        needs_moe: whether only `MoE` can apply its routings (slots, means, weights on inputs, virtual experts).
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
        balance: float = 0.0,
        z_loss: float = 0.0,
        balancing: Balance | None = None,
        limit: Capacity | None = None,
        scale: float = 1.0,
        lr_scale: float = 1.0,
        weigh: str = "output",
        fixed_k: bool = False,
    ) -> None:
        super().__init__()
        self.score = stages.score
        self.normalize = stages.normalize
        self.mix = mix
        self.select = select
        self.limit = limit
        self.balancing = Balance() if balancing is None else balancing
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
        self.fixed_k = fixed_k
        self.objective = stages.objective
        self.objective_weight = stages.objective_weight
        parts = [part for _, part in self._stages()]
        for flag, combine in (("causal", all), ("batch_invariant", all), ("stochastic", any)):
            setattr(self, flag, combine(getattr(part, flag) for part in parts))
            setattr(self, f"training_{flag}", combine(_in_training(part, flag) for part in parts))
        self.virtual = tuple(stages.virtual)
        self.ragged = select.ragged or bool(self.virtual)
        self.needs_moe = select.needs_moe or weigh == "input" or stages.score.asks_experts or bool(stages.virtual)
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
        batch, length, _ = hidden.shape
        if self.mix is not None or not getattr(self.score, "accepts_half", False):
            hidden = upcast(hidden)
        carry, mixed = None, {}
        at_once = None
        if self.mix is None and self.replayed is None:
            at_once = fused.route(self.score, self.normalize, self.select, self.top_k, hidden, context)
        if at_once is not None:
            scored = Scored(at_once.logits)
            logits, unmixed, selection = at_once
            probs, choice = unmixed, logits
        else:
            scored = self.score(hidden, context)
            if not isinstance(scored, Scored):
                scored = Scored(scored)
            logits = scored.logits
            probs = unmixed = self.normalize(logits)
            if self.mix is not None:
                probs, carry, mixed = self.mix(unmixed, hidden, context)
            if scored.carry:
                carry = {**(carry or {}), **scored.carry}
            choice = logits if self.mix is None and self.normalize.increasing else probs
            selection = self._select(Scores(logits, probs, choice, scored.extra), context)
        if "zero" in self.virtual:
            renormalize = bool(getattr(self.select, "renormalize", False))
            selection = weightless(selection, self.num_experts, self.virtual, renormalize)
        if self.scale != 1:
            selection = selection.scaled(self.scale)
        chosen, weights = selection.experts, selection.weights
        mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
        if mask is not None:
            chosen = chosen.masked_fill(~mask[:, None], -1)
            weights = weights.masked_fill(chosen < 0, 0)
        flat_logits, flat_unmixed = logits.flatten(0, 1), unmixed.flatten(0, 1)
        flat_probs = flat_unmixed if probs is unmixed else probs.flatten(0, 1)
        losses: dict[str, Tensor] = {}
        statistics: dict[str, Tensor] = {}
        if self._has_losses:
            given = LossInput(
                logits=flat_logits,
                unmixed=flat_unmixed,
                probs=flat_probs,
                choice=choice.flatten(0, 1),
                experts=chosen,
                weights=weights,
                extra=scored.extra,
                mask=mask,
                batch=batch,
                length=length,
                context=context,
                ranks=self.ranks,
            )
            losses, statistics = self._losses(given)
        for name, one in (("score", scored.statistics), ("mix", mixed), ("select", selection.statistics)):
            statistics |= {f"{name}.{key}": value for key, value in one.items()}
        experts, virtual_weights = chosen, None
        if self.virtual:
            experts, weights, virtual_weights = apart(chosen, weights, self.num_experts, len(self.virtual))
        if self.capacity is not None and self.replayed is None:
            assert self.limit is not None
            experts = self.limit(experts, flat_probs, self.num_experts, self.top_k, context, batch)
            weights = weights.masked_fill(experts < 0, 0)
        return Routing(
            experts=experts,
            weights=weights,
            probs=flat_probs,
            logits=flat_logits,
            losses=losses,
            carry=carry,
            unmixed=flat_unmixed,
            statistics=statistics,
            flat=selection.flat if experts is chosen else None,
            virtual=len(self.virtual),
            virtual_weights=virtual_weights,
            chosen=torch.where(chosen < self.num_experts, experts, chosen) if self.virtual else None,
            above={**(context.below or {}), **scored.above} or None,
            slots=selection.slots,
            means=None
            if selection.means is None
            else Means(self._of_others(flat_probs, experts, mask), selection.means),
            weigh_input=self.weigh == "input",
        )

    def _select(self, scores: Scores, context: RoutingContext) -> Selection:
        if self.replayed is None:
            selection = self.select(scores, self.top_k, context)
            return selection if isinstance(selection, Selection) else Selection(*selection)
        tokens = scores.logits.shape[:2].numel()
        if len(self.replayed) != tokens:
            raise ValueError(
                f"{self.spec}: the replayed routing is of {len(self.replayed)} tokens, the input of {tokens}"
            )
        return self.select.replay(scores, self.replayed.to(scores.logits.device))

    def _of_others(self, probs: Tensor, experts: Tensor, mask: Tensor | None) -> Tensor:
        """The probabilities [N, E] of the experts that a token did not choose, for `Means`; 0 for padding."""
        chosen = members(experts, self.num_experts)
        gone = chosen if mask is None else chosen | ~mask[:, None]
        return (probs * self.scale).masked_fill(gone, 0)

    @property
    def _has_losses(self) -> bool:
        return bool(self.balance or self.z_loss or any(loss.weight for loss in self.losses.values()))

    def _losses(self, given: LossInput) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weighted losses by name, and the statistics of the balance loss."""
        if torch.compiler.is_exporting():  # for inference
            return {}, {}
        every = {"balance": Loss(self.balancing, self.balance), "z_loss": Loss(_z_loss, self.z_loss), **self.losses}
        values = {
            name: loss.weight * self.ranks.part(loss.function(given)) for name, loss in every.items() if loss.weight
        }
        counted = self.balancing.statistics(given) if self.balance else {}
        return values, {f"balancing.{key}": value for key, value in counted.items()}

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
