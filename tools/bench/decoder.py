"""tiny-decoder with smoe against transformers' Mixtral of the same shape: a training step, and generation.

    python -m tools.bench.decoder [--case training|generation] [--rounds 9] [--clock wall|processor] [--bound]
        [--peers eager,grouped_mm,batched_mm] [--out benchmarks/results/decoder.md]

One process, same tokens, same optimizer (fused Adam, as in both trainers). All take turns in every round; a rate is
the median over rounds, a ratio the median of the ratios round by round to the fastest of transformers' expert
implementations.
Generation is greedy, 64 tokens after 32, with a cache: ours by `generate`, Mixtral by its `generate`, and by a bare
loop of forwards with its cache, which does less than its `generate`.

`--clock processor` measures this process's processor time, on one thread: other programs on the machine then matter
little. `--bound` adds Mixtral with experts that cost their matrix products and nothing else, neither gathering,
activations nor sums: what faster experts alone could reach.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.control import step_end
from pointsman.ops.kernels import using
from pointsman_lab.data.vocabulary import Vocabulary  # noqa: F401 - imported before anything is timed
from pointsman_lab.models import Decoder
from pointsman_lab.recipes import preset
from pointsman_lab.tasks.language_modelling.generation import Sampling, generate
from pointsman_lab.training.kernels import choose_kernels
from tools.bench.report import machine

EXPERTS = ("eager", "grouped_mm", "batched_mm")
VOCABULARY = 205
PROMPT, NEW = 32, 64
BOUND = "experts at the cost of their products"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def mixtral(config: Any, experts: str) -> Any:
    """Mixtral of the same shape: its attention has no query-key norm."""
    import transformers

    settings = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=config.dim, intermediate_size=config.expert_width,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        num_key_value_heads=config.kv_heads, num_local_experts=config.num_experts, num_experts_per_tok=config.top_k,
        tie_word_embeddings=config.tied, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, use_cache=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(settings)
    model.set_experts_implementation(experts)
    return model


def training(model: Any, batch: int, length: int, *, ours: bool) -> Callable[[], None]:
    """One step on new tokens; the loss is the mean cross entropy of the next token."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(1)

    def step() -> None:
        tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=draw)
        model.train()
        optimizer.zero_grad(set_to_none=True)
        if ours:
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        else:
            logits = model(tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if ours:
            step_end(model)

    return step


class _Products(torch.autograd.Function):
    """The products of gated experts, forward and backward, of rows [A, dim] sorted by expert, and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, inward: Tensor, outward: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        both = F.grouped_mm(rows, inward.mT, offs=ends)
        output = F.grouped_mm(both[:, : outward.shape[2]], outward.mT, offs=ends)
        ctx.save_for_backward(inward, outward, rows, ends, both, output)
        ctx.tokens = len(hidden)
        return output[: len(hidden)]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        inward, outward, rows, ends, both, output = ctx.saved_tensors
        F.grouped_mm(output, outward, offs=ends)
        d_outward = F.grouped_mm(output.t(), both[:, : outward.shape[2]], offs=ends)
        d_inward = F.grouped_mm(both.t(), rows, offs=ends)
        return F.grouped_mm(both, inward, offs=ends)[: ctx.tokens], d_inward, d_outward, None, None


def products_alone(model: Any, config: Any, tokens: int) -> Any:
    """Mixtral whose experts cost their products: every expert has the same number of rows."""
    count = tokens * config.top_k
    rows = torch.randn(count, config.dim)
    ends = torch.arange(1, config.num_experts + 1) * (count // config.num_experts)

    def replace(experts: Any) -> None:
        def forward(hidden: Tensor, *_: Any) -> Tensor:
            output: Tensor = _Products.apply(hidden, experts.gate_up_proj, experts.down_proj, rows, ends.int())  # type: ignore[no-untyped-call]
            return output

        experts.forward = forward

    for layer in model.model.layers:
        replace(layer.mlp.experts)
    return model


def generation(model: Any, batch: int, how: str) -> Callable[[], None]:
    """Greedy, `NEW` tokens after `PROMPT`."""
    tokens = torch.randint(VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def run() -> None:
        model.eval()
        if how == "ours":
            prompts = list(tokens.numpy())
            for _ in generate(model, prompts, tokens=NEW, context=PROMPT + NEW, sampling=Sampling(temperature=0)):
                pass
        elif how == "generate":
            mask = torch.ones_like(tokens)
            model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        else:
            read, cache = tokens, None
            for _ in range(NEW):
                output = model(read, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, read = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)

    return run


def measured(
    cases: dict[str, Callable[[], None]], rounds: int, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds a call of each case, a figure a round, all cases in turn."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for call in cases.values():
        call()
    for number in range(rounds):
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = clock()
            for _ in range(repeats):
                cases[name]()
            times[name].append((clock() - began) / repeats)
    return times


def rows(title: str, times: dict[str, list[float]], tokens: int) -> list[str]:
    """Lines of the table: rates, and ours over the fastest other."""
    others = [name for name in times if name not in ("pointsman", BOUND)]
    best = min(others, key=lambda name: statistics.median(times[name]))
    ratio = statistics.median(theirs / own for own, theirs in zip(times["pointsman"], times[best], strict=True))
    rates = {name: f"{tokens / statistics.median(one):,.0f}" for name, one in times.items()}
    told = ", ".join(f"{name} {rates[name]}" for name in others)
    lines = [f"| {title} | {rates['pointsman']} | {told} | {ratio:.2f} (to {best}) |"]
    if BOUND in times:
        bound = statistics.median(theirs / own for own, theirs in zip(times[BOUND], times[best], strict=True))
        lines.append(f"| {title}, {BOUND} | - | {rates[BOUND]} | {bound:.2f} (to {best}) |")
    return lines


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--case", choices=("training", "generation"), help="default: both")
    words.add_argument("--peers", default=",".join(EXPERTS), help="transformers' expert implementations")
    words.add_argument("--rounds", type=int, default=9)
    words.add_argument("--preset", default="tiny-decoder")
    words.add_argument("--qk-norm", action="store_true", help="keep the preset's query-key norm, which Mixtral has not")
    words.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    words.add_argument("--bound", action="store_true", help="also experts that cost their products alone")
    words.add_argument("--out", type=Path)
    values = words.parse_args()
    clock = CLOCKS[values.clock]
    peers = values.peers.split(",")
    changes = {"train_top_k": "2", "model.router": "smoe:bias=false"}
    config = preset(values.preset).with_vocabulary(VOCABULARY)
    config = config.with_overrides(changes if values.qk_norm else {**changes, "model.qk_norm": "none"})
    batch, length = config.batch_size, config.segment_length
    kernels = choose_kernels(config, None)
    lines = ["| case | pointsman, tokens a second | Mixtral, tokens a second | ratio |", "|---|---|---|---|"]
    with using(kernels):
        if values.case != "generation":
            cases = {"pointsman": training(Decoder(config.model), batch, length, ours=True)}
            cases |= {name: training(mixtral(config.model, name), batch, length, ours=False) for name in peers}
            if values.bound:
                bare = products_alone(mixtral(config.model, peers[0]), config.model, batch * length)
                cases[BOUND] = training(bare, batch, length, ours=False)
            times = measured(cases, values.rounds, 2, clock)
            lines += rows(f"training step, {batch} x {length}", times, batch * length)
        model = Decoder(config.model)
        theirs = {name: mixtral(config.model, name) for name in peers}
        for width in (1, 16) if values.case != "training" else ():
            cases = {"pointsman": generation(model, width, "ours")}
            for name, one in theirs.items():
                cases |= {
                    name: generation(one, width, "generate"),
                    f"{name}, bare loop": generation(one, width, "bare"),
                }
            times = measured(cases, max(values.rounds // 3, 3), 1, clock)
            lines += rows(f"generation, {width} prompts", times, width * NEW)
    text = "\n".join(
        [
            f"{values.preset}, k = 2, float32, {torch.get_num_threads()} threads, {values.clock} clock: {machine()}",
            "",
            *lines,
        ]
    )
    print(text)
    if values.out:
        values.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
