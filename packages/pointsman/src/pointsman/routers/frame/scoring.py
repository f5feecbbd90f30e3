"""Router scores: linear, and extended by a choice."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops.linear import HALF
from pointsman.routers.frame.stages import Scorer


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., dim] times weight [E, dim] transposed, plus bias [E]: [..., E], in at least float32.

    Args:
        hidden: of any precision; upcast to at least float32, like weight and bias.
    """
    dtype = torch.float32 if hidden.dtype in HALF else hidden.dtype
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return F.linear(hidden.to(dtype), weight, bias)


def extended(scorer: Scorer, extension: Any) -> Any:
    """The scorer, in place, with the methods of `extension` before those of its own class.

    So a choice adds noise, responses or thresholds to whatever scores it is given; the names of the scorer's parameters
    stay as they are.
    """
    for flag in ("needs_step_end", "training_stochastic"):  # where the scorer has its own of that name
        setattr(scorer, flag, getattr(scorer, flag) or getattr(extension, flag))
    own: Any = type(scorer)
    scorer.__class__ = _both(extension, own)
    return scorer


@cache
def _both(extension: Any, own: Any) -> type[Scorer]:
    def reduced(self: Scorer, protocol: int) -> tuple[Any, ...]:
        return _blank, (extension, own), self.__dict__  # pickle cannot look the class up by its name

    members = {
        "__module__": extension.__module__, "__doc__": extension.__doc__, "__reduce_ex__": reduced,
        "accepts_half": extension.accepts_half and own.accepts_half, "needs": extension.needs | own.needs,
    }  # fmt: skip
    if "plain_linear" not in extension.__dict__:  # the logits alone are not all that the choice needs
        members["plain_linear"] = Scorer.plain_linear
    return type(f"{extension.__name__}{own.__name__}", (extension, own), members)


def _blank(extension: Any, own: Any) -> Scorer:
    both: Any = _both(extension, own)
    return both.__new__(both)  # type: ignore[no-any-return]
