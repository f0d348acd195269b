"""The server's half of a round with several layers worked on at once (`python benchmarks/server.py --at-once 2`).

Methods whose server does QR, SVD or Gram matrices layer by layer, forty clients of rank 16, layers of 1024 x 1024, one
thread of torch's own for each layer under way. Runs with one and with several alternate, so that both meet the same
load; each is told by the clock and by the seconds of all threads. On a machine with other work the clock tells who else
was there, so the gain stands beside `ideal`: the seconds of one worker over those of the busiest thread of several and
of what is done before and after, which is the gain where every thread has a core.
The run fails where the new states are not the same bits.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from server_all import CLIENTS, RANK, SIZE, played

from coterie.engines.driver import drive_one
from coterie.maths import concurrency
from coterie.maths.concurrency import at_once
from coterie.wire.codec import encode

METHODS = ("flexlora", "fedpa-lora", "fedsrd", "fedex-lora-truncated", "lora-fair", "flora-na")
RUNS = 3


@dataclass(frozen=True)
class Row:
    """One method; seconds of the clock and of all threads, the best and the median of the runs, by workers.

    gain: of the medians of the clock. busiest: seconds of the busiest thread, with those before and after it.
    ideal: `cpu` of one over it.
    """

    method: str
    layers: int
    workers: int
    wall: dict[int, float]
    wall_median: dict[int, float]
    cpu: dict[int, float]
    gain: float
    gain_of_best: float
    busiest: float
    ideal: float


class Booked(ThreadPoolExecutor):
    """Books the seconds of each of its threads."""

    busy: ClassVar[Counter[int]] = Counter()

    def submit(self, work: Any, /, *given: Any, **named: Any) -> Any:
        def booked(*given: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return work(*given, **named)
            finally:
                self.busy[threading.get_ident()] += time.thread_time() - start  # type: ignore[assignment]

        return super().submit(booked, *given, **named)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the clock, and of all threads of this process."""
    clock, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - cpu


def measure(name: str, layers: int, workers: int) -> Row:
    """One method, with one and with several workers."""
    algorithm, engine, one = played(name, layers)
    assert one is not None
    party = engine._server_party(one.number, {})
    states = {}

    def run() -> None:
        states["last"] = drive_one(algorithm.aggregate(one.before, one.uploads, one.server), party, engine.executor)

    made = []
    for count in (1, workers):
        with at_once(count):
            run()
        made.append(encode(states["last"], dense=True))
    if made[0] != made[1]:
        raise SystemExit(f"{name}: the state of {workers} workers is not that of one")
    found: dict[int, list[tuple[float, float]]] = {1: [], workers: []}
    longest = []
    for _ in range(RUNS):
        for count, seconds in found.items():
            Booked.busy.clear()
            with at_once(count):
                seconds.append(timed(run))
        around = seconds[-1][1] - sum(Booked.busy.values())
        longest.append(around + max(Booked.busy.values()))
    cpu = {count: min(cpu for _, cpu in seconds) for count, seconds in found.items()}
    median = {count: statistics.median(wall for wall, _ in seconds) for count, seconds in found.items()}
    best = {count: min(wall for wall, _ in seconds) for count, seconds in found.items()}
    return Row(
        method=name,
        layers=layers,
        workers=workers,
        wall=best,
        wall_median=median,
        cpu=cpu,
        gain=median[1] / median[workers],
        gain_of_best=best[1] / best[workers],
        busiest=min(longest),
        ideal=cpu[1] / min(longest),
    )


def run(names: list[str] | None, layers: int, workers: int) -> list[Row]:
    """Prints a row for each method."""
    concurrency.ThreadPoolExecutor = Booked  # type: ignore[misc, attr-defined]
    print(f"{layers} layers of {SIZE} x {SIZE}, {CLIENTS} clients of rank {RANK}; best seconds (of all threads)")
    rows = []
    for name in names or METHODS:
        rows.append(row := measure(name, layers, workers))
        told = "  ".join(f"{count} at once {row.wall[count]:.3f} ({row.cpu[count]:.3f})" for count in row.wall)
        print(f"{name:20} {told}  gain {row.gain_of_best:.2f}, median {row.gain:.2f}; ideal {row.ideal:.2f}")
    return rows
