"""pointsman: routing for sparse mixtures of experts. The public names, each imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.control import freeze, materialize, param_groups, set_top_k, step_end, track_steps
    from pointsman.conversion import upcycle
    from pointsman.delivery import add_losses, losses, set_loss_scale
    from pointsman.layer import MoE
    from pointsman.recording import record_routing
    from pointsman.replay import replay_routing
    from pointsman.routers.frame.registry import build_router, build_routers, list_routers
    from pointsman.routers.frame.router import Router
    from pointsman.routing import AttentionTrace, Routing, RoutingContext

__version__ = "0.1.0"
__all__ = [
    "AttentionTrace", "MoE", "Router", "Routing", "RoutingContext", "add_losses", "build_router", "build_routers",
    "freeze", "list_routers", "losses", "materialize", "param_groups", "record_routing", "replay_routing",
    "set_loss_scale", "set_top_k", "step_end", "track_steps", "upcycle",
]  # fmt: skip


_HOMES = {
    "routing": ("AttentionTrace", "Routing", "RoutingContext"),
    "routers.frame.router": ("Router",),
    "routers.frame.registry": ("build_router", "build_routers", "list_routers"),
    "delivery": ("add_losses", "losses", "set_loss_scale"),
    "layer": ("MoE",),
    "conversion": ("upcycle",),
    "recording": ("record_routing",),
    "replay": ("replay_routing",),
}
_PACKAGES = ("diagnostics", "engines", "hf", "parallel", "testing", "traces")


def __getattr__(name: str) -> Any:
    # torch takes a second to import: `pointsman --help` must not wait for it
    if name in _PACKAGES:
        return import_module(f"pointsman.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'pointsman' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "control")
    return getattr(import_module(f"pointsman.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
