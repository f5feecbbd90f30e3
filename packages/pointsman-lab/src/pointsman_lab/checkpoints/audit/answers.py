"""Tokens to an answer: greedy generation on prompts with known answers, at every k."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import set_top_k
from pointsman_lab.checkpoints.text import device_of
from pointsman_lab.intervals import ratio

ANSWER_TOKENS = 256


def prompt_ids(tokenizer: Any, prompt: Any) -> Tensor:
    """The tokens [1, T] of a text, or of messages in the chat template; ValueError if there are none."""
    chat = {"add_generation_prompt": True, "return_tensors": "pt"}
    try:
        text = isinstance(prompt, str)
        given = tokenizer(prompt, return_tensors="pt") if text else tokenizer.apply_chat_template(prompt, **chat)
        ids: Tensor = given if isinstance(given, Tensor) else given["input_ids"]
    except Exception as error:  # raised by the template: roles that do not alternate, a missing content, …
        raise ValueError(f"audit: task: the tokenizer rejects the prompt {prompt!r}: {error}") from None
    if not ids.numel():
        raise ValueError(f"audit: task: the prompt {prompt!r} has no token")
    return ids


@torch.no_grad()
def _spent(model: Any, tokenizer: Any, ids: Tensor, answer: str, most: int) -> tuple[int, bool]:
    """Tokens generated until the answer, the end of the text or `most`; whether the answer came."""
    ids, found = ids.to(device_of(model)), False
    begun = 1 if model.config.is_encoder_decoder else ids.shape[1]

    def stop(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        nonlocal found
        found = answer in tokenizer.decode(ids[0, begun:], skip_special_tokens=True)
        return torch.full((len(ids),), found, dtype=torch.bool, device=ids.device)

    end = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None]
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "num_beams": 1, "max_new_tokens": most}
    out = model.generate(ids, **given, stopping_criteria=[stop], pad_token_id=end[0] if end else None)
    return out.shape[1] - begun, found


def answers(
    model: nn.Module,
    tokenizer: Any,
    task: Sequence[tuple[Tensor, str]],
    ks: Sequence[int | None],
    own: int | None,
    most: int,
) -> list[dict[str, Any]]:
    """By k: the share of prompts that reach their answer, the tokens spent, and both beside those at the model's own k.

    Where no answer comes, the tokens until the end of the text, or `most`, count. "reached", "tokens" a prompt, "times"
    (tokens over those at the own k) and "gained" (share of answers minus that at the own k): as `ratio` gives them,
    over prompts, the last two paired and corrected for the number of k.
    """
    ones = [1] * len(task)
    spent: dict[int | None, list[tuple[int, bool]]] = {}
    for k in dict.fromkeys([own, *ks]):
        with nullcontext() if k is None or k == own else set_top_k(model, k):
            spent[k] = [_spent(model, tokenizer, *one, most) for one in task]
    rows = []
    for k, found in sorted(spent.items(), key=lambda one: one[0] or 0):
        tokens, reached = ([float(one[at]) for one in found] for at in (0, 1))
        base, before = ([float(one[at]) for one in spent[own]] for at in (0, 1))
        gained = [mine - its for mine, its in zip(reached, before, strict=True)]
        others = max(1, len(spent) - 1)
        rows.append(
            {"top_k": k, "prompts": len(task), "reached": _spread(reached, ones), "tokens": _spread(tokens, ones),
             "times": None if k == own else _spread(tokens, base, others),
             "gained": None if k == own else _spread(gained, ones, others)}
        )  # fmt: skip
    return rows


def _spread(tops: Sequence[float], bottoms: Sequence[float], comparisons: int = 1) -> dict[str, Any]:
    """`ratio`, without an interval where no prompt differs: that would be one of width 0, whatever their number."""
    found = ratio(tops, bottoms, comparisons)
    return found if found["error"] else {**found, "half": None}
