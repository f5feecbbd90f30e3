"""Freed memory stays with the process, for programs that allocate the same again, step after step.

glibc gives large freed blocks back to the system, whose fresh pages then cost a fault every 4 KB. The command line
keeps its own; a library must not choose that for the program it is part of, so that training loops of one's own call
this themselves, once at their start.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT = 1 << 30
"""Bytes: blocks up to here come from the heap, of whose free end so much is kept."""

_LARGEST_BEFORE_2_35 = 32 << 20  # glibc's bound on the first of the two, then
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Raises glibc's two thresholds to `KEPT`. Returns whether it did: not with another C library, nor where the
    environment already sets them. Another allocator that is preloaded goes its own way.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _SETTINGS):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # musl has its own, without thresholds
        return False
    raised = library.mallopt(_MMAP_THRESHOLD, KEPT) or library.mallopt(_MMAP_THRESHOLD, _LARGEST_BEFORE_2_35)
    return bool(raised and library.mallopt(_TRIM_THRESHOLD, KEPT))
