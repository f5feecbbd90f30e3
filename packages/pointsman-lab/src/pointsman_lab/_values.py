"""Settings as their fields' types, figures that may be none, and text that a terminal or a file's name takes."""

import math
import os
import statistics
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pointsman._errors import RunError, did_you_mean
from pointsman._values import check_whole as check_whole
from pointsman._values import convert as convert
from pointsman._values import describe as describe
from pointsman._values import most as most
from pointsman._values import upper as upper
from pointsman._values import written as written


def finite(value: Any) -> float | None:
    """`value` as a float whose square is finite; None for everything else, nan, infinities and booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the largest float
        return None
    return number if abs(number) <= 1e150 else None


def mean_of(values: Iterable[Any]) -> float | None:
    """The mean of those values that are finite numbers; None where none is."""
    found = [number for value in values if (number := finite(value)) is not None]
    return statistics.fmean(found) if found else None


def perplexity(nats: float) -> float | None:
    """e^nats; None if it is no finite number."""
    try:
        value = math.exp(nats)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by their whole names: `model.dim = 64` in a TOML file is a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_OBEYED = dict.fromkeys(
    [*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)],
    "\N{REPLACEMENT CHARACTER}",
)


def printable(text: str) -> str:
    """`text` for a terminal: what one obeys instead of showing it becomes U+FFFD, but for tabs and ends of lines.

    So do the characters that turn the direction of writing: with them code reads otherwise than it runs.
    """
    return text.translate(_OBEYED)


def name_fault(name: str) -> str | None:
    """Why a file's name cannot be written as UTF-8, and what helps; None if it can.

    Python keeps bytes that it cannot read as lone surrogates: those of other encodings, and, where it takes names for
    ASCII, all that are above 127.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        pass
    else:
        return None
    try:
        os.fsencode(name).decode()
    except UnicodeError:
        return "its bytes are not UTF-8; choose another name"
    return f"Python reads names as {sys.getfilesystemencoding()} here, this one is UTF-8; PYTHONUTF8=1 reads it"


def typed_value(value: Any, kind: Any, where: str) -> Any:
    """`value` as the annotated type: what `_values.convert` knows, strings, and tuples ("1,2,4" or a list).

    Raises:
        RunError: names the setting, the value and what is allowed.
    """
    kinds = list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]
    if type(None) in kinds and value in (None, "none", "all"):
        return None
    for one in kinds:
        if one is str and isinstance(value, str):
            return value
        if get_origin(one) is tuple:
            return _typed_tuple(value, get_args(one), where)
    if str in kinds:
        raise RunError(f"{where}={value!r}: allowed is a text")
    try:
        return convert(value, kind, where)
    except ValueError as error:
        raise RunError(str(error)) from None


def check_fields(settings: Any, zero: Collection[str] = (), leave: Collection[str] = ()) -> None:
    """Checks what the types of a dataclass's fields say: words that are allowed, and whole numbers from 1.

    Args:
        zero: whole numbers that may be 0.
        leave: fields that are checked elsewhere.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    kinds = get_type_hints(type(settings))
    for name in (each.name for each in fields(settings) if each.name not in leave):
        value, kind = getattr(settings, name), kinds[name]
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{name}={value!r}: {did_you_mean(str(value), get_args(kind))}")
        if kind is int or (kind == int | None and value is not None):
            check_whole(name, value, least=int(name not in zero))


def typed_fields(cls: Any, values: Mapping[str, Any], where: str, leave: Collection[str] = ()) -> dict[str, Any]:
    """`values` as the arguments of a dataclass: none unknown, none missing, each of its type.

    Args:
        where: the beginning of errors.
        leave: fields that are neither required nor converted.

    Raises:
        RunError: names the field.
    """
    kinds = get_type_hints(cls)
    for key in values:
        if key not in kinds:
            raise RunError(f"{where}{key}: {did_you_mean(key, kinds)}")
    for each in fields(cls):
        required = each.default is each.default_factory is MISSING and each.name not in leave
        if required and each.name not in values:
            raise RunError(f"{where}{each.name} is missing")
    typed = {key: typed_value(value, kinds[key], where + key) for key, value in values.items() if key not in leave}
    return {**values, **typed}


def _typed_tuple(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part for part in value.strip("[]() ").split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise RunError(f"{where}={value!r}: allowed is a list, as 1,2,4")
    if kinds[-1] is not Ellipsis and len(value) != len(kinds):
        raise RunError(f"{where}={value!r}: allowed are {len(kinds)} values")
    each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
    return tuple(typed_value(one, kind, where) for one, kind in zip(value, each, strict=True))
