"""Texts and conversations as batches of token ids, and what kind of token each one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PADDING, TEXT, SPECIAL, TEMPLATE = range(4)
KINDS = ("padding", "text", "special", "template")
MARK = "\u2060content\u2060"  # that no text has
PIECE = 1 << 16
"""Characters that are tokenized at once."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with "role" and "content": a string, or a list of parts of which those with "text" count."""


@dataclass(frozen=True)
class TextBatch:
    """Token ids [B, T], padded on the right, and the kind of each token [B, T]: an index into `KINDS`."""

    ids: Tensor
    kinds: Tensor

    @property
    def mask(self) -> Tensor:
        """[B, T] bool, True for a real token."""
        return self.kinds != PADDING


def text_batches(
    tokenizer: Any, texts: Iterable[str | Conversation], *, length: int, batch_size: int, max_tokens: int | None
) -> Iterator[TextBatch]:
    """Batches of at most `batch_size` rows of at most `length` tokens, in order, until `max_tokens` real ones.

    A text longer than `length` goes on in the next row. A conversation is written out with the tokenizer's chat
    template; what the template adds to the messages' contents is of the kind "template".
    """
    padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    rows: list[tuple[list[int], list[int]]] = []
    left = max_tokens
    for text in texts:
        for ids, kinds in _rows(tokenizer, text, length):
            if left is not None:
                ids, kinds = ids[:left], kinds[:left]
                left -= len(ids)
            if ids:
                rows.append((ids, kinds))
            if len(rows) == batch_size or (left == 0 and rows):
                yield _batch(rows, padding)
                rows = []
            if left == 0:
                return
    if rows:
        yield _batch(rows, padding)


def count_tokens(tokenizer: Any, texts: Iterable[str | Conversation], *, length: int, max_tokens: int | None) -> int:
    """How many real tokens `text_batches` would give."""
    count = 0
    for text in texts:
        for ids, _ in _rows(tokenizer, text, length):
            count += len(ids)
            if max_tokens is not None and count >= max_tokens:
                return max_tokens
    return count


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
        raise ValueError("audit: conversations need a fast tokenizer, which knows where in the text a token stands")
    try:
        written = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except Exception as error:  # the template's own code: roles that do not alternate, a missing content, …
        raise ValueError(f"audit: the tokenizer's chat template refuses a conversation: {error}") from None
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
    """Where a message's content begins in the text that the template makes; 0 where the template does not say.

    So that a short content is not found in the template's own words.
    """
    content: Any = MARK
    if isinstance(messages[number].get("content"), list):
        content = [{"type": "text", "text": MARK}]
    try:
        shown = tokenizer.apply_chat_template(
            [*messages[:number], {**messages[number], "content": content}], tokenize=False
        )
    except Exception:  # a template that wants the conversation to be whole
        return 0
    at = int(shown.find(MARK))
    return at if at >= 0 and written.startswith(shown[:at]) else 0


def _contents(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message: its content, or those of the content's parts; without the space around them."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text.strip()


def _batch(rows: Sequence[tuple[list[int], list[int]]], padding: int) -> TextBatch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), padding, dtype=torch.int64)
    kinds = torch.full((len(rows), width), PADDING, dtype=torch.int64)
    for row, (some, what) in enumerate(rows):
        ids[row, : len(some)] = torch.tensor(some)
        kinds[row, : len(some)] = torch.tensor(what)
    return TextBatch(ids, kinds)


def refuse_unknown_tokens(model: Any, highest: int) -> None:
    """ValueError if a text has a token that a model has no embedding for."""
    embeddings = model.get_input_embeddings()
    known = getattr(embeddings, "num_embeddings", None)
    if known is not None and highest >= known:
        raise ValueError(f"the tokenizer gives token {highest}, and {type(model).__name__} has {known:,} embeddings")
