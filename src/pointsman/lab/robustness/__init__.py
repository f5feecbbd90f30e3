"""Robustness: saved runs, fine-tuned runs and whole comparisons under text attacks (`evaluation.attacks`)."""

from pointsman.lab.robustness.compare import comparison_under_attack
from pointsman.lab.robustness.runs import finetuned_under_attack, run_under_attack
from pointsman.lab.robustness.text_attack import recipe_attack

__all__ = [
    "comparison_under_attack",
    "finetuned_under_attack",
    "recipe_attack",
    "run_under_attack",
]
