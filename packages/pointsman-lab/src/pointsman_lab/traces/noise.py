"""What differs in one layer of two traces, and what noise of the logits predicts."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pointsman.traces.trace import MISSING, RoutingTrace


@dataclass(frozen=True)
class LayerDifference:
    """One layer of two traces, after what `Difference.kinds` names has been undone.

    Attributes:
        tokens: compared, those without a missing choice. differing: of them, the share with other experts.
        margin, margin_differing: mean distance of the k-th to the next logit, over all and over the differing tokens;
            None without logits, and where some are infinite (of experts that a token id never sees).
        predicted: the share that the noise between both traces' logits predicts; None unless both have them.
        noise: its standard deviation. spread: that of a token's logits.
    """

    tokens: int
    differing: float
    margin: float | None = None
    margin_differing: float | None = None
    predicted: float | None = None
    noise: float | None = None
    spread: float | None = None


def differing(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """[N] bool where two choices [N, k] of a layer are other sets, and where both are known."""
    return other_sets(a.sort(-1).values, b.sort(-1).values)


def other_sets(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`differing` of choices that are sorted, of any shapes [..., N, k] that broadcast."""
    known = ~((a == MISSING).any(-1) | (b == MISSING).any(-1))
    return (a != b).any(-1) & known, known


def of_layer(layer: str, a: RoutingTrace, b: RoutingTrace) -> LayerDifference:
    other, known = differing(a.experts[layer], b.experts[layer])
    tokens = int(known.sum())
    share = int(other.sum()) / max(1, tokens)
    logits = [trace.logits[layer] for trace in (a, b) if layer in trace.logits]
    k, finite = a.top_k(layer), all(bool(one[known].isfinite().all()) for one in logits)
    if not logits or not finite or k >= a.num_experts[layer] or not tokens:
        return LayerDifference(tokens, share)
    margins = _margins(logits[0], k)
    of_other = float(margins[other].mean()) if bool(other.any()) else None
    found = LayerDifference(tokens, share, float(margins[known].mean()), of_other)
    if len(logits) < 2:
        return found
    mine, its = logits
    # of two logits the difference decides: its noise, and the chance that it exceeds the margin
    noise = (its - mine)[known].double()
    noise = noise - noise.mean(-1, keepdim=True)  # a constant changes no choice
    std = float(noise.std()) if noise.numel() > 1 else 0.0
    spread = float(mine[known].double().std(-1).mean())
    return replace(found, noise=std, spread=spread, predicted=float(chances(mine[known].double(), k, std).mean()))


def _margins(logits: Tensor, k: int) -> Tensor:
    """[N]: from the k-th largest logit to the next one."""
    top = logits.double().topk(k + 1, dim=-1).values
    return top[:, k - 1] - top[:, k]


def chances(logits: Tensor, k: int, std: float) -> Tensor:
    """[N]: the chance that independent noise of this deviation on each logit changes the set of the k largest.

    Of the pairs (chosen, not chosen) the nearest four of each side are taken as independent: 1 - prod (1 - P(pair)).
    """
    if std == 0:
        return logits.new_zeros(len(logits))
    ordered = logits.sort(-1, descending=True).values
    inside, outside = ordered[:, max(0, k - 4) : k], ordered[:, k : k + 4]
    gaps = inside.unsqueeze(-1) - outside.unsqueeze(-2)  # [N, a, b]
    stays: Tensor = torch.special.ndtr(gaps / (std * math.sqrt(2))).flatten(1).prod(-1)
    return 1 - stays


def flips(a: RoutingTrace, b: RoutingTrace, bins: int = 8) -> list[dict[str, Any]]:
    """What precision does to the routing: tokens that chose other experts in `b`, by their margin in `a`.

    All layers together; margins in standard deviations of the layer's noise, in bins of as many tokens each.

    Returns:
        For each bin {"low", "high" (margins), "tokens", "flipped", "error" (of a share of independent tokens),
        "predicted"}; shares of its tokens. [] where the logits are equal or not finite.

    Raises:
        ValueError: a trace without logits.
    """
    found = []
    for layer in a.layers:
        if layer not in a.logits or layer not in b.logits:
            raise ValueError(f"layer {layer!r}: flips against margins need logits in both traces")
        other, known = differing(a.experts[layer], b.experts[layer])
        mine, k = a.logits[layer][known].double(), a.top_k(layer)
        noise = (b.logits[layer][known].double() - mine) if k < mine.shape[1] else mine[:0]
        std = float((noise - noise.mean(-1, keepdim=True)).std()) if len(noise) > 1 else 0.0
        if std > 0:  # nan: infinite logits have no margin
            found.append(torch.stack([_margins(mine, k) / std, other[known].double(), chances(mine, k, std)], 1))
    rows = torch.cat(found) if found else torch.zeros(0, 3)
    rows = rows[rows[:, 0].argsort()]
    shown = []
    for part in rows.tensor_split(min(bins, len(rows))) if len(rows) else ():
        share = float(part[:, 1].mean())
        shown.append(
            {"low": float(part[0, 0]), "high": float(part[-1, 0]), "tokens": len(part), "flipped": share,
             "error": math.sqrt(share * (1 - share) / len(part)), "predicted": float(part[:, 2].mean())}
        )  # fmt: skip
    return shown
