"""Routing traces: which experts each token took in each layer, as one file for every engine."""

from typing import TYPE_CHECKING

from pointsman._errors import moved
from pointsman.traces.trace import MISSING, RoutingTrace

__all__ = ["MISSING", "RoutingTrace"]

if not TYPE_CHECKING:
    __getattr__ = moved(__name__, ("compare", "flips"), "pointsman_lab.traces")
