"""The routers of a model, noted in its configuration: `save_pretrained` keeps them, `from_pretrained` reads them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pointsman.hf.layouts import Form
from pointsman.routers.frame.router import Router

CONFIG_KEY = "pointsman"
FORMAT = 1
Start = Literal["pretrained", "fresh"]


def homes_of(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The transformers models in a model, by qualified name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


def home_of(name: str, homes: Iterable[str]) -> str:
    """The innermost of these models that contains a module."""
    return max((home for home in homes if inside(name, home)), key=len)


def inside(name: str, home: str) -> bool:
    return not home or f"{name}.".startswith(f"{home}.")


def below(name: str, home: str) -> str:
    """The name of a module relative to a model that contains it."""
    return name.removeprefix(home).removeprefix(".")


def keeper_of(name: str, gates: Iterable[str], homes: Mapping[str, PreTrainedModel]) -> str:
    """The model in whose configuration the router of the gate `name`, of all `gates`, is noted.

    It is the innermost one whose configuration is saved (SwitchTransformers gives encoder and decoder a copy), and that
    contains all gates with this configuration (encoder and decoder of NLLB-MoE share theirs).
    """
    around = sorted((home for home in homes if inside(name, home)), key=len)
    saved = set(map(id, _configs(homes[around[0]].config)))
    users = {home_of(gate, homes) for gate in gates}
    for home in reversed(around):
        config = homes[home].config
        if id(config) in saved and all(inside(user, home) for user in users if homes[user].config is config):
            return home
    return around[0]


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def note(
    name: str, gates: Iterable[str], homes: Mapping[str, PreTrainedModel], form: Form, router: Router, start: Start
) -> PreTrainedModel:
    """Notes the router of the gate `name`, relative to its keeper, in the configuration of the keeper: returns that."""
    keeper = keeper_of(name, gates, homes)
    config: Any = homes[keeper].config
    kept = dict(getattr(config, CONFIG_KEY, None) or {"format": FORMAT, "gates": {}})
    entry = {"router": router.spec, "start": start, "form": asdict(form)}
    kept["gates"] = {**kept["gates"], below(name, keeper): entry}
    setattr(config, CONFIG_KEY, kept)
    return homes[keeper]


def check_restored(model: PreTrainedModel) -> None:
    """Raises ValueError unless every gate that the configuration names has its router."""
    modules, homes = dict(model.named_modules()), homes_of(model)
    for config in _configs(model.config):
        gates = (getattr(config, CONFIG_KEY, None) or {"gates": {}})["gates"]
        prefixes = [f"{home}." if home else "" for home, module in homes.items() if module.config is config]
        lost = [name for name in gates if not any(hasattr(modules.get(one + name), CONFIG_KEY) for one in prefixes)]
        if prefixes and lost:
            raise ValueError(f"from_pretrained: {type(model).__name__} lacks {len(lost)} of the {len(gates)} gates "
                             f"whose routers were saved: {lost[0]!r}")  # fmt: skip
