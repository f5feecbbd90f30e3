"""The balance loss of a router: over which tokens f counts and which probabilities P averages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pointsman import auxiliary
from pointsman.routers.frame.stage_values import LossInput, Tensors
from pointsman.routers.frame.stages import Stage


class Balance(Stage):
    """E sum_i f_i P_i (`auxiliary.balance`), 1.0 at perfect balance.

    Args:
        scope: "batch": f and P over the micro-batch. "sequence": of each sequence, then the mean (DeepSeek-V3). "step":
            f over all micro-batches of the optimizer step so far, P over this one (Qiu et al. 2025, arXiv 2501.11873).
        basis: "softmax": P is the mean of softmax(logits / temperature). "scores": of s / sum s, s the router's own
            probabilities before mixing (DeepSeek-V3's sigmoids).
        temperature: see basis.
        reuse: whether the router's probabilities before mixing are that softmax.
        counted: the experts [N, j] that f counts; None: those that were chosen.
        pooled: how many of the last experts are alike: their f is their mean f (AdaMoE's null experts).
    """

    def __init__(
        self,
        *,
        scope: str = "batch",
        basis: str = "softmax",
        temperature: float = 1.0,
        reuse: bool = False,
        counted: Callable[[LossInput], Tensor] | None = None,
        pooled: int = 0,
    ) -> None:
        super().__init__()
        self.scope, self.basis, self.temperature, self.reuse = scope, basis, temperature, reuse
        self.counted, self.pooled = counted, pooled
        self.needs_step_end = scope == "step"

    def forward(self, given: LossInput) -> Tensor:
        probs, experts = self._probs(given), self._experts(given)
        if self.pooled:  # the mean of P over them gives the same sum of f_i P_i as the mean of f
            alike = probs[:, -self.pooled :].mean(-1, keepdim=True).expand(-1, self.pooled)
            probs = torch.cat([probs[:, : -self.pooled], alike], -1)
        if self.scope == "sequence":
            shape = given.batch, given.length
            mask = None if given.mask is None else given.mask.view(shape)
            return auxiliary.sequence_balance(
                _by_sequence(probs, shape), _by_sequence(experts, shape), mask, ranks=given.ranks
            )
        earlier = None
        if self.scope == "step" and self.training:
            earlier = self.sums.get("counts", torch.zeros(probs.shape[-1], dtype=torch.int64, device=probs.device))
        return auxiliary.balance(probs, experts, given.mask, earlier_counts=earlier, ranks=given.ranks)

    def statistics(self, given: LossInput) -> Tensors:
        """What `gather` is to sum."""
        if self.scope != "step" or not self.training:
            return {}
        return {"counts": auxiliary.assignment_counts(self._experts(given), given.logits.shape[-1])}

    def _probs(self, given: LossInput) -> Tensor:
        if self.basis == "scores":
            total = given.unmixed.sum(-1, keepdim=True)
            return given.unmixed / total.clamp_min(torch.finfo(total.dtype).tiny)
        return given.unmixed if self.reuse else torch.softmax(given.logits / self.temperature, -1)

    def _experts(self, given: LossInput) -> Tensor:
        if self.counted is None:
            return given.experts
        experts = self.counted(given)
        return experts if given.mask is None else experts.masked_fill(~given.mask[:, None], -1)


def _by_sequence(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    return rows.reshape(*shape, rows.shape[-1])
