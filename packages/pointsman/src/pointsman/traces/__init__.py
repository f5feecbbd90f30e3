"""Routing traces: which experts each token took in each layer, as one file for every engine."""

from pointsman.traces.trace import MISSING, RoutingTrace

__all__ = ["MISSING", "RoutingTrace"]
