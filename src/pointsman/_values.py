"""Values of annotated types out of what a user wrote."""

from __future__ import annotations

import types
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin


def convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as the annotated type `kind`: bool, int, float, Literal, None, or a union of them; else ValueError."""
    kinds = list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]
    for one in kinds:
        if get_origin(one) is Literal and value in get_args(one):
            return value
        if one is type(None) and value in (None, "none", "None"):
            return None
        if one is bool and (isinstance(value, bool) or str(value).lower() in ("true", "false")):
            return str(value).lower() == "true"
        if one in (int, float) and not isinstance(value, bool):
            try:
                number = one(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if isinstance(value, float) and number != value:
                continue
            if number == number and abs(number) != float("inf"):
                return number
    names = [name for one in kinds if get_origin(one) is Literal for name in get_args(one)]
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{where}={value!r}: {hint}allowed is {describe(kind)}")


def describe(kind: Any) -> str:
    """A type in words: 'a whole number', 'softmax or sigmoid', …"""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(str(one) for one in get_args(kind))
    return {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}.get(kind, str(kind))
