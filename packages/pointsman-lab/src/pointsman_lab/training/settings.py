"""Which settings of a run follow from others, which may change when it is continued, and those of earlier versions."""

from collections.abc import Mapping, Set
from typing import Any

from pointsman_lab.registry import family, own_settings, trains

DERIVED = {
    "model.seed": "set seed",
    "model.top_k": "it is the first k of train_top_k",
    "model.family": "it is the preset's",
    "own": "its settings are set by their names",
}
"""Settings that follow from others."""

NO_EFFECT_ON_TRAINING = {
    "eval_batch_size", "eval_segment_length", "eval_memory_length", "eval_tokens", "eval_top_k", "eval_split",
    "valid_tokens", "validate_every", "checkpoint_every", "keep_checkpoints", "log_every", "observe_every",
    "imports", "tensorboard", "track", "preset",
}  # fmt: skip
"""Settings that may change when a run is continued: none of them touches a weight. Also those of tasks that say so."""

EARLIER = {
    "augment", "tokenizer", "start_from", "pieces", "language_exponent", "mask_rate", "mask_token_share",
    "random_share", "beam", "n_best", "cuda_graph",
}  # fmt: skip
"""Settings that earlier versions wrote into every config.json."""

GONE: Mapping[str, Any] = {
    "adaptive_cutoffs": [], "rope_scaling": "none", "rope_factor": 1.0, "rope_length": 8192, "rope_slow": 1.0,
    "rope_fast": None, "rope_amplitude": None, "rope_whole": True,
}  # fmt: skip
"""Settings of models that earlier versions wrote -> the value that means nothing."""


def derived(family_name: str) -> dict[str, str]:
    """The settings of runs of this family that follow from others or from the data, or that nothing reads -> why."""
    unread = dict.fromkeys(trains(family_name).unread, f"models of the family {family_name!r} do not read it")
    return DERIVED | unread | {f"model.{name}": why for name, why in family(family_name).of_the_data.items()}


def without_effect(family_name: str) -> Set[str]:
    """The settings of runs of this family that may change when one is continued."""
    return NO_EFFECT_ON_TRAINING | {name for name, setting in own_settings(family_name).items() if not setting.trains}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of config.json, those of the model as "model.…"."""
    model = config.get("model", {})
    own = {key: value for key, value in config.items() if key != "model"}
    return {**own, **{f"model.{key}": value for key, value in model.items()}}
