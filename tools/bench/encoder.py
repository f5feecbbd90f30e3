"""Masked language modelling: tiny-mlm against transformers' XLM-R of the same shape, and what each router costs.

    python -m tools.bench.encoder [--routers plain,switch,xmoe] [--rounds 5] [--out benchmarks/results/encoder.md]

One process, same blocks, same masks. XLM-R trains as transformers' run_mlm does: logits of every place, cross entropy
with -100 where nothing is masked, AdamW (not fused). It has no padding in its batches, as run_mlm groups texts. All
take turns in every round; a rate is the median over rounds, a ratio the median of the ratios round by round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pointsman.control import step_end
from pointsman.ops.kernels import using
from pointsman_lab.models.config import build_model
from pointsman_lab.recipes import preset
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import choose_kernels
from pointsman_lab.training.masked_language_modelling import masked_loss
from pointsman_lab.training.optimizer import build_adam, trainable
from tools.bench.decoder import measured
from tools.bench.report import machine

VOCABULARY, SPECIAL, MASK = 8192, 5, 4


def batches(config: RunConfig) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Random full blocks [B, T] with 15 % masked."""
    draw = torch.Generator().manual_seed(0)
    shape = config.batch_size, config.segment_length

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(SPECIAL, VOCABULARY, shape, generator=draw)
        masked = torch.rand(shape, generator=draw) < 0.15
        return torch.where(masked, MASK, tokens), torch.where(masked, tokens, -100)

    return batch


def ours(config: RunConfig, router: str) -> Callable[[], None]:
    """One training step of ours."""
    config = config.with_overrides({"model.router": router})
    model = build_model(config.model).train()
    optimizer = build_adam(config, trainable(model))
    batch = batches(config)

    def step() -> None:
        inputs, targets = batch()
        optimizer.zero_grad(set_to_none=True)
        masked_loss(model, inputs, targets, None, 0).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step_end(model)

    return step


def theirs(config: RunConfig) -> Callable[[], None]:
    """One training step of XLM-R of the same shape, without sparse layers."""
    import transformers

    shape: Any = config.model
    model = transformers.XLMRobertaForMaskedLM(
        transformers.XLMRobertaConfig(
            vocab_size=VOCABULARY, hidden_size=shape.dim, num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads, intermediate_size=shape.hidden_dim, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, max_position_embeddings=shape.max_length + 2, type_vocab_size=1,
            pad_token_id=1,
        )
    ).train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    batch = batches(config)

    def step() -> None:
        inputs, targets = batch()
        optimizer.zero_grad(set_to_none=True)
        model(inputs, labels=targets).loss.backward()
        optimizer.step()

    return step


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--routers", default="plain,switch,xmoe,switch+similarity,switch+attention")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--out", type=Path)
    values = words.parse_args()
    config = preset("tiny-mlm", router="plain").with_vocabulary(VOCABULARY)
    with using(choose_kernels(config, None)):
        cases = {"XLM-R (transformers)": theirs(config)}
        cases |= {router: ours(config, router) for router in values.routers.split(",")}
        times = measured(cases, values.rounds, 1)
    tokens = config.batch_size * config.segment_length
    lines = ["| model | tokens a second | ratio to XLM-R |", "|---|---|---|"]
    for name, own in times.items():
        ratio = statistics.median(peer / each for each, peer in zip(own, times["XLM-R (transformers)"], strict=True))
        lines.append(f"| {name} | {tokens / statistics.median(own):,.0f} | {ratio:.2f} |")
    of = machine()
    where = f"torch {of['torch']}, {of['processor']}, commit {str(of['commit'])[:7]}"
    head = f"tiny-mlm, k = 1, float32, threads: {torch.get_num_threads()}, rounds: {values.rounds}; {where}"
    text = "\n".join([head, "", *lines])
    print(text)
    if values.out:
        values.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
