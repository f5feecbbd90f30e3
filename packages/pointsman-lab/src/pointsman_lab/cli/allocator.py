"""Keeps freed memory in the process, for programs that allocate the same sizes at every step.

glibc returns large freed blocks to the system. The next allocation then pays a page fault every 4 KB. Our command line
calls `keep_freed_memory`; the library does not, because the setting belongs to the whole process. A training loop of
your own may call it once at its start.
"""

import ctypes
import os
import sys

KEPT = 1 << 30
"""Bytes. Blocks up to this size come from the heap, and this much free memory stays at its end."""

_LARGEST_BEFORE_2_35 = 32 << 20  # the largest mmap threshold that glibc before 2.35 accepts
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Raises glibc's two thresholds to `KEPT` and returns whether it did.

    It does nothing with another C library, or where the environment sets the thresholds already. It has no effect on a
    preloaded allocator.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _SETTINGS):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # musl has its own, without thresholds
        return False
    raised = library.mallopt(_MMAP_THRESHOLD, KEPT) or library.mallopt(_MMAP_THRESHOLD, _LARGEST_BEFORE_2_35)
    return bool(raised and library.mallopt(_TRIM_THRESHOLD, KEPT))
