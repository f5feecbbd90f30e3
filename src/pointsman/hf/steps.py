"""step_end for transformers' Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from pointsman.control import step_end


class StepEnd(TrainerCallback):
    """`Trainer(…, callbacks=[StepEnd()])`: norms kept and running means taken over after each optimizer step.

    For routers with such a state: `xmoe`, and `+attention` with its default choice of heads.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        assert model is not None
        step_end(model)
