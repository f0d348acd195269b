"""Memory that a step frees serves the next one."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

COUNT, EACH = 12, 2**23
SCRIPT = f"""
import os, sys
import torch
if "keep" in sys.argv:
    from coterie.training.heap import keep_heap
    keep_heap()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def large():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))

before = resident()
held = [torch.ones({EACH} // 4) for _ in range({COUNT})]
in_large = large()
while held:
    held.pop()  # the last first, as a backward pass does
print(resident() - before, in_large)
"""
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not Path("/proc/self/statm").exists(), reason="there is no glibc, or no /proc"
)


def seen(*arguments: str) -> list[int]:
    """Bytes that stayed with a process when its tensors were gone, and those that were in large pages before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


@GLIBC
def test_freed_activations_stay_with_the_process() -> None:
    assert seen("keep")[0] > 0.8 * COUNT * EACH
    assert seen()[0] < 0.2 * COUNT * EACH  # else the test shows nothing


@GLIBC
@pytest.mark.skipif(
    not LARGE_PAGES.is_file() or "[madvise]" not in LARGE_PAGES.read_text(), reason="large pages are not on advice here"
)
def test_activations_lie_in_large_pages() -> None:
    assert seen("keep")[1] > 0.6 * COUNT * EACH
    assert seen()[1] < 0.1 * COUNT * EACH  # else the test shows nothing
