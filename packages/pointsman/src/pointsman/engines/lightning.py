"""Callbacks for Lightning: `Trainer(callbacks=[StepEnd(), RoutingLog(every=50)])`, for any model with routers."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch.callbacks import Callback

from pointsman._values import check_whole
from pointsman.diagnostics.monitor import RoutingMonitor, scalars
from pointsman.engines.common import step_end


class StepEnd(Callback):
    """Calls `pointsman.step_end` after each optimizer step: norms kept, running statistics, biases of `loss-free`.

    What the routers counted is added up over all processes.
    """

    def __init__(self) -> None:
        self.steps = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.global_step != self.steps:
            self.steps = trainer.global_step
            step_end(module)


class RoutingLog(Callback):
    """Logs what each layer's routing does with the module's own `log_dict`, for whatever logger runs.

    At every N-th batch six numbers a layer (`pointsman.diagnostics.scalars`): entropy, coefficient of variation of the
    load, experts without a token, largest share, dropped tokens, scale of the logits; where a bias enters the choice
    also the load without it. They are of this process's tokens since the last ones.

    Args:
        every: N, in batches.
    """

    def __init__(self, every: int = 50) -> None:
        check_whole("RoutingLog: every", every)
        self.every = every
        self.monitor: RoutingMonitor | None = None
        self.observing = ExitStack()

    def on_train_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
        if self.monitor is None:
            self.monitor = RoutingMonitor(module, self.every)
        self.observing.close()
        self.observing.enter_context(self.monitor.observe(trainer.fit_loop.total_batch_idx + 1))

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        self.observing.close()
        assert self.monitor is not None
        if values := scalars(self.monitor.rows()):
            module.log_dict(values)

    def on_train_end(self, trainer: Any, module: Any, *exception: BaseException) -> None:
        self.observing.close()
        self.monitor = None

    on_exception = on_train_end  # type: ignore[assignment]
