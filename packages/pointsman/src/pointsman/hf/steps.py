"""step_end for transformers' Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from pointsman.control import step_end
from pointsman.hf.balance import moved
from pointsman.hf.bias import add_up


class StepEnd(TrainerCallback):
    """`Trainer(…, callbacks=[StepEnd()])` calls `pointsman.step_end` after each optimizer step.

    Routers that update state outside the optimizer need it: norms (`xmoe`), running means (`+attention`), biases. What
    they counted is added over the ranks. It also moves the biases of `balance(how="bias")` where no optimizer of torch
    steps the model's own tensors (DeepSpeed's ZeRO).
    """

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        assert model is not None
        moved(model)
        step_end(model, add_up)
