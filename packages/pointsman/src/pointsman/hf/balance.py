"""balance: the balance loss of a Hugging Face MoE per layer, counted once, or a bias that is moved instead.

Forward hooks on the gates keep what each one returned; a hook on the model adds the loss to the loss that its forward
returns. So whatever a loop does to the main loss (accumulation, a loss scaler, the mean over ranks), it does to both.
"""

import logging
import sys
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from pointsman._alive import Alive
from pointsman._errors import did_you_mean
from pointsman.hf.balancing import BIAS_RATE, Balancing, Bias, Place, Seat, biases_for, count, settle
from pointsman.hf.gates import candidates, no_gate, survey
from pointsman.hf.given import names_of
from pointsman.ops.linear import in_backward

logger = logging.getLogger("pointsman.hf")
WITHOUT_ITEMS = ("ForSequenceClassification", "ForTokenClassification",
                 "SwitchTransformersForConditionalGeneration", "NllbMoeForConditionalGeneration")  # fmt: skip
"""What ignores `num_items_in_batch`, by loss or class."""
OWN = ("router_aux_loss_coef", "aux_loss_coef")
"""What the classes call the coefficient of their own loss."""
ASKED = "output_router_logits"
IGNORED = -100
PATIENCE = 256  # training forwards: more than most accumulate in a step
UNMOVED = (f"its bias has not moved: no optimizer of torch stepped its parameters in {PATIENCE} training forwards; "
           "after each step call hf.StepEnd().on_step_end(None, None, None, model), a callback of Trainer")  # fmt: skip
_balanced: Alive[nn.Module] = Alive()
_watching: list[Any] = []


def _keep(gate: Any, args: Any, kwargs: Any, output: Any) -> None:
    """On a gate: what it returned, where the model's forward runs. A second forward of checkpointing is not one."""
    seat = gate.pointsman_seat
    if seat.open:
        seat.known = True
        seat.seen.append((output, (args[0] if args else kwargs["hidden_states"]).shape[:-1]))
    elif gate.training and torch.is_grad_enabled() and not (seat.known and in_backward()):
        seat.outside = True


