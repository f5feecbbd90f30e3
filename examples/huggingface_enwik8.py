"""A Mixtral of 3.4 million parameters on enwik8 with Trainer; then trained on, with another router and without.

    POINTSMAN_DATA=path/to/data python examples/huggingface_enwik8.py train --out hf-mixtral
    POINTSMAN_DATA=path/to/data python examples/huggingface_enwik8.py continue hf-mixtral --router hyperrouter
    pointsman audit hf-mixtral --data enwik8 --length 256 --out hf-audit && pointsman report hf-audit

Needs `pip install 'pointsman[hf,report]'` and enwik8 (docs/data.md). `train` takes six and a half
minutes of one CPU core.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
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

LENGTH = 256
BATCH = 16


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def small_mixtral(vocabulary: int) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
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


def rows(tokenizer: Any, text: str) -> list[dict[str, torch.Tensor]]:
    ids = torch.from_numpy(np.array(tokenizer(text)["input_ids"]))
    ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in ids]


@torch.no_grad()
def bits_per_byte(model: Any, data: list[dict[str, torch.Tensor]]) -> float:
    """Without the balance loss, which Mixtral adds to the loss it returns while training."""
    training = model.training
    model.eval()
    losses = []
    for start in range(0, len(data), BATCH):
        ids = torch.stack([row["input_ids"] for row in data[start : start + BATCH]]).to(model.device)
        logits = model(ids, use_cache=False, output_router_logits=False).logits
        losses.append(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"))
    model.train(training)
    return float(torch.cat(losses).mean()) / math.log(2)


class Valid(TrainerCallback):
    """Prints bits per byte of held-out text; the rows go to `log`."""

    def __init__(self, data: list[dict[str, torch.Tensor]], every: int) -> None:
        self.data, self.every = data, every
        self.start = time.process_time()
        self.log: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            row = {"step": state.global_step, "valid": bits_per_byte(model, self.data)}
            self.log.append({**row, "cpu_seconds": round(time.process_time() - self.start, 1)})
            print(f"step {state.global_step}: {row['valid']:.3f} bits a byte on held-out text", flush=True)


def train_on(model: Any, text: dict[str, Any], out: Path, steps: int, learning_rate: float, seed: int) -> list[Any]:
    valid = Valid(text["valid"], every=100)
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=learning_rate,
        warmup_steps=min(100, steps // 10),
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    Trainer(model=model, args=arguments, train_dataset=text["train"], callbacks=[valid, hf.StepEnd()]).train()
    return valid.log


def read(tokenizer: Any, name: str, start: int, tokens: int) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Rows of `train` from byte `start` on, and the first ones of `valid`."""
    corpus = open_corpus(name)
    train_ids, valid_ids = corpus.split("train")[start : start + tokens], corpus.split("valid")[: 100 * LENGTH]
    parts = {"train": corpus.vocabulary.decode(train_ids), "valid": corpus.vocabulary.decode(valid_ids)}
    return {part: rows(tokenizer, text) for part, text in parts.items()}


def first_training(values: argparse.Namespace) -> None:
    tokenizer = byte_tokenizer()
    model = small_mixtral(len(tokenizer))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    if values.balance == "pointsman":
        hf.balance(model)
    text = read(tokenizer, values.data, 0, values.steps * BATCH * LENGTH)
    log = train_on(model, text, values.out, values.steps, 3e-3, values.seed)
    model.save_pretrained(values.out)
    tokenizer.save_pretrained(values.out)
    (values.out / "training.json").write_text(json.dumps(log, indent=1))


def continued(values: argparse.Namespace) -> None:
    """The same model, data, order and learning rate; once with its own gates, once with the router."""
    tokenizer = AutoTokenizer.from_pretrained(values.model)
    text = read(tokenizer, values.data, values.start, values.steps * BATCH * LENGTH)
    found = {}
    for name in ("own", values.router):
        model = AutoModelForCausalLM.from_pretrained(values.model, experts_implementation="pointsman")
        out = Path(f"{values.model}-{name.replace('+', '-')}")
        if name != "own":
            hf.replace_routers(model, name)
        log = train_on(model, text, out, values.steps, 1e-3, values.seed)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        found[name] = (log, {})
        for k in (1, 2, 4, 8):
            with pointsman.set_top_k(model, k):
                found[name][1][k] = bits_per_byte(model, text["valid"])
    print("\n| router | before | after | k = 1 | k = 4 | k = 8 | CPU seconds |\n|---|---|---|---|---|---|---|")
    for name, (log, at) in found.items():
        cells = " | ".join(f"{value:.3f}" for value in (log[0]["valid"], at[2], at[1], at[4], at[8]))
        print(f"| {name} | {cells} | {log[-1]['cpu_seconds']:.0f} |")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = flags.add_subparsers(required=True)
    first = commands.add_parser("train")
    first.add_argument("--out", type=Path, default=Path("hf-mixtral"))
    first.add_argument("--balance", choices=("own", "pointsman"), default="own", help="the class's loss, or hf.balance")
    first.set_defaults(run=first_training, steps=1000)
    more = commands.add_parser("continue")
    more.add_argument("model")
    more.add_argument("--router", default="hyperrouter")
    more.add_argument("--start", type=int, default=8_000_000, help="the first byte of the training text")
    more.set_defaults(run=continued, steps=200)
    for one in (first, more):
        one.add_argument("--data", default="enwik8")
        one.add_argument("--steps", type=int, default=one.get_default("steps"))
        one.add_argument("--seed", type=int, default=0)
    values = flags.parse_args()
    torch.manual_seed(values.seed)
    values.run(values)


if __name__ == "__main__":
    main()
