"""For transformers' Trainer: step_end after each step, and what the routing does for whatever tracker runs."""

from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from pointsman._values import check_whole
from pointsman.control import added_up, step_end
from pointsman.diagnostics.monitor import RoutingMonitor, scalars
from pointsman.hf.balance import moved
from pointsman.ranks import every_rank


class StepEnd(TrainerCallback):
    """`Trainer(…, callbacks=[StepEnd()])` calls `pointsman.step_end` after each optimizer step.

    Routers that update state outside the optimizer need it: norms (`xmoe`), running means (`+attention`), biases. What
    they counted is added over the ranks; where these ran other layers it does not count, with a warning. It also moves
    the biases of `balance(how="bias")` where no optimizer of torch steps the model's own tensors (DeepSpeed's ZeRO).
    """

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        assert model is not None
        moved(model)
        step_end(model, added_up(model, every_rank()))


class RoutingLog(TrainerCallback):
    """`trainer.add_callback(RoutingLog(trainer))` logs what each layer's routing does, with the trainer's own `log`.

    Six numbers a layer at every N-th step (`pointsman.diagnostics.scalars`): entropy, coefficient of variation of the
    load, experts without a token, largest share, dropped tokens, scale of the logits; of balanced biases also the load
    without the bias. They are of this process's tokens since the last ones, without padding. For any mixture of experts
    whose gates `pointsman.hf` knows.

    Args:
        every: N; None: the trainer's `logging_steps`.
    """

    def __init__(self, trainer: Trainer, every: int | None = None) -> None:
        self.trainer = trainer
        check_whole("RoutingLog: every", 1 if every is None else every)
        self.every = every
        self.monitor: RoutingMonitor | None = None
        self.observing = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        assert model is not None
        if self.monitor is None:
            self.monitor = RoutingMonitor(model, self.every or max(1, int(state.logging_steps)))
        self.observing.close()
        self.observing.enter_context(self.monitor.observe(state.global_step + 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.observing.close()
        assert self.monitor is not None
        if values := scalars(self.monitor.rows()):
            asked = control.should_log
            self.trainer.log(values)
            control.should_log = asked  # for the trainer's own values, which come after: a log takes it back

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.observing.close()
        self.monitor = None
