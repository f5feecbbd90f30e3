"""Which layers of a model are sparse: the grammar of `moe_layers`."""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Which layers are sparse, and after how many layers an extra sparse one stands (None: none)."""

    sparse: frozenset[int]
    after: int | None


ALLOWED = "allowed are all, every:2, every:2:1, last:2, last:2:2, after:6, or layer numbers such as 0,1,2,3"


def parse_moe_layers(text: str, num_layers: int) -> Layout:
    """Reads `moe_layers`.

    - `all`
    - `every:n[:start]`: layers start, start + n, ...; start is 0. `every:2` is the GLaM layout, `every:2:1` V-MoE's
      "Every 2".
    - `last:m[:stride]`: m layers that end with the last one, `stride` (1) apart. `last:2:2` is V-MoE's "Last 2".
    - `after:l`: one extra sparse layer after l layers, none in their places (X-MoE).
    - `0,1,3`: these layers.

    Raises:
        ValueError: in one line, what is wrong and what is allowed.
    """
    word, colon, rest = text.strip().partition(":")
    if word == "all" and not colon:
        return Layout(frozenset(range(num_layers)), None)
    if word in ("every", "last", "after") and colon:
        return _counted(text, word, rest, num_layers)
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() for piece in pieces):
        raise ValueError(f"moe_layers={text!r}: {ALLOWED}")
    return Layout(check_layers("moe_layers", text, [int(piece) for piece in pieces], num_layers), None)


def check_layers(name: str, given: object, layers: list[int], num_layers: int) -> frozenset[int]:
    """The numbers as a set; ValueError if one is no layer's or is given twice."""
    if any(not 0 <= layer < num_layers for layer in layers) or len(set(layers)) < len(layers):
        raise ValueError(f"{name}={given!r}: allowed are layer numbers from 0 to {num_layers - 1}, each once")
    return frozenset(layers)


def _counted(text: str, word: str, rest: str, num_layers: int) -> Layout:
    numbers = [int(piece) if piece.strip().isdecimal() else -1 for piece in rest.split(":")]
    first = numbers[0]
    if not 1 <= first <= num_layers:
        raise ValueError(
            f"moe_layers={text!r}: {word}: takes a whole number from 1 to {num_layers} (the number of layers)"
        )
    if len(numbers) > (1 if word == "after" else 2):
        raise ValueError(f"moe_layers={text!r}: {ALLOWED}")
    if word == "after":
        return Layout(frozenset(), first)
    if word == "every":
        start = numbers[1] if len(numbers) == 2 else 0
        if not 0 <= start < num_layers:
            raise ValueError(f"moe_layers={text!r}: every:n:start takes a start from 0 to {num_layers - 1}")
        return Layout(frozenset(range(start, num_layers, first)), None)
    stride = numbers[1] if len(numbers) == 2 else 1
    if stride < 1 or (first - 1) * stride >= num_layers:
        raise ValueError(f"moe_layers={text!r}: {first} layers, {stride} apart, do not fit into {num_layers} layers")
    return Layout(frozenset(range(num_layers - 1 - (first - 1) * stride, num_layers, stride)), None)
