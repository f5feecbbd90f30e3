"""Routing under fine-tuning: how far it moved from the pre-trained model's, on the same texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pointsman.control import named_routers, record_routing, set_top_k
from pointsman.diagnostics.change import Fluctuation
from pointsman.diagnostics.observe import evaluating
from pointsman_lab.data.task_streams import Encoded, eval_batches
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.models.config import build_model

EXAMPLES = 256
TOP_K = 2


@torch.no_grad()
def change_from(weights: Mapping[str, Tensor], model: Classifier, encoded: Encoded) -> dict[str, Any]:
    """Routing fluctuation between the pre-trained model and the fine-tuned one, on the same texts at k = 2.

    Args:
        weights: of the pre-trained language model.
        model: fine-tuned from it.
        encoded: texts; the first 256 are read.

    Returns:
        {"top_k", "examples", "layers": {layer: what `Fluctuation` gives}}; padding is left out.
    """
    device = next(model.parameters()).device
    before = build_model(model.config)
    before.load_state_dict(weights)
    before.to(device)
    top_k = min(TOP_K, model.config.num_experts)
    part = encoded.first(EXAMPLES)
    layers = {name: Fluctuation() for name, _ in named_routers(before)}
    with evaluating(model, 0), evaluating(before, 0), set_top_k(model, top_k), set_top_k(before, top_k):
        for batch in eval_batches(part, 32, device):
            mask = batch.tokens >= 0
            with record_routing(before) as one, record_routing(model.backbone) as two:
                before.encode(batch.tokens.clamp_min(0), padding_mask=mask)
                model.backbone.encode(batch.tokens.clamp_min(0), padding_mask=mask)
            for name, fluctuation in layers.items():
                fluctuation.update(one[name], two[name], mask.reshape(-1))
    results = {name: fluctuation.result() for name, fluctuation in layers.items()}
    return {"top_k": top_k, "examples": len(part), "layers": results}
