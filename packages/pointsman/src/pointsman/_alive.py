"""Objects that hooks on every optimizer look for, as long as somebody else holds them."""

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Alive(Generic[T]):
    """A set of objects by identity, each until it is freed. Any thread may add to it while another reads it, which a
    WeakSet does not take."""

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, one: T) -> None:
        self._kept[id(one)] = one

    def discard(self, one: T) -> None:
        self._kept.pop(id(one), None)

    def __iter__(self) -> Iterator[T]:
        return iter([one for kept in self._kept.valuerefs() if (one := kept()) is not None])
