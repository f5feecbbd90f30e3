"""Robustness to text attacks.

`attacks` changes texts, `attacked` evaluates models on them, `runs` saved runs, `compare` whole comparisons;
`text_attack` runs the recipes of the package TextAttack.
"""

from pointsman.lab.robustness.compare import comparison_under_attack
from pointsman.lab.robustness.runs import finetuned_under_attack, run_under_attack
from pointsman.lab.robustness.text_attack import recipe_attack

__all__ = [
    "comparison_under_attack",
    "finetuned_under_attack",
    "recipe_attack",
    "run_under_attack",
]
