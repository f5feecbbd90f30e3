"""TRL, PEFT, Lightning and DeepSpeed on the models of `loops`."""

# mypy: disable-error-code="no-any-return"
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.testing.trainers.case import RATE, VOCABULARY, Batch, NotApplicable, Setting, world
from pointsman.testing.trainers.own import OfTransformers
from pointsman_lab.checks.loops import Steps, TransformersTrainer, stacked


class Trl(TransformersTrainer):
    """TRL's `SFTTrainer`, its data given as tensors."""

    name = "trl"
    packages = ("trl", "transformers", "accelerate", "torch")

    def parts(self, rows: list[Batch], setting: Setting) -> tuple[Any, Any, dict[str, Any]]:
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        words: Any = {f"w{place}": place for place in range(VOCABULARY)}
        tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
        )
        data = {
            "train_dataset": Dataset.from_list([{name: one.tolist() for name, one in row.items()} for row in rows]),
            "data_collator": lambda some: stacked([{k: torch.tensor(v) for k, v in one.items()} for one in some]),
            "processing_class": tokenizer,
        }
        own = {"router_aux_loss_coef": setting.coefficient, "dataset_kwargs": {"skip_prepare_dataset": True}}
        return SFTTrainer, partial(SFTConfig, **own), data


class Peft(TransformersTrainer):
    """PEFT's LoRA on the experts' weights, the gate trained whole, in `transformers.Trainer`."""

    name = "peft"
    packages = ("peft", "transformers", "accelerate", "torch")

    def finished(self, model: nn.Module, setting: Setting) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        if setting.bias:
            raise NotApplicable("LoRA leaves the gate's bias as it is")
        config = LoraConfig(
            r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            modules_to_save=["gate"], init_lora_weights=False,
        )  # fmt: skip
        return get_peft_model(model, config)

    def layers(self, model: Any) -> Any:
        return model.base_model.model.model.layers

    def gates(self, model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
        found = [layer.mlp.gate.modules_to_save["default"] for layer in self.layers(model)]
        return [(gate, gate.weight) for gate in found]

    def experts(self, model: nn.Module) -> list[Tensor]:
        """The experts' weights with what LoRA adds."""
        experts = self.layers(model)[0].mlp.experts
        found = []
        while hasattr(experts, "base_layer"):
            found.append(experts.get_param().detach() + experts.get_delta_weight("default").detach())
            experts = experts.base_layer
        return found


class Lightning(OfTransformers):
    """Lightning's `Trainer`."""

    name = "lightning"
    packages = ("lightning", "transformers", "torch")

    def fitted(self, model: nn.Module, steps: Steps, setting: Setting, **changes: Any) -> Any:
        import logging

        from lightning.fabric.plugins.environments.lightning import LightningEnvironment
        from lightning.pytorch import LightningModule
        from lightning.pytorch import Trainer as Stock
        from lightning.pytorch.strategies import DDPStrategy
        from torch.utils.data import DataLoader

        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model.train()
                self.called: Any = torch.compile(model, backend="aot_eager") if setting.compiled else model

            def training_step(self, one: Batch, place: int) -> Tensor:
                return self.called(**one).loss

            validation_step = training_step

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(model.parameters(), RATE, momentum=0.9)

        if setting.checkpointing:
            ready: Any = model
            ready.gradient_checkpointing_enable({"use_reentrant": False})
        batches = [one for step in steps for one in step]
        settings: dict[str, Any] = {
            "accelerator": "cpu", "max_steps": len(steps), "accumulate_grad_batches": len(steps[0]), "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "gradient_clip_val": setting.max_norm, "precision": "bf16-mixed" if setting.bf16 else "32-true",
            "use_distributed_sampler": False, "num_sanity_val_steps": 0,
        }  # fmt: skip
        if world() > 1:
            gloo = DDPStrategy(process_group_backend="gloo", cluster_environment=LightningEnvironment())
            settings["strategy"] = gloo
        trainer = Stock(devices=world(), **{**settings, **changes})
        return trainer, Module(), DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def train(self, model: nn.Module, steps: Steps, setting: Setting) -> None:
        trainer, module, data = self.fitted(model, steps, setting)
        trainer.fit(module, data)

    def evaluate(self, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> None:
        trainer, module, data = self.fitted(model, [batches], setting)
        trainer.validate(module, data, verbose=False)
        model.train()

    def interrupted(self, first: nn.Module, second: nn.Module, steps: Steps, setting: Setting, folder: str) -> None:
        file = os.path.join(folder, "one.ckpt")
        trainer, module, data = self.fitted(first, steps, setting, max_steps=1)
        trainer.fit(module, data)
        trainer.save_checkpoint(file)
        later = [*steps[1:], *steps[1:]]  # where it begins again in the data is not the router's matter
        trainer, module, data = self.fitted(second, later, setting, max_steps=len(steps))
        trainer.fit(module, data, ckpt_path=file)


class DeepSpeed(OfTransformers):
    """DeepSpeed's engine on a CPU, without ZeRO, with its own accumulation and clipping."""

    name = "deepspeed"
    packages = ("deepspeed", "transformers", "torch")

    def engine(self, model: Any, batches: Sequence[Batch], setting: Setting) -> Any:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        usual = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        os.environ |= {**usual, **os.environ}
        import deepspeed

        if setting.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows = len(batches[0]["input_ids"])
        config = {
            "train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": len(batches),
            "train_batch_size": rows * len(batches) * world(), "gradient_clipping": setting.max_norm or 0.0,
            "bf16": {"enabled": False}, "torch_autocast": {"enabled": setting.bf16, "dtype": "bfloat16"},
            "steps_per_print": 10**9, "zero_optimization": {"stage": 0},
        }  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=None)[0]
        if setting.compiled:
            engine.compile(backend="aot_eager")
        return engine

    def steps(self, engine: Any, steps: Steps) -> None:
        for batches in steps:
            for one in batches:
                engine.backward(engine(**one).loss)
                engine.step()

    def train(self, model: nn.Module, steps: Steps, setting: Setting) -> None:
        self.steps(self.engine(model, steps[0], setting), steps)

    def interrupted(self, first: nn.Module, second: nn.Module, steps: Steps, setting: Setting, folder: str) -> None:
        engine = self.engine(first, steps[0], setting)
        self.steps(engine, steps[:1])
        engine.save_checkpoint(folder)
        engine = self.engine(second, steps[0], setting)
        engine.load_checkpoint(folder)
        self.steps(engine, steps[1:])
