"""Weight gradients in freed buffers: a large gradient takes the memory of an earlier gradient of the same parameter.

glibc gives large freed blocks back to the system, and a fresh page costs a fault every 4 KB: with large experts a third
of a training step. Nothing is reused while anything refers to it: each buffer is a NumPy array that torch holds for as
long as the gradient's storage lives, be it through a view, a NumPy array or a DLPack capsule; when torch releases it,
a finalizer puts its block back.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Bytes; smaller gradients are left to the allocator, which keeps such blocks."""
_KEPT = 2  # freed blocks of a parameter: two gradients are there when a second backward adds to the first
_ALIGNMENT = 64  # bytes, torch's own

Block = np.ndarray[Any, np.dtype[np.uint8]]
_freed: weakref.WeakKeyDictionary[torch.UntypedStorage, list[Block]] = weakref.WeakKeyDictionary()
"""A parameter's storage -> the blocks of its freed gradients; they go with the parameter. No result depends on them."""


def empty_gradient(parameter: Tensor) -> Tensor:
    """`torch.empty_like(parameter)`, in the memory of a freed gradient if the parameter is a large contiguous leaf."""
    size = parameter.nbytes
    if size < SMALLEST or not parameter.is_leaf or not parameter.is_contiguous():
        return torch.empty_like(parameter)
    freed = _freed.setdefault(parameter.untyped_storage(), [])
    block = _taken(freed, size + _ALIGNMENT)
    start = -block.ctypes.data % _ALIGNMENT
    buffer = block[start : start + size]
    finalizer = weakref.finalize(buffer, _put_back, freed, block)
    finalizer.atexit = False
    gradient = torch.empty(0, dtype=parameter.dtype, device="cpu")
    return gradient.set_(torch.from_numpy(buffer).untyped_storage(), 0, parameter.shape, parameter.stride())


def forget() -> None:
    """Releases all freed buffers."""
    for freed in list(_freed.values()):
        freed.clear()


def _taken(freed: list[Block], size: int) -> Block:
    while freed:
        try:
            block = freed.pop()
        except IndexError:  # another thread was faster
            break
        if block.nbytes == size:
            return block
    return np.empty(size, np.uint8)


def _put_back(freed: list[Block], block: Block) -> None:
    if len(freed) < _KEPT:
        freed.append(block)
