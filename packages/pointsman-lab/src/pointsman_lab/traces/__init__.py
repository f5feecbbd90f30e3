"""What is between two routing traces, and what one costs to serve."""

from pointsman_lab.traces.difference import Difference, compare
from pointsman_lab.traces.noise import flips

__all__ = ["Difference", "compare", "flips"]
