"""Token ids for the routers that look at them (hash, stable, mask)."""

from __future__ import annotations

import torch
from torch import Tensor

from pointsman.routing import RoutingContext


def checked_ids(router: str, vocab_size: int, context: RoutingContext) -> Tensor:
    """The context's token ids [B, T]; 0 for padding.

    Raises:
        ValueError: an id outside 0 to `vocab_size` - 1; `router` is named. On a GPU, which would have to be waited for,
            and under torch.compile the look-up itself raises.
    """
    ids = context.token_ids
    assert ids is not None  # `needs` was checked
    if context.padding_mask is not None:
        ids = ids.masked_fill(~context.padding_mask, 0)
    looked_at = ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling()
    if looked_at and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"{router}: a token id is outside 0 to {vocab_size - 1}, the ids of the table")
    return ids
