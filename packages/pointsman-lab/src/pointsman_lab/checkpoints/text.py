"""Texts and conversations as batches of token ids, with the kind of each token."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

PADDING, TEXT, SPECIAL, TEMPLATE = range(4)
KINDS = ("padding", "text", "special", "template")
MARK = "\u2060content\u2060"  # a string that does not occur in texts
PIECE = 1 << 16
"""Characters that are tokenized in one call."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with "role" and "content". A content is a string or a list of parts; only parts with "text" count."""


@dataclass(frozen=True)
class TextBatch:
    """`ids` [B, T], padded on the right; `kinds` [B, T], the kind of each token as an index into `KINDS`."""

    ids: Tensor
    kinds: Tensor

    @property
    def mask(self) -> Tensor:
        """[B, T] bool, True for a real token."""
        return self.kinds != PADDING


Batches = Sequence[TextBatch]


def text_batches(
    tokenizer: Any, texts: Iterable[str | Conversation], *, length: int, batch_size: int, max_tokens: int | None
) -> Iterator[TextBatch]:
    """Batches of at most `batch_size` rows of at most `length` tokens, in order, up to `max_tokens` real tokens.

    A text longer than `length` continues in the next row. A conversation is formatted with the tokenizer's chat
    template; tokens that the template adds have the kind "template".
    """
    padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    rows: list[tuple[list[int], list[int]]] = []
    left = sys.maxsize if max_tokens is None else max_tokens
    for ids, kinds in chain.from_iterable(_rows(tokenizer, text, length) for text in texts):
        rows.append((ids[:left], kinds[:left]))
        left -= len(rows[-1][0])
        if len(rows) == batch_size:
            yield _batch(rows, padding)
            rows = []
        if left == 0:
            break
    if rows:
        yield _batch(rows, padding)


def _rows(tokenizer: Any, text: str | Conversation, length: int) -> Iterator[tuple[list[int], list[int]]]:
    pieces = _pieces(tokenizer, text) if isinstance(text, str) else [_conversation(tokenizer, text)]
    ids: list[int] = []
    kinds: list[int] = []
    for more_ids, more_kinds in pieces:
        ids += more_ids
        kinds += more_kinds
        while len(ids) >= length:
            yield ids[:length], kinds[:length]
            ids, kinds = ids[length:], kinds[length:]
    if ids:
        yield ids, kinds


def _pieces(tokenizer: Any, text: str) -> Iterator[tuple[list[int], list[int]]]:
    special = set(tokenizer.all_special_ids)
    for start in range(0, max(len(text), 1), PIECE):
        piece = text[start : start + PIECE]
        ids = list(tokenizer(piece, add_special_tokens=start == 0, verbose=False)["input_ids"])
        yield ids, [SPECIAL if one in special else TEXT for one in ids]


def _conversation(tokenizer: Any, messages: Conversation) -> tuple[list[int], list[int]]:
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError('audit: a text is a string or a list of messages such as {"role": "user", "content": "…"}')
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("audit: a text is a conversation, and the tokenizer has no chat template")
    if not tokenizer.is_fast:
        raise ValueError("audit: conversations need a fast tokenizer, which returns the position of each token")
    try:
        written = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except Exception as error:  # raised by the template: roles that do not alternate, a missing content, …
        raise ValueError(f"audit: the tokenizer's chat template rejects a conversation: {error}") from None
    spans = []
    cursor = 0
    for number, message in enumerate(messages):
        cursor = max(cursor, _begin(tokenizer, messages, number, written))
        for content in _contents(message):
            start = written.find(content, cursor)
            if content and start >= 0:
                cursor = start + len(content)
                spans.append((start, cursor))
    encoded = tokenizer(written, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    special = set(tokenizer.all_special_ids)
    kinds = []
    for one, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        inside = any(first <= start and stop <= last for first, last in spans)
        kinds.append(SPECIAL if one in special else TEXT if inside else TEMPLATE)
    return list(encoded["input_ids"]), kinds


def _begin(tokenizer: Any, messages: Conversation, number: int, written: str) -> int:
    """The position at which a message's content begins in the formatted text; 0 if it cannot be determined.

    A search from this position does not find a short content inside the template's own text.
    """
    in_parts = isinstance(messages[number].get("content"), list)
    marked = {**messages[number], "content": [{"type": "text", "text": MARK}] if in_parts else MARK}
    try:
        shown = tokenizer.apply_chat_template([*messages[:number], marked], tokenize=False)
    except Exception:  # a template that requires a complete conversation
        return 0
    at = int(shown.find(MARK))
    return at if at >= 0 and written.startswith(shown[:at]) else 0


def _contents(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message, stripped: its content, or the texts of the content's parts."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text.strip()


def _batch(rows: Sequence[tuple[list[int], list[int]]], padding: int) -> TextBatch:
    ids, kinds = ([torch.tensor(one) for one in each] for each in zip(*rows, strict=True))
    padded = pad_sequence(ids, batch_first=True, padding_value=padding)
    return TextBatch(padded, pad_sequence(kinds, batch_first=True, padding_value=PADDING))


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its inputs; the CPU where its weights are offloaded, whose hooks take them further."""
    found = next(model.parameters()).device
    return torch.device("cpu") if found.type == "meta" else found


def refuse_unknown_tokens(model: Any, highest: int) -> None:
    """Raises ValueError if the highest token id has no embedding in the model."""
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and highest >= known:
        raise ValueError(f"the tokenizer gives token {highest}, and {type(model).__name__} has {known:,} embeddings")
