"""The step of a router that the balance loss causes in transformers' Trainer: run alone, or once a rank.

    python tests/library/hf/trainer_step.py OUT ours|stock

Writes OUT (a file of torch.save): {setting: the gates' step with the loss minus the step without}.
"""

import os
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

from pointsman import hf

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Rows(Dataset):  # type: ignore[type-arg]
    """64 times the same row, so that every division of a batch has the same loss."""

    def __init__(self) -> None:
        self.row = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.row, "labels": self.row}


def stepped(coefficient: float, ours: bool, batch: int, accumulation: int, average: bool) -> torch.Tensor:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    own = {} if ours else {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts_per_tok=2, use_cache=False, **own))
    if ours and coefficient:
        hf.balance(model, coefficient)
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    before = [gate.detach().clone() for gate in gates]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    settings: dict[str, Any] = {"max_steps": 1, "max_grad_norm": 0, "lr_scheduler_type": "constant", "report_to": []}
    arguments = TrainingArguments(
        "unused", per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, save_strategy="no",
        use_cpu=True, disable_tqdm=True, average_tokens_across_devices=average, logging_strategy="no",
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, constant)).train()
    return torch.cat([(old - gate.detach()).flatten() for old, gate in zip(before, gates, strict=True)])


def main(out: str, whose: str) -> None:
    found = {}
    for micro, accumulation in ((8 // WORLD, 1), (2 // WORLD, 4), (1, 8)):
        for average in (True, False):
            step = [stepped(value, whose == "ours", micro, accumulation, average) for value in (1.0, 0.0)]
            found[f"{WORLD} ranks, accumulation {accumulation}, average {average}"] = step[0] - step[1]
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