def _open(home: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Before the model's forward."""
    if getattr(home, "_is_replica", False):
        raise ValueError("hf.balance: nn.DataParallel copies the gates; use DistributedDataParallel")
    settings: Balancing = home.pointsman_balancing
    training = home.training and torch.is_grad_enabled()
    asked = bool(kwargs.get(ASKED))
    for place in settings.places:
        for _, seat in place.seats(home):
            seat.seen, seat.open = [], training or (asked and settings.how == "loss")
    config = home.config.get_text_config() if hasattr(home.config, "get_text_config") else home.config
    if hasattr(home, "router_z_loss_coef") or not (training if asked else getattr(config, ASKED, False)):
        return None
    return args, {**kwargs, ASKED: False}  # what the class would add for it is ours now


def _close(home: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """After the model's forward: adds the loss to the one that it returns, or counts what was chosen."""
    settings: Balancing = home.pointsman_balancing
    watched: _Watched = home.pointsman_watched
    seats = [seat for place in settings.places for _, seat in place.seats(home)]
    if not any(seat.open for seat in seats):
        return None
    training = home.training and torch.is_grad_enabled()
    given = {**dict(zip(settings.names, args, strict=False)), **kwargs}
    try:
        found = list(settings.routings(home, given))
    finally:
        for seat in seats:
            seat.seen, seat.open = [], False
    if not found:
        raise ValueError(f"hf.balance: no gate of {type(home).__name__} ran in its forward")
    if settings.how == "bias":
        if training:
            watched.waited += not torch.compiler.is_compiling()
            if watched.waited == PATIENCE:
                logger.warning("balance: %s: %s", type(home).__name__, UNMOVED)
            count(watched.counts, settings.biases, [(place.path, experts) for place, _, _, experts, _ in found])
        return None
    value = settings.loss(found)
    if not training:
        return _with(output, aux_loss=value)
    if not value.requires_grad:
        raise ValueError("hf.balance: no gradient reaches the gates: reentrant activation checkpointing (pass "
                         "use_reentrant=False), or the gates and all below them are frozen")  # fmt: skip
    if not torch.compiler.is_compiling():
        watched.reached = bool(watched.reached)
        value.register_hook(lambda _: setattr(watched, "reached", True))  # type: ignore[no-untyped-call]
    labels = given.get("labels")
    loss = output[0] if isinstance(output, tuple) and labels is not None else getattr(output, "loss", None)
    weighted = settings.coefficient * value
    if loss is None:
        watched.pending = [*watched.pending, weighted]
        return _with(output, aux_loss=value)
    if not {getattr(home, "loss_type", None), type(home).__name__.removeprefix("FSDP")} & {*WITHOUT_ITEMS}:
        weighted = weighted * _share(given, settings.shifts)
    return _with(output, aux_loss=value, loss=loss + weighted.to(loss.device, loss.dtype))


def _with(output: Any, **values: Tensor) -> Any:
    """The output with these fields, of those that its class has."""
    if isinstance(output, tuple):
        return (values["loss"], *output[1:]) if "loss" in values else output
    for name, value in values.items():
        if hasattr(output, name):
            output[name] = value
    return output


def _share(given: dict[str, Any], shifts: bool) -> Any:
    """What a mean over this micro-batch counts in a loss divided by `num_items_in_batch`; 1 where that is not given."""
    items, labels = given.get("num_items_in_batch"), given.get("shift_labels")
    if items is None:
        return 1
    if labels is None:
        labels = given["labels"][..., 1:] if shifts else given["labels"]
    return (labels != IGNORED).sum() / items


def balance(
    model: nn.Module, coefficient: float | None = None, how: Literal["loss", "bias"] = "loss",
    like: Literal["transformers"] | None = None,
) -> nn.Module:  # fmt: skip
    """Balances the experts of a Hugging Face MoE in training, in place of the class's own loss, in any loop.

        model = AutoModelForCausalLM.from_pretrained(name)
        pointsman.hf.balance(model)
        Trainer(model, …).train()

    "loss": L = coefficient * mean over layers of E sum_i f_i P_i (Switch Transformer, Eq. 4): f_i is the share of a
    layer's assignments that expert i has, P_i its mean probability; 1.0 at perfect balance for every k. It is added to
    the loss that the model returns, where `num_items_in_batch` is given as the micro-batch's share of it: a step has
    the mean of its micro-batches' losses whatever the accumulation and the number of ranks. Without labels the model
    returns no loss: `pointsman.add_losses(loss, model)` adds it then, TRL's trainers add `aux_loss` themselves.

    "bias": no loss. After each optimizer step b += coefficient * sign(mean n - n) (Wang et al. 2024, arXiv 2408.15664),
    n the tokens of each expert in the step, over all ranks. The class's correction bias is moved; a class without one
    gets `loss-free` routers, which its checkpoint then names.

    Padding, known from the `attention_mask`, is not counted; activation checkpointing, compilation and autocast change
    nothing. Only training forwards with gradients count. The class's own loss is off, and with it `router_logits` in
    training. A second call replaces the first. Copies are balanced, too. Nothing is added to the checkpoint; its
    configuration has the coefficient.

    Args:
        coefficient: of the loss, default 0.01; how far the bias moves, default 0.001.
        like: "transformers": the value that `load_balancing_loss_func` gives, over all layers at once and k times as
            large, for a coefficient that was tuned to it. Four layers that each use one other expert have a loss of 1.

    Raises:
        ValueError: no gate, a setting out of range, a class without a bias for which there is no router; in training, a
            step whose loss reached no gradient, or of a loop that calls a model inside this one.
    """
    if how not in ("loss", "bias"):
        raise ValueError(f"hf.balance: how={how!r}: {did_you_mean(str(how), ('loss', 'bias'))}")
    if like not in (None, "transformers") or (like and how == "bias"):
        raise ValueError(f"hf.balance: like={like!r}: allowed is 'transformers', with how='loss'")
    number = (0.01 if how == "loss" else BIAS_RATE) if coefficient is None else coefficient
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
        raise ValueError(f"hf.balance: coefficient={coefficient!r}: allowed are numbers above 0")
    homes = _homes(model)
    if not homes:
        raise ValueError(f"hf.balance: {no_gate(model)}")
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # code compiled before, even of another model of the class, would not call the hooks
    for home in homes:
        said = _prepare(home, float(number), how, like)
        logger.warning("balance: %s: %s", type(home).__name__, said)
    return model


class _Watched:
    """Has a model moved after its optimizer's steps, and each copy of it that deepcopy or pickle makes.

    It has what waits for the next step, which is no copy's: losses that nobody has added, whether backward came to one
    (None: there was none), the assignments [E] by gate, and the number of training forwards where a bias moves.
    """

    def __init__(self, home: nn.Module) -> None:
        self.__setstate__(home)

    def __getstate__(self) -> nn.Module | None:
        return self.home()

    def __setstate__(self, home: nn.Module) -> None:
        self.home = ref(home)
        self.pending: list[Tensor] = []
        self.reached: bool | None = None
        self.counts: dict[str, Tensor] = {}
        self.waited = 0
        _balanced.add(home)
        if not _watching:
            _watching.append(register_optimizer_step_post_hook(_after_step))


def _homes(model: nn.Module) -> list[Any]:
    """The outermost transformers models in a model that have gates."""
    found: list[Any] = []
    for module in model.modules():
        inner = any(module is one for home in found for one in home.modules())
        if isinstance(module, PreTrainedModel) and not inner and next(candidates(module), None) is not None:
            found.append(module)
    return found


def _prepare(home: Any, coefficient: float, how: Any, like: Any) -> str:
    gates, reasons = survey(home)
    biases: tuple[Bias, ...] = ()
    if how == "bias":
        if reasons:
            raise ValueError(f"hf.balance: how='bias': {reasons[0]}")
        biases = biases_for(home, gates, coefficient)
        gates, _ = survey(home)
    known = {gate.name: gate for gate in gates}
    decoder = bool(getattr(home.config, "is_encoder_decoder", False))
    names: dict[nn.Module, str] = {}
    for name, module, _ in candidates(home):
        names.setdefault(module, name)  # one seat has all calls of a gate that blocks share
    places = tuple(
        Place(name, known[name].form if name in known else None, decoder and "decoder" in name.split("."))
        for name in names.values()
        if name not in known or not known[name].form.table
    )
    if not places:
        raise ValueError(f"hf.balance: every gate of {type(home).__name__} chooses by token id, from a table")
    shifts = not decoder and getattr(home, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration", None)
    off = _turn_off(home, coefficient if how == "loss" else 0.0)
    for place in places:
        gate: Any = home.get_submodule(place.path)
        if "pointsman_seat" not in gate.__dict__:
            gate.pointsman_seat = Seat()
            gate.register_forward_hook(_keep, with_kwargs=True)
    if "pointsman_balancing" not in home.__dict__:
        home.register_forward_pre_hook(_open, with_kwargs=True)
        home.register_forward_hook(_close, with_kwargs=True)
    home.pointsman_watched = _Watched(home)
    home.pointsman_balancing = Balancing(coefficient, how, like, places, names_of(home), shifts, biases)
    what = f"{len(places)} gate" + "s" * (len(places) > 1)
    if how == "bias":
        moved = "the bias of loss-free routers" if any(one.added for one in biases) else "the class's correction bias"
        return f"{what}, {moved} moves by {coefficient:g} after each optimizer step; {off}"
    meant = "as transformers does, over all layers at once" if like else "per layer"
    return f"{what}, the balance loss {meant}, times {coefficient:g}, is added to its loss; {off}"


def _turn_off(home: Any, coefficient: float) -> str:
    """Takes the class's own loss out; its configuration keeps the coefficient, which TRL reads."""
    was = getattr(home.config, ASKED, False)
    config = home.config.get_text_config() if hasattr(home.config, "get_text_config") else home.config
    for module in home.modules():
        for name in OWN if isinstance(module, PreTrainedModel) else ():
            if name in module.__dict__:
                setattr(module, name, 0.0)
    for one in {id(one): one for one in (home.config, config)}.values():
        if not hasattr(home, "router_z_loss_coef"):
            setattr(one, ASKED, False)
        for name in OWN:
            if name == OWN[0] or hasattr(one, name):
                setattr(one, name, coefficient)
    return "the class's own loss was on and is off" if was else "the class's own loss is off"


def take(model: nn.Module) -> list[Tensor]:
    """The weighted losses of forwards that returned none, once, for `add_losses`."""
    every = [one for part in model.modules() if (one := part.__dict__.get("pointsman_watched")) is not None]
    found = [value for one in every for value in one.pending]
    for one in every:
        one.pending = []
    return found


def moved(model: nn.Module) -> None:
    """After an optimizer step of a model: moves the biases; ValueError if its losses reached no gradient."""
    for home in [one for one in model.modules() if "pointsman_balancing" in one.__dict__]:
        settings: Balancing = home.__dict__["pointsman_balancing"]
        watched: _Watched = home.__dict__["pointsman_watched"]
        reached, counts = watched.reached, watched.counts
        watched.reached, watched.counts, watched.waited = None, {}, 0
        watched.pending = []  # where a loop adds `aux_loss`, nobody takes them
        outside = [seat for place in settings.places for _, seat in place.seats(home) if seat.outside]
        for seat in outside:
            seat.outside = False
        if outside and reached is None and not counts:
            raise ValueError(f"hf.balance: in a step only a model inside {type(home).__name__} ran, unbalanced: call "
                             "the whole; without labels, write loss = pointsman.add_losses(loss, model)")  # fmt: skip
        settle(home, settings.biases, counts)
        if reached is False:
            raise ValueError("hf.balance: a step was made to which its loss gave no gradient: the loop makes a loss of "
                             "its own; write loss = pointsman.add_losses(loss, model) after the forward, which then "
                             f"gets no labels, or add {settings.coefficient:g} * outputs.aux_loss; for TRL's trainers, "
                             "call hf.balance before making one")  # fmt: skip


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for home in _balanced:
        if not any(id(parameter) in own for parameter in home.parameters()):
            continue
        if in_backward():  # an optimizer for each parameter: checkpointing has yet to choose as it did
            torch.autograd.Variable._execution_engine.queue_callback(partial(moved, home))
        else:
            moved(home)
