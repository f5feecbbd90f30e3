"""Routing diagnostics: streaming, with bounded memory, for any model with MoE layers."""

from pointsman.diagnostics.base import Diagnostic, RoutingDiagnostic
from pointsman.diagnostics.change import Fluctuation
from pointsman.diagnostics.collapse import RepresentationCollapse
from pointsman.diagnostics.collection import Diagnostics
from pointsman.diagnostics.consistency import consistency_over_training, gathered_loads, inter_run_consistency
from pointsman.diagnostics.diagnose import Batch, Reader, diagnose, plain_reader
from pointsman.diagnostics.distribution import Entropy, Margin
from pointsman.diagnostics.jacobian import JacobianTerms
from pointsman.diagnostics.load import CoActivation, Load, load_summary
from pointsman.diagnostics.mixing import Mixing
from pointsman.diagnostics.monitor import RoutingMonitor, scalars
from pointsman.diagnostics.observe import LayerGradient, layer_gradients, observe_routing
from pointsman.diagnostics.similarity import OutputSimilarity, weight_similarity
from pointsman.diagnostics.specialisation import Specialisation

__all__ = [
    "Batch",
    "CoActivation",
    "Diagnostic",
    "Diagnostics",
    "Entropy",
    "Fluctuation",
    "JacobianTerms",
    "LayerGradient",
    "Load",
    "Margin",
    "Mixing",
    "OutputSimilarity",
    "Reader",
    "RepresentationCollapse",
    "RoutingDiagnostic",
    "RoutingMonitor",
    "Specialisation",
    "consistency_over_training",
    "diagnose",
    "gathered_loads",
    "inter_run_consistency",
    "layer_gradients",
    "load_summary",
    "observe_routing",
    "plain_reader",
    "scalars",
    "weight_similarity",
]
