"""Router = score -> normalize -> mix -> choose (`stages`), then the steps that its options ask for, and its losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pointsman import auxiliary
from pointsman.ops.drawing import redraw
from pointsman.ops.kernels import exporting
from pointsman.ops.linear import autocast_enabled, upcast
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame.entries import LayerSpec
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores, Selection, Stage, Tensors, scalar
from pointsman.routers.frame.stages import Mixer, Selector, Stages
from pointsman.routers.frame.steps import Balance, after_the_choice
from pointsman.routing import RouterState, Routing, RoutingContext, check_given

PLAIN_CONTEXT = RoutingContext()
_steps = {"taken": 0}  # by every optimizer of this process; before the hooks that call `step_end`
register_optimizer_step_pre_hook(lambda *_: _steps.update(taken=_steps["taken"] + 1))
STAGES = ("score", "normalize", "mix", "select", "limit", "balancing")


class Router(nn.Module):
    """Four stages, and what every router has: k, losses, precision, masks; `build_router` makes it.

    Computes in at least float32 whatever the dtype of its input and its parameters.

    Attributes:
        spec: what `build_router` was asked for; the router's name in every table.
        num_experts, top_k: E, and k (set by `set_top_k`); fixed_k: whether k is always E.
        ranks: who shares the batch; set by `parallel.parallelize`.
        losses: the router's own losses by name, besides balance and z-loss.
        causal, batch_invariant, stochastic: the contract in evaluation; training_causal, …: in training.
        ragged, needs, objective: the rest of the contract; fresh: builds another such router (`build_router` sets it).
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
    fresh: Callable[[], Router]

    def __init__(
        self, stages: Stages, select: Selector, mix: Mixer | None, layer: LayerSpec, options: Mapping[str, Any], *,
        spec: str, top_k: int, fixed_k: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.score, self.normalize, self.mix, self.select = stages.score, stages.normalize, mix, select
        self.limit, self.steps = after_the_choice(options, stages, layer.virtual, bool(select.renormalize))
        self.balancing = Balance(
            options["balance_scope"], options["balance_on"], stages.balance_temperature, stages.gives_softmax,
            stages.counted, set(layer.virtual) in ({"zero"}, {"copy"}), len(layer.virtual), stages.eta,
        )  # fmt: skip
        self.spec, self.dim, self.num_experts, self.virtual = spec, layer.dim, layer.num_experts, layer.virtual
        self.top_k, self.fixed_k = check_top_k(top_k, layer.num_experts), fixed_k
        self.balance, self.z_loss = float(options["balance"]), float(options["z_loss"])
        self.scale, self.lr_scale, self.weigh = float(options["scale"]), float(options["lr_scale"]), options["weigh"]
        self.losses = Loss.by_name(dict(stages.losses), spec)
        self.objective, self.objective_weight = stages.objective, stages.objective_weight
        self.objective_known, self._built_at = False, _steps["taken"]  # whether the loop computes it
        self.declare()
        self.ragged = select.ragged or bool(layer.virtual)
        self.dense_gradient = bool(options["dense_gradient"])
        own = self.weigh == "input" or bool(layer.virtual) or self.dense_gradient
        self.needs_moe = own or select.needs_moe or stages.score.may_need_responses
        self.replayed: Tensor | None = None
        if self.dense_gradient:
            select.one_process = select.one_process or "with dense_gradient each token runs all experts where it is"
        self._frozen = False
        self._at_step_end: tuple[int, int] | None = None  # or at the last training forward
        self._warned: set[str] = set()

    def declare(self) -> None:
        """Sets what the router declares of itself, from its stages."""
        parts = [part for _, part in self._stages()]
        for flag, combine in (("causal", all), ("batch_invariant", all), ("stochastic", any)):
            setattr(self, flag, combine(getattr(part, flag) for part in parts))
            own = (getattr(part, flag) if (it := getattr(part, f"training_{flag}")) is None else it for part in parts)
            setattr(self, f"training_{flag}", combine(own))
        self.needs: frozenset[str] = frozenset().union(*(part.needs for part in parts))
        self.needs_step_end = any(part.needs_step_end for part in parts)

    def _stages(self) -> Iterator[tuple[str, Stage]]:
        return ((name, stage) for name in STAGES if (stage := getattr(self, name)) is not None)

    def forward(self, hidden: Tensor, context: RoutingContext | None = None) -> Routing:
        """Routes hidden states [B, T, dim] (or [tokens, dim]: one sequence)."""
        context = PLAIN_CONTEXT if context is None else context
        if not isinstance(context, RoutingContext):
            raise ValueError(f"{self.spec}: context is a {type(context).__name__}: give RoutingContext(padding_mask=…)")
        if hidden.dim() == 2:
            hidden, ids = hidden.unsqueeze(0), context.token_ids
            context = context if ids is None else replace(context, token_ids=ids.reshape(1, -1))
        compiling = torch.compiler.is_compiling()
        check_given(self.spec, self.dim, self.needs, hidden, context)
        if self.training and not compiling and torch.is_grad_enabled():
            self._check_training()
        if compiling:
            from pointsman.ops.tracing import allow_a_graph_for_each_k

            allow_a_graph_for_each_k(self.num_experts)
        if not autocast_enabled(hidden.device.type):
            return self._route(hidden, context)
        with torch.autocast(hidden.device.type, enabled=False):
            return self._route(hidden, context)

    def _route(self, hidden: Tensor, context: RoutingContext) -> Routing:
        statistics: dict[str, Tensor] = {}
        scored, scores, carry, selection = self._score_and_choose(hidden, context, statistics)
        mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
        if mask is not None:  # padding gets no expert
            experts = selection.experts.masked_fill(~mask[:, None], -1)
            selection = replace(selection, experts=experts, weights=selection.weights.masked_fill(experts < 0, 0))
        # [B, T, E] -> [N, E]: from here on, tokens of all sequences are rows
        logits, probs = scores.logits.flatten(0, 1), scores.probs.flatten(0, 1)
        unmixed = probs if scores.unmixed is None else scores.unmixed.flatten(0, 1)
        losses: dict[str, Tensor] = {}
        if self.steps or self.balance or self.z_loss or self.losses:
            given = LossInput(
                logits, unmixed, probs, scores.choice.flatten(0, 1), selection.experts, selection.weights,
                scores.extra, mask, hidden.shape[0], hidden.shape[1], context, self.top_k, self.num_experts,
                self.replayed is not None, self.ranks,
            )  # fmt: skip
            for step in self.steps:
                selection = step(selection, given)
            asked = selection if selection.asked is None else selection.asked
            losses = self._losses(replace(given, experts=asked.experts, weights=asked.weights), statistics)
        if selection.statistics:
            _add(statistics, "select", selection.statistics)
        above = {**(context.below or {}), **scored.above} if context.below or scored.above else None
        return Routing(
            selection.experts, selection.weights, probs, logits, losses, carry, unmixed, statistics, above,
            selection.how,
        )  # fmt: skip

    def _score_and_choose(
        self, hidden: Tensor, context: RoutingContext, statistics: dict[str, Tensor]
    ) -> tuple[Scored, Scores, RouterState | None, Selection]:
        """What the scorer gave, what the selector got, what to carry on, and what was chosen; hidden [B, T, dim]."""
        parts: dict[str, Any] = self._modules  # a stage's attribute would cost a call each time
        score, normalize, select, mix = parts["score"], parts["normalize"], parts["select"], self.mix
        if mix is not None or not getattr(score, "accepts_half", False):
            hidden = upcast(hidden)
        found = score(hidden, context)
        if not isinstance(found, Tensor | Scored):
            raise ValueError(f"{self.spec}: the scorer returned a {type(found).__name__}, not logits or Scored(…)")
        scored = Scored.of(found)
        logits, unmixed, carry = scored.logits, None, None
        if (columns := logits.shape[-1]) != (needed := self.num_experts + len(self.virtual)):
            raise ValueError(f"{self.spec}: the scores are of {columns} experts, not of {needed}: use layer.columns")
        if logits.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(f"{self.spec}: scores {[*logits.shape]} of hidden states {[*hidden.shape]}: not [B, T, E]")
        probs = normalize(logits)  # [B, T, E]
        if mix is not None:
            unmixed = probs
            probs, carry, mixed = Mixer.checked(mix(unmixed, hidden, context), unmixed, self.spec)
            _add(statistics, "mix", mixed)
        if scored.statistics:
            _add(statistics, "score", scored.statistics)
        if scored.carry:
            carry = {**(carry or {}), **scored.carry}
        # logits still differ where probabilities are rounded to 0 or 1
        choice = logits if normalize.increasing and (mix is None or probs is unmixed) else probs
        scores = Scores(logits, probs, choice, scored.extra, unmixed)
        tokens = logits.shape[0] * logits.shape[1]
        if self.replayed is None:
            return scored, scores, carry, Selection.of(select(scores, self.top_k, context), tokens, self.spec)
        if (asked := len(self.replayed)) != tokens:
            raise ValueError(f"{self.spec}: the replayed routing is of {asked} tokens, the input of {tokens}")
        return scored, scores, carry, select.replay(scores, self.replayed.to(logits.device))

    def _losses(self, given: LossInput, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weighted losses by name; the statistics of the balance loss go into `statistics`."""
        if exporting():  # for inference
            return {}
        z_loss = Loss(lambda given: auxiliary.z_loss(given.logits, given.mask, given.ranks), self.z_loss)
        every = {"balance": Loss(self.balancing, self.balance), "z_loss": z_loss, **self.losses}
        if self.balance:
            _add(statistics, "balancing", self.balancing.statistics(given))
        found = ((name, one.weight, one.function(given)) for name, one in every.items() if one.weight)
        return {name: weight * self.ranks.part(scalar(value, self.spec, name)) for name, weight, value in found}

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
        self._frozen = self.score.frozen = frozen

    def reset_parameters(self) -> None:
        """As `build_router` starts it, newly drawn, after `to_empty`; ValueError after `hf.replace_routers` and, with
        `+attention`, after `step_end`, which has sized its state by the heads."""
        redraw(self, self.fresh())

    def requires_grad_(self, requires_grad: bool = True) -> Router:
        super().requires_grad_(requires_grad)
        if requires_grad:
            self.frozen = False  # one without parameters, too
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, parameter in self.named_parameters():  # one number, with or without a dimension (`parallelize`)
            saved = state_dict.get(prefix + name)
            if saved is not None and saved.numel() == parameter.numel() == 1 and saved.dim() != parameter.dim():
                state_dict[prefix + name] = saved.reshape(parameter.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._at_step_end = None  # loading is no step
        self.forget()  # what a step counted that is thrown away

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
        return [value for module in self.modules() if isinstance(module, Stage) for value in module.sums.values()]

    def step_end(self) -> None:
        """Once after each optimizer step: norms kept, running statistics taken over."""
        if not self.frozen:
            for _, stage in self._stages():
                stage.step_end()
            self._at_step_end = self._moves()
        self.forget()

    def forget(self) -> None:
        """Throws away what was counted since the last `step_end`."""
        for module in self.modules():
            if isinstance(module, Stage):
                module.sums.clear()

    def _moves(self) -> tuple[int, int]:
        """The parameters' version, which a copy or a gathered shard changes too, and the optimizers' steps so far."""
        return sum(parameter._version for parameter in self.parameters()), _steps["taken"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_at_step_end": None}  # an optimizer of this process does not move a copy

    def _check_training(self) -> None:
        divided = self.select.renormalize or (self.capacity and self.limit and self.limit.total)
        alone = self.top_k == 1 and divided and not self.dense_gradient
        if alone and any(p.requires_grad for p in self.score.parameters()):
            way = "use a larger k, or renormalize=false without capacity_total"
            self.warn(
                f"{self.spec}: with top_k=1 and renormalised weights every weight is exactly 1, so the router gets no "
                f"gradient from the output; {way if self.num_experts > 1 else 'one expert leaves it nothing to choose'}"
            )
        if self.objective is not None and not self.objective_known and _steps["taken"] > self._built_at:
            self.warn(
                f"{self.spec}: its objective, {self.objective}, is the loop's to compute: the page of the router shows "
                "how; set objective_known = True on the router that has it"
            )
        if self.needs_step_end:
            now, before = self._moves(), self._at_step_end
            if before is not None and now[0] != before[0] and now[1] > before[1]:
                self.warn(
                    f"{self.spec}: parameters moved without step_end; call pointsman.step_end(model) after "
                    "optimizer.step(), or pointsman.track_steps(model, optimizer) once"
                )
            self._at_step_end = now

    def warn(self, message: str) -> None:
        """Warns, once of each."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def extra_repr(self) -> str:
        return f"{self.spec}, dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}"


def _add(statistics: dict[str, Tensor], stage: str, found: Tensors) -> None:
    """Adds a stage's statistics under their names in a `Routing`."""
    statistics |= {f"{stage}.{name}": value for name, value in found.items()}


def check_top_k(top_k: int, num_experts: int) -> int:
    """k as it is, or ValueError."""
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k!r}: allowed are whole numbers from 1 to {num_experts} (the number of experts)")
    return top_k
