"""Memory that is used again, step after step.

Fresh memory costs a page fault every 4 KB: for large experts as much as the matrix products themselves. Therefore

- a weight gradient lies in the storage of an earlier gradient of the same parameter;
- the rows of all experts, which do not outlive a call, lie in storage that all layers share;
- the hidden units that backward has used are let go of in the next forward, each just before its successor is
  allocated, so that the allocator has a block for it and never so much free that it gives memory back.

Storage is used again once nothing else refers to it: no tensor, no view, no Python storage object. Where this cannot be
told for certain, memory is fresh. What is kept is kept for a parameter (or for what it is a view of; a copy that
autocast has made lives too short), and gone with it. At the start of backward all of it is in use; what an optimizer
needs at its step comes on top.

A parameter that has weak references cannot take part in `torch.utils.swap_tensors`: `forget()` before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LEAST = 1 << 25  # bytes; glibc maps larger blocks anew each time, and has smaller ones at hand

# caches: no result depends on them
_lock = threading.Lock()
_storages: Any = WeakTensorKeyDictionary()  # parameter -> storages of its gradients
_rows: Any = WeakTensorKeyDictionary()  # parameter -> storages of rows, for every parameter's
_spent: Any = WeakTensorKeyDictionary()  # parameter -> hidden units, the last first


def empty_gradient(parameter: Tensor) -> Tensor:
    """`torch.empty_like(parameter)`, in recycled storage if `parameter` is a contiguous leaf."""
    if not (_COUNTS_HOLDERS and parameter.is_leaf and parameter.is_contiguous()):
        return torch.empty_like(parameter)
    with _lock:
        storages: list[torch.UntypedStorage] = _storages.setdefault(parameter, [])
        free = [_free(storages, index) for index in range(len(storages))]
        of_size = [
            index for index, is_free in enumerate(free) if is_free and storages[index].nbytes() == parameter.nbytes
        ]
        # one more than is asked for: a step of several backwards needs two in turns
        storages[:] = [storages[i] for i, is_free in enumerate(free) if not is_free or i in of_size[:2]]
        if of_size:
            index = sum(not is_free for is_free in free[: of_size[0]])  # where the first of them is now
        else:
            index = len(storages)
            storages.append(_storage(parameter.nbytes))
        return _tensor(storages[index], parameter.dtype, parameter.shape, parameter.stride())


def owner(parameter: Tensor) -> Tensor:
    """What lives as long as this parameter's memory."""
    return parameter if parameter._base is None else parameter._base


def empty_rows(parameter: Tensor, rows: int, width: int) -> Tensor:
    """`torch.empty(rows, width)` in the dtype of `parameter`, in recycled storage if it is large."""
    nbytes = rows * width * parameter.element_size()
    if not _COUNTS_HOLDERS or nbytes < LEAST:
        return parameter.new_empty(rows, width)
    with _lock:
        for storages in _rows.values():
            for index in range(len(storages)):
                if _free(storages, index) and storages[index].nbytes() >= nbytes:
                    return _tensor(storages[index], parameter.dtype, (rows, width), (width, 1))
        for storages in _rows.values():  # they are too small
            storages[:] = [storages[index] for index in range(len(storages)) if not _free(storages, index)]
        storages = _rows.setdefault(owner(parameter), [])
        storages.append(_storage(nbytes + nbytes // 8))  # pages that are not written to are not there
        return _tensor(storages[-1], parameter.dtype, (rows, width), (width, 1))


def spend(parameter: Tensor, units: Sequence[Tensor]) -> None:
    """Keeps what backward has used, in the order in which forward made it."""
    with _lock:
        _spent[parameter] = list(reversed(units))


def spent(parameter: Tensor) -> list[Tensor]:
    """What was kept last for `parameter`, or else for another, the first at the end: to be let go of one by one.

    Another's, so that layers which recompute their forward in backward hold one layer's units between them.
    """
    if not _spent:
        return []
    with _lock, suppress(KeyError):  # the last parameter may have gone meanwhile
        own: list[Tensor] = _spent.pop(owner(parameter), None) or _spent.popitem()[1]
        return own
    return []


def forget() -> None:
    """Lets go of everything that is kept."""
    with _lock:
        for kept in (_storages, _rows, _spent):
            kept.clear()


def _storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]


def _tensor(storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)


def _free(storages: list[torch.UntypedStorage], index: int) -> bool:
    return (
        _python_holders(storages, index) == _NO_HOLDERS
        and _tensor_holders(storages[index]) == 1
        and not storages[index].is_shared()
    )


def _python_holders(storages: list[torch.UntypedStorage], index: int) -> int:
    return sys.getrefcount(storages[index])


def _tensor_holders(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _counts_holders() -> bool:
    """Whether the count of a storage's holders, which is not public, exists and tells one holder from two."""
    storage = _storage(4)
    try:
        alone = _tensor_holders(storage)
        tensor = torch.empty(0, device="cpu").set_(storage, 0, (1,), (1,))
        view = tensor.view(1).detach()
        held = _tensor_holders(storage)
        del tensor
        by_view = _tensor_holders(storage)
        del view
        return (alone, held, by_view, _tensor_holders(storage)) == (1, 3, 2, 1)
    except (AttributeError, RuntimeError, TypeError):
        return False


_NO_HOLDERS = _python_holders([_storage(4)], 0)
_COUNTS_HOLDERS = _counts_holders()
