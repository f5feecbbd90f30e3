"""Which gate a router spec is for, whether its class takes that router, and scorers that start from its weight."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from pointsman.hf.counterpart import counterpart, same_forward, virtual_experts_of
from pointsman.hf.gates import BY_TOKEN_ID, Gate
from pointsman.hf.layouts import LAYOUTS, Form
from pointsman.routers.frame.registry import entry, format_spec, parse_spec
from pointsman.routers.frame.router import Router
from pointsman.routers.frame.stage_values import Stage
from pointsman.routers.frame.stages import Scorer, Sigmoid, Softmax, TopK
from pointsman.routers.papers.hash import TableScorer
from pointsman.routers.papers.hyper import HyperScorer
from pointsman.routers.papers.smoe_dropout import FrozenLinearScorer
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routers.papers.xmoe import TemperatureGate
from pointsman.routing import RoutingContext

CAPACITY = ("capacity", "eval_capacity", "capacity_order", "capacity_scope", "capacity_unit")
CLASS_OPTIONS = {
    **dict.fromkeys(CAPACITY, "the model class never drops tokens"),
    "balance": "use pointsman.hf.balance(model, coefficient)",
    **dict.fromkeys(("balance_scope", "balance_on", "z_loss"), "use the model's own losses"),
    "weigh": "the model class decides what a weight multiplies",
    "l2": "use a weight decay of the embedding",
}
RULES = ("smoe", "loss-free", "sparsemixer")
"""Routers whose own selection rule can take the place of the class's: always, or `smoe` with one of `RULE_OPTIONS`."""
SOME = ("hash", "mask", "stable", "switch")
"""The same for classes that say so: gates with a table of token ids, and those whose `Layout` has the router."""
RULE_OPTIONS = {"gate", "renormalize", "scale", "nulls"}
BY_SELECTION = "is defined by its selection, which the Hugging Face class does itself"
SHARE_FROM = 2**24
"""From this number of frozen output weights on, layers share one hypernetwork, unless the spec says otherwise."""


def check_spec(spec: str, form: Form) -> None:
    """Raises ValueError for an option that the model class decides, or a rule of the router's own with a mixer."""
    parsed, layout = parse_spec(spec), LAYOUTS.get(form.layout)
    if parsed.choice is not None:
        raise ValueError(f"replace_routers: {spec!r}: the model class chooses the experts; leave @{parsed.choice} out")
    allowed = layout.allowed if layout is not None else ()
    own = ("hash",) if form.table else layout.rules if layout is not None else ()
    fixed = layout.options if layout is not None else ()
    for name, value in parsed.options.items():
        if name in CLASS_OPTIONS and name not in allowed and f"{name}={value}" not in fixed:
            raise ValueError(f"replace_routers: option {name!r} of {spec!r}: {CLASS_OPTIONS[name]}")
    of_virtual = "kind" in parsed.options and "nulls" in entry(parsed.router).options
    if of_virtual and parsed.options.get("nulls", "0") == "0":
        raise ValueError(f"replace_routers: option 'kind' of {spec!r}: there are no virtual experts without nulls")
    if parsed.router in SOME and parsed.router not in own:
        raise ValueError(f"replace_routers: {spec!r} {BY_SELECTION}")
    if has_own_rule(spec) and (parsed.mixer is not None or parsed.router not in RULES + own):
        names = sorted(RULE_OPTIONS & set(parsed.options)) or [parsed.router]
        takers = ", ".join(map(repr, RULES))
        raise ValueError(f"replace_routers: {spec!r}: {names[0]!r} works with {takers} without a mixer")


def has_own_rule(spec: str) -> bool:
    """Whether the router itself selects and weights the experts, in the place of the class's code."""
    parsed = parse_spec(spec)
    return parsed.router in RULES[1:] + SOME or bool(RULE_OPTIONS & set(parsed.options))


def shared_by_default(spec: str, dim: int, num_experts: int) -> str:
    """The spec with `share=true` if an unshared hypernetwork is very large (67M weights at d 2048 and N 128)."""
    parsed = parse_spec(spec)
    if parsed.router != "hyperrouter" or "share" in parsed.options or parsed.options.get("generate") == "expert":
        return spec
    hidden = int(parsed.options.get("hyper_dim", 256))
    if hidden * num_experts * (dim + 1) < SHARE_FROM:
        return spec
    return format_spec(parsed._replace(options={**parsed.options, "share": "true"}))


class HyperDelta(HyperScorer):
    """z = (W + H(e) - H(e_0)) h + b: HyperRouter starting from a pre-trained gate W, b, without its bias column.

    Initially e = e_0, and the weight is exactly W. Only e is trained.

    Args:
        scorer: a HyperRouter as built.
        weight: W [E, dim]; None: HyperRouter's own initial values.
        bias: b [E], if the class's gate has one.
    """

    def __init__(self, scorer: HyperScorer, weight: Tensor | None, bias: Tensor | None) -> None:
        Scorer.__init__(self)
        self.shape = scorer.shape
        self.embedding = scorer.embedding
        self.hypernetwork = scorer.hypernetwork
        self.register_buffer("places", scorer.places)
        self.embed_dropout, self.training_stochastic = scorer.embed_dropout, scorer.training_stochastic
        self._cache = None
        experts, columns = scorer.shape
        with torch.no_grad():
            origin = super().generate()[0].clone() if weight is not None else torch.zeros(experts, columns - 1)
        self.origin = nn.Buffer(origin)
        self.base = nn.Buffer(torch.zeros_like(origin) if weight is None else weight.to(origin))
        self.base_bias = nn.Buffer(torch.zeros_like(origin[:, 0]) if bias is None else bias.to(origin))

    def generate(self, dropout: float = 0.0) -> tuple[Tensor, Tensor | None]:
        generated = super().generate(dropout)[0].to(self.base.device)
        return self.base + (generated - self.origin), self.base_bias

    def refer(self, hypernetwork: nn.Module) -> None:
        """Uses a hypernetwork owned by another layer, so that a checkpoint contains it once."""
        self._modules.pop("hypernetwork", None)
        self.__dict__["hypernetwork"] = hypernetwork


