"""Recipes of the optional package TextAttack against a classifier (`pip install 'pointsman[attack]'`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from pointsman._errors import RunError, did_you_mean
from pointsman.control import set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman_lab.data import Vocabulary
from pointsman_lab.data.task_streams import collate
from pointsman_lab.evaluation.passes import eval_top_k
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.tasks.classification.data import Examples
from pointsman_lab.tasks.classification.task import encode_examples


class Scorer:
    """TextAttack's interface of a model: called with a list of strings, returns logits [texts, C]."""

    def __init__(self, model: Classifier, vocabulary: Vocabulary, max_length: int) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.max_length = max_length

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], **_: Any) -> torch.Tensor:
        device = next(self.model.parameters()).device
        kept = [text if text.strip() else "?" for text in texts]  # a recipe may produce an empty text
        encoded = encode_examples(Examples(tuple(kept), (0,) * len(kept)), self.vocabulary, self.max_length)
        logits: torch.Tensor = self.model(collate(encoded, np.arange(len(kept)), device).tokens)
        return logits.float().cpu()


def recipe_attack(
    model: Classifier,
    examples: Examples,
    vocabulary: Vocabulary,
    recipe: str,
    *,
    top_k: Sequence[int],
    max_length: int,
    count: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Attacks a classifier with one of TextAttack's recipes, at every k.

    Args:
        recipe: a recipe's class name such as "TextFoolerJin2019", or the start of it, in any case.
        count: the number of examples, from the first.

    Returns:
        For each k: {"top_k", "metric": "accuracy", "value" (under attack), "clean", "examples", "recipe", "queries"}.

    Raises:
        RunError: the package is missing, or it has no such recipe.
    """
    try:
        import textattack
        from textattack import attack_recipes
        from textattack.models.wrappers import ModelWrapper
    except ImportError as error:
        raise RunError(
            f"attack {recipe!r}: word and char are built in; recipes need TextAttack: pip install 'pointsman[attack]' "
            f"({error.name or error} is missing)"
        ) from None
    name = _recipe(recipe, attack_recipes)

    class Wrapper(Scorer, ModelWrapper):  # type: ignore[misc]
        """A `Scorer` of the type that recipes check for."""

    pairs = list(zip(examples.texts[:count], examples.labels[:count], strict=True))
    results = []
    with evaluating(model, seed):
        for k in eval_top_k(model, top_k):
            with set_top_k(model, k) if k else nullcontext():
                attack = getattr(attack_recipes, name).build(Wrapper(model, vocabulary, max_length))
                quiet = {"disable_stdout": True, "silent": True}
                arguments = textattack.AttackArgs(num_examples=len(pairs), random_seed=seed, **quiet)
                outcome = textattack.Attacker(attack, textattack.datasets.Dataset(pairs), arguments).attack_dataset()
            kinds = [type(one).__name__ for one in outcome]
            held = kinds.count("FailedAttackResult")
            clean = 1 - kinds.count("SkippedAttackResult") / len(kinds)
            about = {"examples": len(kinds), "recipe": name}
            about["queries"] = sum(int(getattr(one, "num_queries", 0)) for one in outcome)
            judged = {"metric": "accuracy", "value": held / len(kinds), "clean": clean}
            results.append({"top_k": k or model.config.num_experts, **judged, **about})
    return results


def _recipe(wanted: str, recipes: Any) -> str:
    """The name of the recipe's class."""
    known: dict[str, str] = {
        name.lower(): name
        for name, value in vars(recipes).items()
        if inspect.isclass(value) and hasattr(value, "build") and name != "AttackRecipe"
    }
    low = wanted.lower().replace("-", "").replace("_", "")
    found = [name for key, name in known.items() if key.startswith(low)] if low else []
    if low in known:
        return known[low]
    if len(found) == 1:
        return found[0]
    raise RunError(f"attack {wanted!r}: word, char, or a TextAttack recipe: {did_you_mean(wanted, known.values())}")
