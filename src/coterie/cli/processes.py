"""What a process and all that descend from it take: CPU time and memory, read from Linux' /proc."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
GROWN = 0.005
"""By what part more must be resident than at the last look, to look again."""


class Watch:
    """Samples a process tree in the background; `peak` is the most memory of all together, in bytes.

    Memory that processes share is divided among those who share it, so that a sum counts it once. The system walks all
    pages to divide them, 25 ms for each GiB, so it is asked only when more is resident than ever before. Processes that
    have ended count with the CPU time that was seen last. Where there is no /proc, both stay 0.
    """

    def __init__(self, pid: int, every: float = 0.2) -> None:
        self.peak = 0
        self._pid, self._every = pid, every
        self._seconds: dict[int, float] = {}
        self._most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def cpu(self) -> float:
        """CPU seconds of the whole tree until now."""
        for pid in descendants(self._pid):
            with suppress(OSError, ValueError, IndexError):
                fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                self._seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return sum(self._seconds.values())

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self.cpu()
            tree = descendants(self._pid)
            resident = sum(map(_resident, tree))
            if resident > (1 + GROWN) * self._most:
                self._most = resident
                self.peak = max(self.peak, sum(map(_memory, tree)))


def descendants(pid: int) -> list[int]:
    """A process and all that it and its descendants started and that still run."""
    parents: dict[int, int] = {}
    if PROC.is_dir():
        for entry in os.scandir(PROC):
            if entry.name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    fields = (PROC / entry.name / "stat").read_text().rpartition(")")[2].split()
                    parents[int(entry.name)] = int(fields[1])
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found)


def busy_cores(seconds: float = 1.0) -> float | None:
    """How many cores worked during so many seconds; None where there is no /proc."""

    def ticks() -> tuple[int, int]:
        fields = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    if not (PROC / "stat").is_file():
        return None
    all_before, idle_before = ticks()
    time.sleep(seconds)
    all_after, idle_after = ticks()
    whole = max(1, all_after - all_before)
    return (os.cpu_count() or 1) * (1 - (idle_after - idle_before) / whole)


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory, shared ones whole."""
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _memory(pid: int) -> int:
    """Bytes of a process that are in memory, shared ones divided."""
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0
