"""A gate whose logits come from a pointsman router; after the logits the class's own code runs.

The gate gets a subclass of its class, so that hooks which look for instances still find it, and keeps its forward. The
forward receives the router's logits as its input, and a placeholder for the weight whose product with them is the
logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.delivery import Deliver
from pointsman.hf.gates import TOKEN_IDS
from pointsman.hf.layouts import JITTER, LAYOUTS, Form
from pointsman.hf.surgery.scorers import Strength
from pointsman.hf.surgery.state import ForwardState
from pointsman.routers.frame.stage_values import Scores, Selection
from pointsman.routers.frame.stages import Mixer, Selector
from pointsman.routing import RouterState, Routing, RoutingContext

SMALLEST = 1e-30  # probabilities are at least this: ratios stay finite in float32


class PassThrough(torch.Tensor):
    """A placeholder for a gate's weight: its product with logits is the logits.

    Unlike an identity matrix it computes nothing, so that no reduced-precision matrix product rounds the logits.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch.mm, Tensor.to, Tensor.type, Tensor.float, Tensor.t):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


PASS_THROUGH: Any = torch.empty(0).as_subclass(PassThrough)
PASS_THROUGH._is_hf_initialized = True  # transformers must not initialise it


class ClassRule(Selector):
    """Selection by the model class's own gate, with its groups, correction bias, renormalisation and scaling."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.call: Callable[[Tensor], Any] | None = None  # set by the gate during a forward
        self.output: Any = ()

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        layout = LAYOUTS.get(self.form.layout)
        if layout is not None:
            assert self.call is not None
            rows = scores.logits if layout.sequence else scores.logits.flatten(0, 1)
            self.output = self.call(rows.clone())  # some classes add noise to it, in place
            _, weights, experts = layout.read(self.output, layout.fixed_k or k, self.form.power)
            return experts, weights
        logits = scores.logits.flatten(0, 1)
        if self.form.multiplier != 1:  # the class multiplies by it
            logits = logits / self.form.multiplier
        assert self.call is not None
        output = self.call(logits[None] if self.form.sequence else logits)
        experts, weights = output[self.form.indices], output[self.form.weights]
        self.output = output
        return experts.reshape(-1, experts.shape[-1]), weights.reshape(-1, weights.shape[-1])

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        raise ValueError(f"{type(self).__name__}: the model class weighs its own choice, which cannot be replayed")


class MixedRule(ClassRule):
    """`ClassRule` after a mixer: a change of probabilities p -> p' becomes a change of the logits z.

    For softmax z + ln(p' / p), for sigmoids z + logit(p') - logit(p): without mixing exactly z.
    """

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        logits, mixed = scores.logits, scores.probs
        if self.form.kind == "sigmoid":
            before = torch.sigmoid(logits)
            change = _ratio(mixed, before) - _ratio(1 - mixed, 1 - before)
        else:
            change = _ratio(mixed, torch.softmax(logits, -1))
        return super().forward(Scores(logits + change, mixed, mixed), k, context)


def _ratio(after: Tensor, before: Tensor) -> Tensor:
    return torch.log(after.clamp_min(SMALLEST) / before.clamp_min(SMALLEST))


class StrengthMixer(Mixer):
    """p + s (mix(p) - p) with a trained strength s, by default 0 at first, so that routing does not change."""

    def __init__(self, mixer: Mixer, start: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.strength = Strength(start)
        for flag in ("causal", "batch_invariant", "stochastic"):
            setattr(self, flag, getattr(mixer, flag))
            setattr(self, f"training_{flag}", getattr(mixer, f"training_{flag}"))
        self.needs, self.needs_step_end = mixer.needs, mixer.needs_step_end

    def forward(self, probs: Tensor, hidden: Tensor, context: RoutingContext) -> tuple[Tensor, RouterState | None, Any]:
        mixed, carry, statistics = Mixer.checked(self.mixer(probs, hidden, context), probs, "a mixer")
        return probs + self.strength().to(probs.dtype) * (mixed - probs), carry, statistics

    def step_end(self) -> None:
        with torch.no_grad():
            self.strength.value.clamp_(0, 1)
        self.mixer.step_end()

    def gather(self, statistics: Any) -> None:
        self.mixer.gather(statistics)


class _Routed:
    """Mixin of `routed_class`: a gate that routes with `self.pointsman`."""

    own_class: type[nn.Module]
    pointsman: Any
    pointsman_dtype: torch.dtype
    pointsman_form: Form
    pointsman_state: ForwardState | None

    @property
    def hidden_dim(self) -> int:
        """The width to which the class's code flattens its input: here that of the logits."""
        return int(self.pointsman.num_experts)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.pointsman_dtype = fn(torch.empty(0, dtype=self.pointsman_dtype)).dtype  # of the gate's own weights
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:  # a class made here has no name by which pickle would find it
        return _blank, (routed_class, self.own_class, "weight" in vars(type(self))), self.__getstate__()

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        router, rule, form = self.pointsman, self.pointsman.select, self.pointsman_form
        layout, dtype, shape = LAYOUTS.get(form.layout), hidden_states.dtype, tuple(hidden_states.shape[:-1])
        if isinstance(rule, ClassRule):
            hidden_states, call = _jittered(self, hidden_states)
            rule.call = lambda logits: call(logits, *args, **kwargs)
        state = self.pointsman_state
        if form.table:
            ids = kwargs[TOKEN_IDS] if TOKEN_IDS in kwargs else args[0]
            rows = hidden_states if hidden_states.dim() == 3 else hidden_states[None]
            routing: Routing = router(rows, RoutingContext(token_ids=ids.reshape(rows.shape[:2])))
        elif state is None:
            routing = router(hidden_states)
        else:
            hidden, context = state.context(self, hidden_states)
            routing = router(hidden, context)
            state.keep(self, routing)
        if isinstance(rule, ClassRule):
            output, rule.output, rule.call = rule.output, (), None
        elif layout is not None:
            assert layout.write is not None
            output = layout.write(routing.logits, routing.weights, routing.experts, shape)
        else:
            # a class with virtual experts of its own has them among its experts
            places = {form.logits: routing.logits, form.weights: routing.chosen_weights, form.indices: routing.chosen}
            output = tuple(places[place] for place in range(len(places)))
        if layout is not None:
            output = layout.replaced(output, layout.carrier(output).to(dtype))  # its block does not convert them
        if not (router.training and routing.statistics and torch.is_grad_enabled()):
            return output
        if layout is not None:
            return layout.replaced(output, _gathering(layout.carrier(output), router, routing))
        weights = _gathering(output[form.weights], router, routing)
        return (*output[: form.weights], weights, *output[form.weights + 1 :])


