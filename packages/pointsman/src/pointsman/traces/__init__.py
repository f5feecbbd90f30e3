"""Routing traces: which experts each token took in each layer, as one file for every engine."""

from pointsman.traces.difference import Difference, compare
from pointsman.traces.noise import flips
from pointsman.traces.trace import MISSING, RoutingTrace

__all__ = ["MISSING", "Difference", "RoutingTrace", "compare", "flips"]
