"""What the router does: streaming diagnostics with bounded memory, for any model with MoE layers."""

from pointsman.diagnostics.base import Diagnostic
from pointsman.diagnostics.distribution import Entropy, Margin
from pointsman.diagnostics.load import CoActivation, Load
from pointsman.diagnostics.monitor import RoutingMonitor, scalars

__all__ = ["CoActivation", "Diagnostic", "Entropy", "Load", "Margin", "RoutingMonitor", "scalars"]
