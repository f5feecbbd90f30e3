"""pointsman: routing for sparse mixtures of experts."""

from pointsman.control import (
    freeze,
    losses,
    materialize,
    record_routing,
    set_loss_scale,
    set_top_k,
    step_end,
    track_steps,
)
from pointsman.layer import MoE
from pointsman.routers.registry import build_router, build_routers, list_routers
from pointsman.routers.router import Router
from pointsman.routing import AttentionTrace, Routing, RoutingContext

__version__ = "0.1.0"
__all__ = [
    "AttentionTrace",
    "MoE",
    "Router",
    "Routing",
    "RoutingContext",
    "build_router",
    "build_routers",
    "freeze",
    "list_routers",
    "losses",
    "materialize",
    "record_routing",
    "set_loss_scale",
    "set_top_k",
    "step_end",
    "track_steps",
]