def _jittered(gate: Any, hidden: Tensor) -> tuple[Tensor, Callable[..., Any]]:
    """The gate's input with the noise that its class multiplies it by in training, and the class's forward without."""
    forward = partial(gate.own_class.forward, gate)
    name, off = JITTER.get(type(gate).__name__, ("", None))
    reach = getattr(gate, name, None)
    if not reach or not gate.training:
        return hidden, forward

    def call(*args: Any, **kwargs: Any) -> Any:
        setattr(gate, name, off)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(gate, name, reach)

    return hidden * torch.empty_like(hidden).uniform_(1 - reach, 1 + reach), call


def _gathering(weights: Tensor, router: Any, routing: Routing) -> Tensor:
    """The same weights, whose backward gathers the routing's statistics, once per micro-batch."""
    if not weights.requires_grad:
        return weights
    gathered: Tensor = Deliver.apply(weights, weights.new_ones(()), router.gather, routing.statistics, None)  # type: ignore[no-untyped-call]
    return gathered


def become(gate: Any, kind: Any) -> None:
    """Gives a gate another class; a forward that accelerate (device_map) found at the gate and keeps is that one's."""
    gate.__class__ = kind
    for name in ("forward", "_old_forward"):
        if isinstance(gate.__dict__.get(name), MethodType):
            setattr(gate, name, MethodType(kind.forward, gate))


def _blank(kind: Callable[..., Any], *args: Any) -> Any:
    """An object of a class that is made here, for pickle."""
    made = kind(*args)
    return made.__new__(made)


@cache
def routed_class(own: Any, holds_weight: bool) -> Any:
    """The subclass of a gate's class that routes with `self.pointsman`."""
    members: dict[str, Any] = {"own_class": own, "__module__": own.__module__, "__qualname__": own.__qualname__}
    if holds_weight:
        members |= {"weight": PASS_THROUGH, "bias": PASS_THROUGH}
    return type(own.__name__, (_Routed, own), members)


@cache
def weightless_class(own: Any) -> Any:
    """The subclass of a linear map inside a gate whose weight was removed."""
    members = {"own_class": own, "__module__": own.__module__, "weight": PASS_THROUGH, "bias": PASS_THROUGH}
    members["__reduce_ex__"] = lambda self, protocol: (_blank, (weightless_class, own), self.__getstate__())
    return type(own.__name__, (own,), members)
