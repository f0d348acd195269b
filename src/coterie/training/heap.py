"""Keeping memory that a training step frees for the next step."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT, LARGEST = 2**30, 2**25
"""Bytes that stay with the process at most when they are free, and of a tensor that is taken from them."""


@cache
def keep_heap() -> None:
    """Have the C library keep up to 1 GiB that is free, where it is glibc; elsewhere nothing happens.

    By default it gives memory back as soon as a step's activations are freed. The system then clears every page anew
    for the next step, about a thirtieth of a small encoder's time. What a process holds at most is not changed.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            # Setting one stops glibc from raising the other by itself, to this very number.
            mallopt(M_MMAP_THRESHOLD, LARGEST)
            mallopt(M_TRIM_THRESHOLD, KEPT)
