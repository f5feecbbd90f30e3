"""Training that starts from the weights of a model of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pointsman._errors import RunError
from pointsman_lab.models.config import build_model
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.huggingface.convert import difference, load_theirs
from pointsman_lab.models.huggingface.reading import open_config, read_config
from pointsman_lab.registry import own_settings
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.k_schedule import doublings

SAME = 1e-4  # of the logits' standard deviation


def start_config(config: RunConfig, folder: str, router: str | None) -> RunConfig:
    """The settings of a run that starts from a folder: its model, with its own router or another, trained at its k."""
    model, _ = read_config(open_config(folder), folder, router)
    k = str(model.top_k)
    own = {name: value for name, value in config.own.items() if name in own_settings(model.family)}
    return replace(
        config, model=model, own={**own, "start_from": folder}, train_top_k=k,
        eval_top_k=doublings(1, model.num_experts),
    )  # fmt: skip


def started(config: RunConfig) -> tuple[Decoder, str]:
    """The model at step 0, and a line that says whether its logits are those of the folder's model."""
    from pointsman.hf.loading import load_model

    folder = config.own["start_from"]
    own = config.model
    if not isinstance(own, DecoderConfig):
        raise RunError(f"start_from={folder!r}: models of the family {own.family!r} start from no folder")
    theirs: Any = load_model(folder, dtype="float32").eval()
    model: Decoder = build_model(own)
    _, found = read_config(theirs.config, folder)
    fresh = load_theirs(model, theirs.state_dict(), found.shared)
    k = int(theirs.config.num_experts_per_tok)
    off = difference(model, theirs, k)
    if off <= SAME:
        return model, f"the model starts with the logits of {folder} (at k = {k} they differ by {off:.1g})"
    why = f"the router of {fresh[0]} starts anew" if fresh else f"the router {own.router!r} routes by another rule"
    return model, f"the model starts from the weights of {folder}, with other logits: {why}"
