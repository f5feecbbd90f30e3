"""Adam and its learning rate."""

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman_lab.training.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of the step with this number, counted from 0.

    Linear warm-up to the highest rate lr at step w = `warmup_steps`. Then, with t and T counted from there and f the
    final rate, so that the step after the last would have f:

    - cosine: f + (lr - f) (1 + cos(pi t / T)) / 2
    - linear: f + (lr - f) (1 - t / T)
    - inverse-sqrt: lr sqrt(w / step) (Vaswani et al. 2017, as in fairseq)
    - constant: lr
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    highest, last = config.learning_rate, config.final_learning_rate
    if config.lr_schedule == "constant":
        return highest
    if config.lr_schedule == "inverse-sqrt":
        return highest * math.sqrt(max(config.warmup_steps, 1) / max(step, 1))
    done = min((step - config.warmup_steps) / max(1, config.steps - config.warmup_steps), 1.0)
    if config.lr_schedule == "linear":
        return last + (highest - last) * (1 - done)
    return last + (highest - last) * 0.5 * (1 + math.cos(math.pi * done))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of everything that trains, each parameter once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def lr_scales(model: nn.Module) -> dict[int, float]:
    """id -> factor of the learning rate, of every parameter of a router that has a rate of its own."""
    scaled = [router for _, router in named_routers(model) if router.lr_scale != 1]
    return {id(parameter): router.lr_scale for router in scaled for parameter in router.parameters()}


def build_adam(
    config: RunConfig,
    parameters: Mapping[str, nn.Parameter],
    scales: Mapping[int, float] = MappingProxyType({}),
    undecayed: Collection[int] = (),
) -> torch.optim.Adam:
    """Adam or AdamW over these parameters, fused: one pass over each weight."""
    if not parameters:
        raise RunError("nothing in the model trains")
    groups: dict[tuple[float, float, Any], list[nn.Parameter]] = {}
    for parameter in parameters.values():
        decay = 0.0 if id(parameter) in undecayed else config.weight_decay
        mesh = getattr(parameter, "device_mesh", None)  # a fused optimizer takes no two meshes at a time
        groups.setdefault((scales.get(id(parameter), 1.0), decay, mesh), []).append(parameter)
    adam = torch.optim.AdamW if config.decay == "decoupled" else torch.optim.Adam
    made = [{"params": of, "lr_scale": scale, "weight_decay": decay} for (scale, decay, _), of in groups.items()]
    return adam(made, lr=config.learning_rate, betas=config.betas, eps=config.adam_eps, fused=True)


def optimizer_tensors(optimizer: torch.optim.Adam, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Adam's state as tensors: "exp_avg.<parameter>" and so on."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    return {f"{key}.{name}": value for name, state in states.items() for key, value in state.items()}


def restore_optimizer(
    optimizer: torch.optim.Adam, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """What `optimizer_tensors` gave, back into a fresh optimizer over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    members = [one for group in optimizer.param_groups for one in group["params"]]
    places = {id(one): place for place, one in enumerate(members)}
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition(".")
        own = parameters.get(name)
        if own is not None and key != "step" and tensor.numel() == own.numel() == 1:
            tensor = tensor.view(own.shape)  # [] of one process, [1] of many
        if own is None or (tensor.dim() and tensor.shape != own.shape):
            raise RunError(f"the optimizer's {full_name} {list(tensor.shape)} belongs to another model")
        state.setdefault(places[id(own)], {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
