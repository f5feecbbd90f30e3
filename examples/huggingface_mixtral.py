"""A small Mixtral, trained with transformers' Trainer, audited, given a HyperRouter, trained on and exported.

    python examples/huggingface_mixtral.py           # a minute on an idle CPU core, under five on a busy one
    POINTSMAN_DATA=path/to/data python examples/huggingface_mixtral.py --data enwik8 --steps 300

Needs `pip install 'pointsman[hf]'`. Everything lands in ./huggingface-example.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import pointsman
from pointsman import hf
from pointsman_lab.data.corpus import open_corpus


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def small_mixtral(vocabulary: int, layers: int = 3) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        pad_token_id=0,
        eos_token_id=1,
        experts_implementation="pointsman",  # the fast experts; from_pretrained takes it, too
    )
    return MixtralForCausalLM(config)


def rows(tokenizer: Any, text: str, length: int = 128) -> list[dict[str, torch.Tensor]]:
    ids = torch.from_numpy(np.array(tokenizer(text)["input_ids"]))
    ids = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(
    model: Any, data: list[dict[str, torch.Tensor]], out: Path, steps: int, *callbacks: TrainerCallback, **changes: Any
) -> None:
    settings = {
        "per_device_train_batch_size": 16,
        "learning_rate": 2e-3,
        "warmup_steps": 20,
        "lr_scheduler_type": "cosine",
        "logging_steps": 25,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    arguments = TrainingArguments(output_dir=str(out), max_steps=steps, **{**settings, **changes})
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[*callbacks, hf.StepEnd()]).train()


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--data", default="stdlib")
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--router", default="hyperrouter")
    flags.add_argument("--out", type=Path, default=Path("huggingface-example"))
    values = flags.parse_args()
    torch.manual_seed(0)

    corpus = open_corpus(values.data)
    text = {part: corpus.vocabulary.decode(corpus.split(part)[:2_000_000]) for part in ("train", "test")}
    tokenizer = byte_tokenizer()
    data = rows(tokenizer, text["train"])
    folder = values.out / "mixtral"

    # 1. A mixture of experts in transformers' Trainer, with a balance loss per layer in place of the class's own.
    model = small_mixtral(len(tokenizer))
    hf.balance(model)
    train(model, data, values.out / "trainer", values.steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    # 2. Is it healthy, and how few experts does it need?
    audit = hf.audit(model, tokenizer, [text["test"]], top_k=[1, 2, 4, 8], max_tokens=20_000, length=128)
    audit.save(values.out / "audit", data=values.data)
    print(audit.markdown())

    # 3. A better router, in place. The first forward is the old one's.
    inputs = data[0]["input_ids"][None].to(model.device)
    with torch.no_grad():
        before = model.eval()(inputs).logits
        pointsman.hf.replace_routers(model, values.router)
        after = model(inputs).logits
    print(f"largest difference right after replace_routers: {float((after - before).abs().max()):.1e}")
    train(model.train(), data, values.out / "trainer", values.steps // 2)
    model.save_pretrained(values.out / "with-router")
    again = AutoModelForCausalLM.from_pretrained(values.out / "with-router").to(model.device)
    with torch.no_grad():
        assert torch.allclose(again(inputs).logits, model.eval()(inputs).logits, atol=1e-4)

    # 4. What did the router change? Both checkpoints on the same text.
    old = AutoModelForCausalLM.from_pretrained(folder).to(model.device)
    change = hf.audit(model, tokenizer, [text["test"]], top_k=[2], against=old, max_tokens=20_000, length=128)
    print("\n".join(change.findings()))

    # 5. Serve it with one expert, inside generate.
    with pointsman.set_top_k(model, 1):
        tokens = model.generate(inputs[:, :32], max_new_tokens=60, do_sample=False, pad_token_id=0)
    print(tokenizer.decode(tokens[0]))

    # 6. Back to the class's own gate: loads in stock transformers, and in what reads its checkpoints.
    hf.materialize(model)
    model.save_pretrained(values.out / "plain")
    print(f"\nthe page: pointsman report {values.out / 'audit'}")


if __name__ == "__main__":
    main()
