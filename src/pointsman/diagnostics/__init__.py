"""What the router does: streaming diagnostics with bounded memory, for any model with MoE layers."""

from pointsman.diagnostics.base import Diagnostic, RoutingDiagnostic
from pointsman.diagnostics.change import Fluctuation
from pointsman.diagnostics.collapse import RepresentationCollapse
from pointsman.diagnostics.collection import Diagnostics
from pointsman.diagnostics.consistency import consistency_over_training, gathered_loads, inter_run_consistency
from pointsman.diagnostics.distribution import Entropy, Margin
from pointsman.diagnostics.jacobian import JacobianTerms
from pointsman.diagnostics.load import CoActivation, Load, load_summary
from pointsman.diagnostics.monitor import RoutingMonitor, scalars
from pointsman.diagnostics.observe import gradients, observe_routing
from pointsman.diagnostics.similarity import OutputSimilarity, weight_similarity
from pointsman.diagnostics.specialisation import Specialisation

__all__ = [
    "CoActivation",
    "Diagnostic",
    "Diagnostics",
    "Entropy",
    "Fluctuation",
    "JacobianTerms",
    "Load",
    "Margin",
    "OutputSimilarity",
    "RepresentationCollapse",
    "RoutingDiagnostic",
    "RoutingMonitor",
    "Specialisation",
    "consistency_over_training",
    "gathered_loads",
    "gradients",
    "inter_run_consistency",
    "load_summary",
    "observe_routing",
    "scalars",
    "weight_similarity",
]
