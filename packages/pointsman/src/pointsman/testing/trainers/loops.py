"""Trainers of the transformers family, and a step of your own, on a tiny Mixtral or DeepSeek-V3."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pointsman.testing.trainers.case import (
    BIAS_RATE,
    DIM,
    RATE,
    VOCABULARY,
    Batch,
    NotApplicable,
    Setting,
    Trainer,
    world,
)

Step = Callable[..., object]


class OfTransformers(Trainer):
    """A trainer of models of transformers."""

    packages: Sequence[str] = ("transformers", "torch")

    def model(self, setting: Setting) -> nn.Module:
        """Mixtral with its own loss or with `hf.balance`; DeepSeek-V3 where a bias is asked for."""
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

        from pointsman import hf

        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": DIM, "intermediate_size": 16, "num_hidden_layers": setting.layers,
            "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": setting.k, "use_cache": False,
            "max_position_embeddings": 64,
        }  # fmt: skip
        torch.manual_seed(0)
        model: Any
        if setting.bias:
            model = DeepseekV3ForCausalLM(
                DeepseekV3Config(
                    **sizes, moe_intermediate_size=16, n_routed_experts=setting.experts, n_group=1, topk_group=1,
                    n_shared_experts=1, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
                    qk_nope_head_dim=8, v_head_dim=8,
                )
            )  # fmt: skip
        else:
            own: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": setting.coefficient}
            asked = own if setting.balance == "own" and setting.coefficient else {}
            model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=setting.experts, **asked))
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 0.05  # a part that all tokens share, for collapsed layers
            for place, layer in enumerate(model.model.layers):
                gate = layer.mlp.gate.weight
                gate.mul_(10)
                if setting.layers > 1:
                    gate[place % setting.experts, 0] += 1.0  # every layer prefers another expert
        if setting.balance == "pointsman" and (setting.coefficient or setting.bias):
            import logging

            said = logging.getLogger("pointsman.hf")
            level = said.level
            said.setLevel(logging.ERROR)
            hf.balance(model, BIAS_RATE if setting.bias else setting.coefficient, "bias" if setting.bias else "loss")
            said.setLevel(level)
        return self.finished(model, setting).train()

    def finished(self, model: nn.Module, setting: Setting) -> nn.Module:
        return model

    def layers(self, model: Any) -> Any:
        return model.model.layers

    def gates(self, model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
        return [(layer.mlp.gate, layer.mlp.gate.weight) for layer in self.layers(model)]

    def experts(self, model: nn.Module) -> list[Tensor]:
        experts = self.layers(model)[0].mlp.experts
        return [experts.gate_up_proj, experts.down_proj]

    def biases(self, model: nn.Module) -> list[Tensor]:
        return [layer.mlp.gate.e_score_correction_bias for layer in self.layers(model)]


def prepared(model: Any, setting: Setting) -> Any:
    """The model as a plain loop makes it ready: checkpointing, compilation, DistributedDataParallel."""
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if world() > 1 and dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    return torch.compile(model, backend="aot_eager") if setting.compiled else model


class OwnStep(OfTransformers):
    """`step(model, batches)`: one optimizer step on a list of micro-batches.

    A step that also takes `max_norm` or `bf16` is asked for clipping or mixed precision.
    """

    starts_group = True

    def __init__(self, step: Step, name: str = "") -> None:
        self.step, self.name = step, name or getattr(step, "__name__", "step")
        self.words = inspect.signature(step).parameters

    def train(self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting) -> None:
        asked = {"max_norm": setting.max_norm, "bf16": setting.bf16 or None}
        given = {name: value for name, value in asked.items() if value is not None}
        free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self.words.values())
        for name in given:
            if name not in self.words and not free:
                raise NotApplicable(f"the step takes no {name}")
        ready = prepared(model, setting)
        for batches in steps:
            self.step(ready, batches, **given)


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


class Rows(torch.utils.data.Dataset[Batch]):
    """Every row of these micro-batches as an example."""

    def __init__(self, steps: Sequence[Sequence[Batch]]) -> None:
        parts = [one for batches in steps for one in batches]
        self.rows = [
            {name: value[place] for name, value in one.items()}
            for one in parts
            for _ in range(world())  # each rank has the rows of its own
            for place in range(len(one["input_ids"]))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Batch:
        return self.rows[place]


def quiet(trainer: Any) -> Any:
    """A trainer of transformers that prints nothing."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def stacked(examples: Sequence[Batch]) -> Batch:
    return {name: torch.stack([one[name] for one in examples]) for name in examples[0]}


