"""Keeping memory that a training step frees for the next step, in large pages where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
KEPT, LARGEST = 2**30, 2**25
"""Bytes that stay with the process at most when they are free, and of a tensor that is taken from them."""
ROOM, PAD = 3 * 2**28, 2**17
"""Bytes by which the heap grows at first, less than KEPT or they would be given back, and later, as by default."""
LARGE_PAGE = 2**21


@cache
def keep_heap() -> None:
    """Have the C library keep up to 1 GiB that is free, in large pages, where it is glibc; elsewhere nothing happens.

    By default it gives memory back as soon as a step's activations are freed. The system then clears every page anew
    for the next step, about a thirtieth of a small encoder's time. What a process holds at most hardly changes. Pages
    of 2 MiB save about a fiftieth more: activations are read long after they were written, all over memory.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            library = ctypes.CDLL(None)
            # Setting one stops glibc from raising the other by itself, to this very number.
            library.mallopt(M_MMAP_THRESHOLD, LARGEST)
            library.mallopt(M_TRIM_THRESHOLD, KEPT)
            _in_large_pages(library)


def _in_large_pages(library: ctypes.CDLL) -> None:
    """Makes the heap grow, for now by addresses only, and advises the system to back them by large pages when used."""
    library.sbrk.restype, library.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mallopt(M_TOP_PAD, ROOM)
    taken: list[int] = []
    before = library.sbrk(0)
    while library.sbrk(0) == before and len(taken) < 8:  # what was free already is taken first
        taken.append(library.malloc(LARGEST // 2))
    library.mallopt(M_TOP_PAD, PAD)
    for place in taken:
        library.free(place)
    start = -(-before // LARGE_PAGE) * LARGE_PAGE
    if library.sbrk(0) > start:
        library.madvise(start, library.sbrk(0) - start, mmap.MADV_HUGEPAGE)
