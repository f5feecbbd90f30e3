"""Routing diagnostics: streaming, with bounded memory, for any model with MoE layers."""

from pointsman.diagnostics.base import Diagnostic, RoutingDiagnostic
from pointsman.diagnostics.collection import Diagnostics
from pointsman.diagnostics.jacobian import JacobianTerms
from pointsman.diagnostics.monitor import RoutingMonitor, scalars
from pointsman.diagnostics.observe import LayerGradient, layer_gradients
from pointsman.diagnostics.specialisation import OutputSimilarity, RepresentationCollapse, Specialisation
from pointsman.diagnostics.statistics import (
    CoActivation,
    Entropy,
    Fluctuation,
    Load,
    Margin,
    Mixing,
    inter_run_consistency,
    load_summary,
)  # fmt: skip
from pointsman.recording import observe_routing

__all__ = [
    "CoActivation", "Diagnostic", "Diagnostics", "Entropy", "Fluctuation", "JacobianTerms", "LayerGradient", "Load",
    "Margin", "Mixing", "OutputSimilarity", "RepresentationCollapse", "RoutingDiagnostic", "RoutingMonitor",
    "Specialisation", "inter_run_consistency", "layer_gradients", "load_summary", "observe_routing", "scalars",
]  # fmt: skip
