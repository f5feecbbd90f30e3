"""Text from a language model, token by token with its memory as the cache, for several prompts at once, at any k.

Shapes: B prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.data.vocabulary import IdArray, Vocabulary

HELD = 8  # ids that wait for the rest of their character, at most
WINDOW = 64  # ids that are decoded together


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


class TextStream:
    """Turns ids into text as they come: a character appears when its last id is there."""

    def __init__(self, vocabulary: Vocabulary, before: Iterable[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._ids = [int(one) for one in before][-HELD:]
        self._shown = vocabulary.decode(self._ids)
        self._held = 0

    def push(self, token: int) -> str:
        """The text that this id adds; "" where a character is not complete."""
        self._ids.append(token)
        self._held += 1
        text = self._vocabulary.decode(self._ids)
        if text.endswith("\ufffd") and self._held < HELD:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """What is left of an incomplete character."""
        return self._show(self._vocabulary.decode(self._ids))

    def _show(self, text: str) -> str:
        new, self._shown, self._held = text[len(self._shown) :], text, 0
        if len(self._ids) > WINDOW:
            self._ids = self._ids[-HELD:]
            self._shown = self._vocabulary.decode(self._ids)
        return new
