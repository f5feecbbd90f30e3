"""Score, gate and selection as one kernel on a GPU (`kernels.router`), for the routers that it takes.

Those are routers whose logits are a product with the experts' weights, and whose selection is plain top-k, without a
mixer. The others go stage by stage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pointsman.kernels import router as kernel
from pointsman.ops.linear import transformed
from pointsman.routers.frame.stage_values import Selection
from pointsman.routers.frame.stages import Normalizer, Scorer, Selector, TopK
from pointsman.routing import RoutingContext


class Routed(NamedTuple):
    """Logits and probabilities [B, T, E], and the selection."""

    logits: Tensor
    probs: Tensor
    selection: Selection


def route(
    stages: tuple[Scorer, Normalizer, Selector], num_experts: int, top_k: int, hidden: Tensor, context: RoutingContext
) -> Routed | None:
    """hidden [B, T, dim]; None where the stages are to be run one after the other."""
    if not kernel.wanted(hidden, num_experts, top_k):
        return None
    score, normalize, select = stages
    gate = normalize.gate_and_scale() if type(select) is TopK else None
    if gate is None or transformed() or torch.compiler.is_exporting() or not hidden.numel():
        return None
    product = score.product(hidden, context)
    if product is None:
        return None
    rows, weight, bias = product
    if not {type(one) for one in (rows, weight, bias) if one is not None} <= {Tensor, Parameter}:
        return None  # sharded over processes
    found = kernel.route(rows.reshape(-1, rows.shape[-1]), weight, bias, *gate, top_k, bool(select.renormalize))
    if found is None:
        return None
    logits, probs, experts, weights = found
    shape = (*hidden.shape[:2], -1)
    return Routed(logits.view(shape), probs.view(shape), Selection(experts, weights))
