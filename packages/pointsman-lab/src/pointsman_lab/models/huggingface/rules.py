"""What a router computes, in the terms of transformers' gates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pointsman.routers.frame.router import Router
from pointsman.routers.frame.stages import Sigmoid, Softmax, TopK
from pointsman.routers.papers.loss_free import BiasedTopK


@dataclass(frozen=True)
class GateRule:
    """scores = softmax or sigmoid of W h; the top-k of scores + correction in the best groups; weights = scores.

    Attributes:
        kind: of the scores.
        renormalize: whether the k weights are divided by their sum.
        scale: factor of the weights.
        groups, kept: in how many equal runs the experts lie, and from how many best ones a token may choose.
        corrected: whether a correction bias other than 0 takes part in the choice.
    """

    kind: Literal["softmax", "sigmoid"]
    renormalize: bool
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    corrected: bool = False

    @property
    def spec(self) -> str:
        """The spec of the router that follows this rule."""
        options = ["bias=false"] if self.kind == "softmax" else []
        if self.groups > 1:
            options += [f"groups={self.groups}", f"kept={self.kept}"]
        if not self.renormalize:
            options.append("renormalize=false")
        if self.scale != 1:
            options.append(f"scale={self.scale:g}")
        return ":".join(["smoe" if self.kind == "softmax" else "loss-free", *options])

    @property
    def plain(self) -> bool:
        """Whether the choice is the top-k of all scores."""
        return self.groups == 1 and not self.corrected


@dataclass(frozen=True)
class GateWeights:
    """W [E, dim] and the correction bias [E] of a gate."""

    weight: Tensor
    correction: Tensor


def gate_of(router: Router) -> tuple[GateRule, GateWeights]:
    """The rule and the weights of a gate that routes as `router` does in evaluation.

    Raises:
        ValueError: no gate of transformers does; says why, without the layer.
    """
    where = f"the router {router.spec!r}"
    if router.mix is not None:
        raise ValueError(f"{where} mixes tokens, and no class does")
    if router.capacity is not None:
        raise ValueError(f"{where} drops tokens (capacity), and no class does")
    with torch.no_grad():
        plain = router.score.plain_linear()
    if plain is None:
        raise ValueError(f"{where} has scores that no linear gate gives")
    weight, bias = plain
    if bias is not None and bool(bias.any()):
        raise ValueError(f"{where} has a bias, and no class's gate has one: train with bias=false")
    kind: Literal["softmax", "sigmoid"]
    if isinstance(router.normalize, Softmax):
        kind = "softmax"
    elif isinstance(router.normalize, Sigmoid):
        kind = "sigmoid"
    else:
        raise ValueError(f"{where} normalizes its scores as no class does")
    select: Any = router.select
    correction = torch.zeros(router.num_experts)
    if type(select) is TopK:
        rule = GateRule(kind, bool(select.renormalize), router.scale)
    elif type(select) is BiasedTopK:
        if select.groups > 1 and select.group_score != "top2":
            raise ValueError(f"{where} has group_score={select.group_score}, and the classes have top2")
        kept = max(select.kept, math.ceil(router.top_k * select.groups / router.num_experts))
        correction = select.bias.detach().float().cpu()
        rule = GateRule(kind, bool(select.renormalize), router.scale, select.groups, kept, bool(correction.any()))
        if rule.groups == rule.kept:
            rule = replace(rule, groups=1, kept=1)
    else:
        raise ValueError(f"{where} selects experts as no class does")
    return rule, GateWeights(weight.detach(), correction)