class TemperatureScorer(Scorer):
    """z = s / tau: X-MoE's learnable temperature before the class's own softmax or sigmoid."""

    def __init__(self, score: Scorer, gate: TemperatureGate) -> None:
        super().__init__()
        self.score, self.gate = score, gate
        self.needs_step_end = score.needs_step_end

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return cast(Tensor, self.gate(self.score(hidden, context), squash=False))  # called: accelerate may offload it

    def step_end(self) -> None:
        self.score.step_end()
        self.gate.step_end()


def adapted(router: Router, weight: Tensor | None, bias: Tensor | None) -> Scorer:
    """The router's scorer for a gate with this weight [E, dim] and bias [E].

    Linear scorers (trained or frozen) and HyperRouter start from the weight, others at random. `weight` None: the
    method's own initial values. ValueError if the router is not defined by its scores alone.
    """
    starts_at = entry(parse_spec(router.spec).router).starts_at
    own_rule = has_own_rule(router.spec)
    if (type(router.select) is not TopK or starts_at is not None) and not own_rule:
        raise ValueError(f"replace_routers: {router.spec!r} {BY_SELECTION}")
    if used := [name for name, one in router.losses.items() if one.weight]:
        raise ValueError(f"replace_routers: {router.spec!r}: its loss {min(used)!r} would train nothing there")
    score, normalize = router.score, router.normalize
    if isinstance(normalize, TemperatureGate):
        return TemperatureScorer(score, normalize)
    if not isinstance(normalize, (Softmax, Sigmoid)) and not own_rule:
        raise ValueError(f"replace_routers: {router.spec!r} has its own normalisation")
    if isinstance(score, HyperScorer):
        return HyperDelta(score, weight, bias)
    if isinstance(score, TableScorer):
        if score.gate is not None and weight is not None:
            linear: Any = score.gate
            linear.weight.data.copy_(weight)
        return score
    if isinstance(score, (LinearScorer, FrozenLinearScorer)):
        with torch.no_grad():
            if isinstance(score, LinearScorer):
                score.bias = None if bias is None else nn.Parameter(torch.zeros_like(score.weight[:, 0]))
            if weight is not None:
                score.weight.copy_(weight)
            if bias is not None and score.bias is not None and weight is not None:
                score.bias.copy_(bias)
    return score


class Strength(Stage):
    """A learnable scalar, clamped to [0, 1] in the forward only, so that its gradient never vanishes."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(float(start)))

    def forward(self) -> Tensor:
        return self.value + (self.value.clamp(0, 1) - self.value).detach()


def assigned(gates: Sequence[Gate], specs: Sequence[str]) -> list[tuple[Gate, str]]:
    """The gates to replace, each with its spec; tables of token ids take those of `hash` alone, others all others."""
    tables = [gate for gate in gates if gate.form.table]
    if not tables:
        return [(gate, specs[place % len(specs)]) for place, gate in enumerate(gates)]
    found = []
    for kind, hashed in ((tables, True), ([gate for gate in gates if not gate.form.table], False)):
        own = [spec for spec in specs if (parse_spec(spec).router == "hash") == hashed]
        found += [(gate, own[place % len(own)]) for place, gate in enumerate(kind) if own]
    if not found:
        kind_of = type(tables[0].module).__name__
        raise ValueError(f"replace_routers: {specs[0]!r}: {kind_of} {BY_TOKEN_ID}; it takes 'hash' alone")
    return found


def check(gate: Gate, spec: str) -> None:
    """Raises ValueError unless a router of this spec can take the place of the gate."""
    layout, where, kind = gate.layout, f"replace_routers: layer {gate.layer!r}", type(gate.module).__name__
    if layout is not None and layout.write is None and has_own_rule(spec):
        own = counterpart(gate)
        if own is None or not same_forward(spec, own):
            raise ValueError(f"{where}: {type(gate.block).__name__} chooses and weighs the experts itself, after the "
                             f"logits; its own rule is {own or 'another one'!r}")  # fmt: skip
    else:
        check_spec(spec, gate.form)
    router = getattr(gate.module, "pointsman", None)
    if router is not None:
        raise ValueError(f"{where} already has the router {router.spec!r}; materialize(model) first")
    if not gate.form.linear:
        raise ValueError(f"{where}: the logits of {kind} are not the product with one weight")
    if layout is None and has_own_rule(spec) and (gate.form.sequence > gate.form.flat or gate.form.outputs != 3):
        raise ValueError(f"{where}: {kind} returns more than logits, weights and experts; {spec!r} does not")
    options, virtual = parse_spec(spec).options, virtual_experts_of(gate)
    has_bias = getattr(gate.module.get_submodule(gate.form.owner), "bias", None) is not None
    if (options.get("bias", str(has_bias)).lower() == "true") != has_bias:
        raise ValueError(f"{where}: option 'bias' of {spec!r}: {kind} has {'a' if has_bias else 'no'} bias")
    if (given := options.get("nulls", "0")) != "0" and (given != str(virtual) or options.get("kind") != "copy"):
        has = f"nulls={virtual}:kind=copy" if virtual else "none"
        raise ValueError(f"{where}: virtual experts are the class's own: {kind} has {has}")
    if parse_spec(spec).mixer is not None and gate.form.kind == "other":
        raise ValueError(f"{where}: {kind} uses neither softmax nor sigmoid; mixers need one of them")
