"""Values of annotated types out of what a user wrote, and back; the range of every number."""

import types
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

MOST_WHOLE = 2**31 - 1
MOST_NUMBER = 1e9
MOST: Mapping[str, float] = {
    "dim": 2**20, "hidden_dim": 2**24, "head_dim": 2**16, "num_heads": 2**16, "num_layers": 2**14, "num_experts": 2**16,
    "hyper_dim": 2**16, "embed_dim": 2**16, "routing_dim": 2**16,
    "nulls": 2**12, "slots": 2**12, "selectors": 2**12, "width": 2**14, "bins": 2**20, "columns": 2**16,
    "batch_size": 2**20, "eval_batch_size": 2**20, "accumulation": 2**20, "keep_checkpoints": 2**20,
    "segment_length": 2**24, "memory_length": 2**24, "eval_segment_length": 2**24, "eval_memory_length": 2**24,
    "length": 2**24, "seeds": 10_000, "gpus": 2**20, "epochs": 1e6, "capacity": 1e6,
}  # fmt: skip
"""The largest value of each number that a user gives, by name: far above any use, far below what overflows.

Other whole numbers go up to `MOST_WHOLE`, other numbers up to `MOST_NUMBER` (and down to its negative). The least value
stands where a number is used.
"""


def most(name: str, kind: type = int) -> float:
    """The largest value of the number called `name`, the last word of a setting's or flag's name."""
    return MOST.get(name, MOST_WHOLE if kind is int else MOST_NUMBER)


def upper(largest: float) -> str:
    """The largest value in words: '65,536', '1e+09'."""
    return f"{largest:,}" if isinstance(largest, int) else f"{largest:g}"


def convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as the annotated type `kind`: bool, int, float, Literal, None, or a union of them; else ValueError.

    `where` names it; its last word is the number's name in `MOST`.
    """
    name, kinds = where.replace(".", " ").split()[-1], _kinds(kind)
    for one in kinds:
        if get_origin(one) is Literal and (same := [name for name in get_args(one) if name in (value, str(value))]):
            return same[0]
        if one is type(None) and value in (None, "none", "None"):
            return None
        if one is bool and (isinstance(value, bool) or str(value).lower() in ("true", "false")):
            return str(value).lower() == "true"
        if one in (int, float) and not isinstance(value, bool):
            try:
                number = one(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if number != number or (isinstance(value, float) and number != value):
                continue
            if abs(number) > (largest := most(name, one)):
                what = "whole numbers" if one is int else "numbers"
                raise ValueError(f"{where}={value!r}: allowed are {what} up to {upper(largest)}")
            return number
    names = [name for one in kinds if get_origin(one) is Literal for name in get_args(one)]
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{where}={value!r}: {hint}allowed is {describe(kind)}")


def _kinds(kind: Any) -> list[Any]:
    return list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]


def settable(kind: Any) -> bool:
    """Whether `convert` makes values of this type."""
    return all(one in (bool, int, float, type(None)) or get_origin(one) is Literal for one in _kinds(kind))


def describe(kind: Any) -> str:
    """A type in words: 'a whole number', 'softmax or sigmoid', …"""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(str(one) for one in get_args(kind))
    return {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}.get(kind, str(kind))


def check_whole(where: str, value: object, least: int = 1) -> None:
    """ValueError unless it is a whole number from `least` to the `most` of its name, the last word of `where`."""
    largest = most(where.split()[-1])
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}={value!r}: allowed are whole numbers from {least}")
    if value > largest:
        raise ValueError(f"{where}={value!r}: allowed are whole numbers from {least} to {upper(largest)}")


def written(value: Any) -> str:
    """A value as specs and `--set` take it."""
    if isinstance(value, list | tuple):
        return ",".join(map(written, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
