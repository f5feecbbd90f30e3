"""Trainers of the transformers family on the models of a step of your own."""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pointsman.testing.trainers.case import RATE, Batch, Setting, world
from pointsman.testing.trainers.own import OfTransformers, OwnStep

Steps = Sequence[Sequence[Batch]]
"""Of each step its micro-batches."""


def loop(model: Any, batches: Sequence[Batch], max_norm: float | None = None, bf16: bool = False) -> None:
    """A plain loop: the mean of the losses of the micro-batches, one optimizer step."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for one in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**one).loss
        (loss / len(batches)).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


class Loop(OwnStep):
    """A loop of one's own, with what a model of transformers returns."""

    def __init__(self) -> None:
        super().__init__(loop)


def examples_of(steps: Steps) -> list[Batch]:
    """Every row of these micro-batches as an example."""
    return [
        {name: value[place] for name, value in one.items()}
        for batches in steps
        for one in batches
        for _ in range(world())  # each rank has the rows of its own
        for place in range(len(one["input_ids"]))
    ]


def stacked(examples: Sequence[Batch]) -> Batch:
    return {name: torch.stack([one[name] for one in examples]) for name in examples[0]}


class TransformersTrainer(OfTransformers):
    """`transformers.Trainer`."""

    name = "trainer"
    packages: Sequence[str] = ("transformers", "accelerate", "torch")

    def arguments(self, steps: Steps, setting: Setting, folder: str) -> dict[str, Any]:
        return {
            "output_dir": folder, "max_steps": len(steps), "per_device_train_batch_size": len(steps[0][0]["input_ids"]),
            "gradient_accumulation_steps": len(steps[0]), "learning_rate": RATE, "max_grad_norm": setting.max_norm or 0,
            "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False, "bf16": setting.bf16,
            "gradient_checkpointing": setting.checkpointing, "torch_compile": setting.compiled,
            "torch_compile_backend": "aot_eager" if setting.compiled else None, "remove_unused_columns": False,
            "log_level": "error",
        }  # fmt: skip

    def trainer(self, model: nn.Module, steps: Steps, setting: Setting, folder: str, **changes: Any) -> Any:
        """Reads the examples in their order, and prints nothing."""
        from transformers import PrinterCallback

        stock, arguments, data = self.parts(examples_of(steps), setting)
        in_order = {"_get_train_sampler": lambda self, *_: torch.utils.data.SequentialSampler(self.train_dataset)}
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], RATE, momentum=0.9)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        made = type(stock.__name__, (stock,), in_order)(
            model, arguments(**{**self.arguments(steps, setting, folder), **changes}),
            optimizers=(optimizer, constant), **data,
        )  # fmt: skip
        made.remove_callback(PrinterCallback)
        return made

    def parts(self, rows: list[Batch], setting: Setting) -> tuple[Any, Any, dict[str, Any]]:
        """The trainer's class, that of its arguments, and what it is given of the data."""
        from transformers import Trainer as Stock
        from transformers import TrainingArguments

        return Stock, TrainingArguments, {"train_dataset": rows, "data_collator": stacked}

    def train(self, model: nn.Module, steps: Steps, setting: Setting) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer(model, steps, setting, folder).train()

    def evaluate(self, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer(model, [batches], setting, folder).evaluate(examples_of([batches]))
        model.train()

    def interrupted(self, first: nn.Module, second: nn.Module, steps: Steps, setting: Setting, folder: str) -> None:
        saving = {"save_strategy": "steps", "save_steps": 1}
        self.trainer(first, steps, setting, folder, **{**saving, "max_steps": 1}).train()
        self.trainer(second, steps, setting, folder, **saving).train(f"{folder}/checkpoint-1")


class Accelerate(OfTransformers):
    """A loop with `accelerate`."""

    name = "accelerate"
    packages = ("accelerate", "transformers", "torch")

    def ready(self, model: Any, setting: Setting, count: int) -> tuple[Any, Any, Any]:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)  # its precision is that of the process
        GradientState._reset_state()
        precision = "bf16" if setting.bf16 else "no"
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count, mixed_precision=precision)
        if setting.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        if setting.compiled:
            model = torch.compile(model, backend="aot_eager")
        return (accelerator, *accelerator.prepare(model, optimizer))

    def step(self, accelerator: Any, model: Any, optimizer: Any, batches: Sequence[Batch], setting: Setting) -> None:
        for one in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**one).loss)
                if accelerator.sync_gradients and setting.max_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), setting.max_norm)
                optimizer.step()
                optimizer.zero_grad()

    def train(self, model: nn.Module, steps: Steps, setting: Setting) -> None:
        parts = self.ready(model, setting, len(steps[0]))
        for batches in steps:
            self.step(*parts, batches, setting)

    def interrupted(self, first: nn.Module, second: nn.Module, steps: Steps, setting: Setting, folder: str) -> None:
        parts = self.ready(first, setting, len(steps[0]))
        self.step(*parts, steps[0], setting)
        parts[0].save_state(folder)
        parts = self.ready(second, setting, len(steps[0]))
        parts[0].load_state(folder)
        for batches in steps[1:]:
            self.step(*parts, batches, setting)
