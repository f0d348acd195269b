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

before = resident()
held = [torch.ones({EACH} // 4) for _ in range({COUNT})]
while held:
    held.pop()  # the last first, as a backward pass does
print(resident() - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not Path("/proc/self/statm").exists(), reason="there is no glibc, or no /proc"
)
def test_freed_activations_stay_with_the_process() -> None:
    def kept(*arguments: str) -> int:
        done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert kept("keep") > 0.8 * COUNT * EACH
    assert kept() < 0.2 * COUNT * EACH  # else the test shows nothing
