"""Weight gradients in storage that is used again, step after step.

Fresh memory costs a page fault every 4 KB: for large experts as much as the matrix products themselves. A gradient
therefore lies in the storage of an earlier gradient of the same parameter, once nothing else refers to that storage:
no tensor, no view, no Python storage object. Where this cannot be told for certain, memory is fresh.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_lock = threading.Lock()
_storages: Any = WeakTensorKeyDictionary()  # parameter -> its storages; a cache: no result depends on it


def empty_gradient(parameter: Tensor) -> Tensor:
    """`torch.empty_like(parameter)`, in recycled storage if `parameter` is a contiguous leaf."""
    if not (_COUNTS_HOLDERS and parameter.is_leaf and parameter.is_contiguous()):
        return torch.empty_like(parameter)
    with _lock:
        storages: list[torch.UntypedStorage] = _storages.setdefault(parameter, [])
        for index in range(len(storages)):
            if _free(storages, index, parameter.nbytes):
                break
        else:
            index = len(storages)
            storages.append(_storage(parameter.nbytes))
        output = torch.empty(0, dtype=parameter.dtype, device="cpu")
        return output.set_(storages[index], 0, parameter.shape, parameter.stride())


def forget() -> None:
    """Lets go of all storage that is kept."""
    with _lock:
        _storages.clear()


def _storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]


def _free(storages: list[torch.UntypedStorage], index: int, nbytes: int) -> bool:
    return (
        _python_holders(storages, index) == _NO_HOLDERS
        and _tensor_holders(storages[index]) == 1
        and storages[index].nbytes() == nbytes
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
