"""replace_routers: puts pointsman routers in the place of a Hugging Face model's gates; restores them on loading."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from pointsman.hf.counterpart import correction_bias
from pointsman.hf.gates import Gate, no_gate, survey
from pointsman.hf.layouts import LAYOUTS, Form, first_k
from pointsman.hf.surgery.attention import check_implementation, find_attention, trace
from pointsman.hf.surgery.materialize import plain_gates
from pointsman.hf.surgery.notes import CONFIG_KEY, FORMAT, Start, below, check_restored, home_of, homes_of, note
from pointsman.hf.surgery.routed import ClassRule, MixedRule, StrengthMixer, become, routed_class, weightless_class
from pointsman.hf.surgery.scorers import HyperDelta, adapted, assigned, check, has_own_rule, shared_by_default
from pointsman.hf.surgery.state import ForwardState
from pointsman.routers.frame.registry import build_router, parse_spec, split_specs
from pointsman.routers.frame.router import Router
from pointsman.routers.frame.stages import Sigmoid, Softmax

logger = logging.getLogger("pointsman.hf")
_said: WeakSet[PreTrainedModel] = WeakSet()


def replace_routers(model: nn.Module, spec: str | Sequence[str], *, start: Start = "pretrained") -> nn.Module:
    """Puts routers into a Hugging Face MoE, in place.

    The class's own code still runs after the logits: softmax or sigmoid, groups, correction bias, renormalisation,
    scaling. With `start="pretrained"` the model's outputs do not change at first, if the method allows it: `smoe`,
    `smoe-dropout`, `frozen-scaled` and `frozen-temperature` use the gate's weight (trained, frozen, frozen with a
    trained temperature), `hyperrouter` uses that weight plus H(e) - H(e_0), without its bias column, and mixers start
    at strength 0. Cosine routers (`xmoe`) cannot start from a gate, and their balance loss is off: use `hf.balance`.

    `loss-free`, `sparsemixer`, and `smoe` with one of the options `gate`, `renormalize` and `scale`, also replace the
    class's code after the logits. With the spec that `audit` names for the model, outputs do not change at first;
    `loss-free` starts from the class's correction bias and updates it in `step_end` (`pointsman.hf.StepEnd`).

    Layers whose gate is a table of token ids (DeepSeek-V4's first ones) keep it, unless a spec is of `hash`: such specs
    are for these layers, all others for the other layers. The table is the class's.

    Routers compute in float32. The specs are stored in the model's configuration: `save_pretrained` and
    `from_pretrained` restore them in any process that has imported `pointsman.hf`.

    Args:
        model: a transformers model with gates gate(h) -> (logits, weights, indices).
        spec: a router spec, `a|b` or a list: cycled over the sparse layers.
        start: "pretrained", or "fresh" for the method's own initial values (training from scratch).

    Returns:
        the model.

    Raises:
        ValueError: a layer does not support the router; the message names layer and reason, and nothing has changed.
    """
    if start not in ("pretrained", "fresh"):
        raise ValueError(f"replace_routers: start={start!r}: allowed are 'pretrained' and 'fresh'")
    specs = split_specs(spec)
    gates, reasons = survey(model)
    if reasons or not gates:
        raise ValueError("replace_routers: " + (reasons[0] if reasons else no_gate(model)))
    resolved = []
    for gate, own in assigned(gates, specs):
        one = shared_by_default(own, gate.dim, gate.num_experts)
        check(gate, one)
        resolved.append((gate, one))
    shared: dict[str, nn.Module] = {}
    homes = homes_of(model)
    built = []
    for gate, one in resolved:
        if not homes:
            raise ValueError(f"replace_routers: {type(model).__name__} has no transformers model to store specs in")
        home = home_of(gate.name, homes)
        router = _build(gate, one, start, shared, getattr(homes[home].config, "num_attention_heads", None))
        if not (router.causal and router.training_causal):
            raise ValueError(f"replace_routers: {one!r} is not causal; layer {gate.layer!r} belongs to a decoder")
        if "attention" in router.needs:
            find_attention(model, gate.name)
            check_implementation(homes[home])
        built.append((gate, home, router))
    states: dict[str, ForwardState] = {}
    for gate, home, router in built:
        _attach(gate.module, gate.form, router)
        _inform(homes[home], below(gate.name, home), gate.module, states.setdefault(home, ForwardState()))
        _keep_precise(note(gate.name, [gate.name for gate in gates], homes, gate.form, router, start))
    return model


def _build(gate: Gate, spec: str, start: Start, shared: dict[str, nn.Module], heads: int | None) -> Router:
    router = make_router(gate.module, gate.block, spec, gate.form, start, shared, heads)
    if gate.form.table and start == "pretrained":
        score: Any = router.score
        try:
            score.set_table(gate.module.get_buffer(gate.form.table).reshape(score.table.shape))
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"replace_routers: layer {gate.layer!r}: {error}") from None
    correction = correction_bias(gate) if has_own_rule(spec) and start == "pretrained" else None
    select: Any = router.select
    if correction is not None and hasattr(select, "bias"):
        with torch.no_grad():
            select.bias.copy_(correction.reshape(-1))
    return router.to(next(gate.module.parameters()).device).train(gate.module.training)


def make_router(
    gate: nn.Module, block: nn.Module, spec: str, form: Form, start: Start, shared: dict[str, nn.Module],
    heads: int | None,
) -> Router:  # fmt: skip
    """The router of one gate with weight [E, dim] and bias [E]; `shared` as of `build_router`."""
    layout = LAYOUTS.get(form.layout)
    owner = gate.get_submodule(form.owner)
    weight, bias = owner.get_parameter("weight"), getattr(owner, "bias", None)
    columns, dim = weight.shape
    before = set(map(id, shared.values()))
    parsed = parse_spec(spec)
    num_experts = columns - int(parsed.options.get("nulls", 0))
    sizes = {"dim": dim, "num_experts": num_experts, "top_k": first_k(gate, block, form)}
    vocabulary = len(gate.get_buffer(form.table)) if form.table else None
    router = build_router(spec, **sizes, shared=shared, vocab_size=vocabulary).to(weight.device)
    weighed = layout is not None and router.weigh == "input"  # by the class's block
    if (router.needs_moe and not router.virtual and not weighed) or router.score.below:
        raise ValueError(f"replace_routers: {spec!r} needs more than weights of experts, which pointsman's layers give")
    pretrained = weight.detach().float() * form.multiplier
    bias = None if bias is None else bias.detach().to(pretrained) * form.multiplier
    score = adapted(router, pretrained if start == "pretrained" else None, bias)
    if isinstance(score, HyperDelta) and id(score.hypernetwork) in before:
        score.refer(score.hypernetwork)
    router.score = score
    router.balance = router.z_loss = 0.0
    if has_own_rule(spec) and (layout is None or layout.write is not None):
        return router
    router.without_limit()
    router.normalize = Sigmoid() if form.kind == "sigmoid" else Softmax()
    router.select = ClassRule(form) if router.mix is None else MixedRule(form)
    mixer: Any = router.mix
    if mixer is not None:
        if heads and getattr(mixer, "head_entropy", None) is not None:  # so that checkpoints load
            mixer.head_entropy = mixer.head_entropy.new_zeros(heads)
        mixer.strength = 1.0
        router.mix = StrengthMixer(mixer, float(parsed.mixer_options.get("strength", 0.0)))
    parts = (router.score, router.normalize, router.mix)
    router.needs_step_end = any(part is not None and part.needs_step_end for part in parts)
    return router


def _attach(gate: Any, form: Form, router: Router) -> None:
    owner: Any = gate.get_submodule(form.owner)
    gate.pointsman_dtype = owner.get_parameter("weight").dtype
    gate.pointsman_has_bias = getattr(owner, "bias", None) is not None
    for name in ("weight", "bias"):
        owner._parameters.pop(name, None)
    own: Any = type(gate)
    inner: Any = type(owner)
    become(gate, routed_class(own, owner is gate))
    if owner is not gate:
        owner.__class__ = weightless_class(inner)
    gate.pointsman = router
    gate.pointsman_form = form
    gate.__dict__["pointsman_state"] = None


def _inform(model: PreTrainedModel, name: str, gate: Any, state: ForwardState) -> None:
    """Attaches the state of the forward to a gate whose router has a mixer."""
    if gate.pointsman.mix is None:
        return
    state.attach(model)
    gate.__dict__["pointsman_state"] = state
    if "attention" in gate.pointsman.needs:
        trace(model, name, gate, state)


def _keep_precise(model: PreTrainedModel) -> None:
    """Tells transformers to load routers in float32, and its quantisers to leave them alone."""
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), CONFIG_KEY}
    model._keep_in_fp32_modules = {*(model._keep_in_fp32_modules or ()), rf".*\.{CONFIG_KEY}"}


def restore_routers(model: PreTrainedModel) -> None:
    """Puts the routers named in the configuration (ValueError: in another format) into a model without its weights."""
    kept = getattr(model.config, CONFIG_KEY, None)
    if not kept:
        return
    if kept.get("format") != FORMAT:
        raise ValueError(f"the configuration's pointsman format is {kept.get('format')!r}; this version reads {FORMAT}")
    modules = dict(model.named_modules())
    homes = homes_of(model)
    shared: dict[str, nn.Module] = {}
    states: dict[str, ForwardState] = {}
    for name, entry in kept["gates"].items():
        gate: Any = modules.get(name)
        if gate is None or hasattr(gate, CONFIG_KEY):
            continue  # it belongs to a model around this one or in it, with the same configuration
        home = home_of(name, homes)
        form = Form(**{**entry["form"], "extras": tuple(entry["form"]["extras"])})
        heads = getattr(homes[home].config, "num_attention_heads", None)
        with torch.no_grad():
            block = modules[name.rpartition(".")[0]]
            router = make_router(gate, block, entry["router"], form, entry["start"], shared, heads)
        _attach(gate, form, router)
        _inform(homes[home], below(name, home), gate, states.setdefault(home, ForwardState()))
    _keep_precise(model)


def say_what_was_saved(model: PreTrainedModel) -> None:
    """Logs, once a model, what a checkpoint with replaced gates is where `pointsman.hf` is not imported."""
    gates: list[Any] = [gate for gate in model.modules() if hasattr(gate, "pointsman_form")]
    if not gates or model in _said:
        return
    _said.add(model)
    offer = "for those, call pointsman.hf.materialize(model) before saving"
    try:
        with torch.random.fork_rng(devices=[]):
            plain_gates(model)
    except (ValueError, RuntimeError, KeyError) as error:
        offer = f"plain gates cannot be made of these routers ({error})"
    logger.warning(
        "save_pretrained: processes that do not import pointsman.hf give this checkpoint random gates (%d layers); %s",
        len(gates), offer,
    )  # fmt: skip


def install() -> None:
    """Patches transformers so that models whose configuration names pointsman routers are built with them, or loading
    them fails, and saving one says who can open it."""
    own, own_save = PreTrainedModel.post_init, PreTrainedModel.save_pretrained
    own_load: Any = PreTrainedModel.from_pretrained
    if getattr(own, CONFIG_KEY, False):
        return

    @wraps(own_save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        saved = own_save(self, *args, **kwargs)
        say_what_was_saved(self)
        return saved

    @wraps(own)
    def post_init(self: PreTrainedModel) -> None:
        own(self)  # type: ignore[no-untyped-call]
        restore_routers(self)

    @wraps(own_load.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = own_load.__func__(cls, *args, **kwargs)
        check_restored(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    setattr(post_init, CONFIG_KEY, True)
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