class TransformersTrainer(OfTransformers):
    """`transformers.Trainer`."""

    name = "trainer"
    packages: Sequence[str] = ("transformers", "accelerate", "torch")

    def arguments(self, steps: Sequence[Sequence[Batch]], setting: Setting, folder: str) -> dict[str, Any]:
        return {
            "output_dir": folder, "max_steps": len(steps), "per_device_train_batch_size": len(steps[0][0]["input_ids"]),
            "gradient_accumulation_steps": len(steps[0]), "learning_rate": RATE, "max_grad_norm": setting.max_norm or 0,
            "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False, "bf16": setting.bf16,
            "gradient_checkpointing": setting.checkpointing, "torch_compile": setting.compiled,
            "torch_compile_backend": "aot_eager" if setting.compiled else None, "remove_unused_columns": False,
            "log_level": "error",
        }  # fmt: skip

    def trainer(
        self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting, folder: str, **changes: Any
    ) -> Any:
        from transformers import Trainer as Stock
        from transformers import TrainingArguments

        return quiet(
            self.ordered(Stock)(
                model,
                TrainingArguments(**{**self.arguments(steps, setting, folder), **changes}),
                train_dataset=Rows(steps),
                data_collator=stacked,
                optimizers=self.optimizers(model),
            )
        )

    def optimizers(self, model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], RATE, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def ordered(self, stock: Any) -> Any:
        """The class, which reads the examples in their order."""
        order = {"_get_train_sampler": lambda self, *_: torch.utils.data.SequentialSampler(self.train_dataset)}
        return type(stock.__name__, (stock,), order)

    def train(self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer(model, steps, setting, folder).train()

    def evaluate(self, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer(model, [batches], setting, folder).evaluate(Rows([batches]))
        model.train()

    def resumed(self, steps: Sequence[Sequence[Batch]], setting: Setting) -> tuple[nn.Module, nn.Module]:
        whole, first, second = (self.model(setting) for _ in range(3))
        self.train(whole, steps, setting)
        saving = {"save_strategy": "steps", "save_steps": 1}
        with tempfile.TemporaryDirectory() as folder:
            self.trainer(first, steps, setting, folder, **{**saving, "max_steps": 1}).train()
            self.trainer(second, steps, setting, folder, **saving).train(f"{folder}/checkpoint-1")
        return whole, second


class Accelerate(OfTransformers):
    """A loop with `accelerate`."""

    name = "accelerate"
    packages = ("accelerate", "transformers", "torch")

    def ready(self, model: Any, setting: Setting, count: int) -> tuple[Any, Any, Any]:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)  # its precision is that of the process
        GradientState._reset_state()
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=count, mixed_precision="bf16" if setting.bf16 else "no"
        )
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

    def train(self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting) -> None:
        parts = self.ready(model, setting, len(steps[0]))
        for batches in steps:
            self.step(*parts, batches, setting)

    def resumed(self, steps: Sequence[Sequence[Batch]], setting: Setting) -> tuple[nn.Module, nn.Module]:
        whole, first, second = (self.model(setting) for _ in range(3))
        self.train(whole, steps, setting)
        with tempfile.TemporaryDirectory() as folder:
            parts = self.ready(first, setting, len(steps[0]))
            self.step(*parts, steps[0], setting)
            parts[0].save_state(folder)
            parts = self.ready(second, setting, len(steps[0]))
            parts[0].load_state(folder)
            for batches in steps[1:]:
                self.step(*parts, batches, setting)
        return whole, second
