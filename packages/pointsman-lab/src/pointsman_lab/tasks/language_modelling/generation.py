"""Text from a language model, token by token with its memory as the cache, at any k; `pointsman generate`.

Shapes: B prompts, T tokens, V vocabulary.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman.control import set_top_k
from pointsman.ops.kernels import using
from pointsman.routers.frame.registry import has_one_k
from pointsman_lab._files import write_whole
from pointsman_lab._values import printable
from pointsman_lab.cli.options import Parser
from pointsman_lab.data.vocabulary import IdArray, Vocabulary
from pointsman_lab.models.stack import LanguageModel
from pointsman_lab.training.run import load_run


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from softmax(logits / temperature), cut to the likeliest that reach `top_p`.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: 1 cuts nothing.
        seed: row b draws from a generator of its own with seed + b.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RunError(f"temperature={self.temperature}: allowed are numbers from 0")
        if not 0 < self.top_p <= 1:
            raise RunError(f"top_p={self.top_p}: allowed are numbers above 0, up to 1")

    def draw(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """[B, V] -> [B]."""
        if self.temperature < torch.finfo(torch.float32).tiny:
            return logits.argmax(-1)
        scores = logits.float().cpu()
        probs = torch.softmax((scores - scores.amax(-1, keepdim=True)) / self.temperature, -1)  # no quotient is inf
        if self.top_p < 1:
            sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
            before = sorted_probs.cumsum(-1) - sorted_probs
            probs = torch.zeros_like(probs).scatter(-1, order, sorted_probs.masked_fill(before >= self.top_p, 0))
        rows = [torch.multinomial(row, 1, generator=own) for row, own in zip(probs, generators, strict=True)]
        return torch.cat(rows).to(logits.device)


def check_prompts(prompts: Sequence[IdArray], context: int) -> None:
    """RunError for no prompt, an empty one, or one that is longer than the context."""
    if not prompts:
        raise RunError("there is no prompt")
    for number, prompt in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not len(prompt):
            raise RunError(f"{which} is empty: at least one token is needed")
        if len(prompt) > context:
            raise RunError(f"{which} has {len(prompt):,} tokens, and the model's context is {context:,}")


@torch.no_grad()
def generate(
    model: Any, prompts: Sequence[IdArray], *, tokens: int, context: int, sampling: Sampling, words: int | None = None
) -> Iterator[Tensor]:
    """Continues every prompt by `tokens` of the first `words` ids (None: of all); yields the next of each, [B].

    Beyond the context the oldest tokens are forgotten.
    """
    check_prompts(prompts, context)
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    read = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        read[row, longest - len(prompt) :] = torch.from_numpy(np.asarray(prompt, dtype=np.int64))
        mask[row, longest - len(prompt) :] = True
    read, padding = read.to(device), None if bool(mask.all()) else mask.to(device)
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    memory = None
    for _ in range(tokens):
        output = model(read, memory=memory, memory_length=context - 1, padding_mask=padding)
        memory, padding = output.memory, None
        drawn = sampling.draw(output.logits[:, -1, :words], generators)
        yield drawn
        read = drawn[:, None]


def text_of(vocabulary: Vocabulary, prompt: Iterable[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text that each token adds: "" until a character is complete; then what is left of an incomplete one."""
    ids = [int(one) for one in prompt]
    shown = len(vocabulary.decode(ids))
    for token in tokens:
        ids.append(token)
        text = vocabulary.decode(ids).rstrip("\ufffd")
        yield text[shown:]
        shown = max(shown, len(text))
    yield vocabulary.decode(ids)[shown:]


def run_generate(flags: Parser, values: argparse.Namespace, device: str) -> int | None:
    """`pointsman generate` with a language model; None: the run is of another family."""
    if not values.prompt:
        raise RunError(f"{flags.prog}: --prompt is missing: the text to continue")
    if values.greedy:
        flags.without_effect(values, ("--temperature", "--top-p", "--seed"), "with --greedy")
    loaded = load_run(values.run, device=device, note=lambda message: print(printable(message), file=sys.stderr))
    if not isinstance(loaded.model, LanguageModel):
        return None
    temperature = 0.0 if values.greedy else values.temperature
    Sampling(temperature, values.top_p)  # refuses what cannot be drawn, before anything is printed
    encoded = [loaded.vocabulary.encode_compact(prompt) for prompt in values.prompt]
    if missed := sum(count for _, count in encoded):
        print(f"{missed} {loaded.vocabulary.level}s of the prompt are unknown to the model", file=sys.stderr)
    check_prompts([ids for ids, _ in encoded], loaded.context)  # before anything is printed
    if loaded.sparse:
        if values.top_k or not has_one_k(loaded.config.model.router):
            set_top_k(loaded.model, values.top_k or loaded.last_top_k)
    elif values.top_k:
        raise RunError(f"{flags.prog}: --top-k {values.top_k}: the model has no sparse layer")
    texts = []
    with using(loaded.config.kernels), loaded.autocast():
        for row, (prompt, (ids, _)) in enumerate(zip(values.prompt, encoded, strict=True)):
            drawn = Sampling(temperature, values.top_p, values.seed + row)
            how = {"tokens": values.tokens, "context": loaded.context, "sampling": drawn}
            texts.append(_shown(loaded.model, loaded.vocabulary, prompt, ids, **how))
    if values.out:
        rows = [{"prompt": one, "text": text} for one, text in zip(values.prompt, texts, strict=True)]
        write_whole(values.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return 0


def _shown(model: Any, vocabulary: Any, prompt: str, ids: Any, **how: Any) -> str:
    """Generates, prints on the way, and returns what was added to the prompt."""
    drawn = (int(one[0]) for one in generate(model, [ids], words=vocabulary.size, **how))
    print(printable(prompt), end="", flush=True)
    added = ""
    for text in text_of(vocabulary, ids, takewhile(lambda token: token != vocabulary.end_id, drawn)):
        print(printable(text), end="", flush=True)
        added += text
    print()
    return added
