"""An executor whose answers come from worker processes, one thread each unless the plan gives more.

What is handed out are the units of `divided`, which the plan fixes, longest first; a unit's answers are the same bits
whoever computes it, so results depend neither on the number of workers nor on which of them was free. A worker that
dies is replaced and its unit repeated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from coterie.data.sequences import ChoiceSet
from coterie.errors import ConfigError, RunError
from coterie.models.loading import Base
from coterie.protocol import BaseLog, Fit, Weights
from coterie.protocol.messages import leaves
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.frames import pack, read_frame, unpack, write_frame
from coterie.training.pool_worker import Advance, Hello, Job, Told
from coterie.training.shared_bases import share

TRIES = 3
"""How often a unit is begun before its worker's death is taken to be the unit's own doing."""

_AHEAD = 4  # asks for each worker, so that unequal ones even out
_BACKWARD = 3.0  # what a training step costs, in forward passes over the same tokens


class PoolExecutor(Executor):
    """`plan.workers` processes, started when first needed, that share the bases' memory with this one.

    Base weights that a server asks for are read here. Ends with `close`, or with the last reference to it.

    Raises:
        ConfigError: another device than the CPU, whose memory processes do not share.
    """

    def __init__(self, bases: Mapping[str, Base], settings: TrainSettings, plan: Plan) -> None:
        if plan.device != "cpu":
            raise ConfigError(
                f"execution.workers is {plan.workers}, but workers share the memory of a CPU, and execution.device is "
                f"{plan.device!r}; take workers=1"
            )
        super().__init__(bases, settings, plan)
        self._logs: dict[str, BaseLog] = {}
        self._kept = _Kept()
        self._folder: TemporaryDirectory[str] | None = None
        self._workers = [_Worker() for _ in range(plan.workers)]
        weakref.finalize(self, _end, self._workers)

    @property
    def at_once(self) -> int:
        return _AHEAD * self.plan.workers

    @property
    def replaced(self) -> int:
        """How many workers died so far."""
        return sum(worker.died for worker in self._workers)

    def set_base(self, log: BaseLog, spec: str) -> None:
        super().set_base(log, spec)
        self._logs[spec] = log

    def perform(self, units: Sequence[list[Ask]]) -> list[list[Done | Exception]]:
        found: dict[int, list[Done | Exception]] = {}
        waiting: deque[int] = deque()
        for number in sorted(range(len(units)), key=lambda i: -sum(cost(ask, self.settings) for ask in units[i])):
            if isinstance(units[number][0].request, Weights):
                found[number] = self._unit(units[number])
            else:
                waiting.append(number)
                self._kept.add(units[number])
        if waiting and self._folder is None:
            self._folder = share(self.bases)
        busy = self._workers[: len(waiting)]

        def work(worker: _Worker) -> None:
            while waiting:
                try:
                    number = waiting.popleft()
                except IndexError:  # another one was quicker
                    return
                found[number] = self._asked(worker, units[number])

        with ThreadPoolExecutor(max(1, len(busy))) as threads:
            try:
                for running in [threads.submit(work, worker) for worker in busy]:
                    running.result()
            except BaseException:
                waiting.clear()
                self.close()  # which ends what the other threads wait for
                raise
        return [found[number] for number in range(len(units))]

    def close(self) -> None:
        _end(self._workers)
        if self._folder is not None:
            self._folder.cleanup()

    def _asked(self, worker: _Worker, unit: list[Ask]) -> list[Done | Exception]:
        """The answers of one unit by this worker, or by those that take its place."""
        assert self._folder is not None
        hello = Hello(self._folder.name, self.settings, self.plan)
        for _ in range(TRIES):
            try:
                worker.ready(hello)
                job = Job({spec: worker.advance(spec, log) for spec, log in self._logs.items()}, unit)
                try:
                    data = pack(job, self._kept.tokens, worker.known)
                except Exception as error:
                    worker.end()  # it is no longer sure what it has
                    return [_unsendable(unit, error)] * len(unit)
                answer = worker.asked(data)
            except (EOFError, OSError, ValueError):  # the last of a pipe that was closed while it was used
                worker.buried()
            else:
                return _received(answer, len(unit))
        names = ", ".join(ask.party for ask in unit)
        raise RunError(
            f"worker processes ended {TRIES} times while they worked for {names} ({worker.reason}); where memory ran "
            "out, lower execution.workers"
        )


def executor_for(bases: Mapping[str, Base], settings: TrainSettings, plan: Plan) -> Executor:
    """An executor of one process, or with its workers where the plan has more than one."""
    return (Executor if plan.workers == 1 else PoolExecutor)(bases, settings, plan)


def spread(plan: Plan, workers: int, clients: int) -> Plan:
    """The plan for so many workers, in stacks small enough that none is idle while `clients` train."""
    return replace(plan, workers=workers, clients_per_step=min(plan.clients_per_step, max(1, -(-clients // workers))))


class _Kept:
    """The tensors of data sets, which every worker gets once; held here, so that an id stays theirs."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self._tensors: list[Tensor] = []

    def add(self, unit: Sequence[Ask]) -> None:
        """Gives a token to those of this unit that have none."""
        for ask in unit:
            for _, leaf in leaves(ask.data):
                if isinstance(leaf, Tensor) and id(leaf) not in self.tokens:
                    self._tensors.append(leaf)
                    self.tokens[id(leaf)] = len(self._tensors)


class _Worker:
    """One process at a time, what it knows by now, and how many died. `reason`: how the last one did."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.known: set[int] = set()
        self.logs: dict[str, BaseLog] = {}
        self.died = 0
        self.reason = ""
        self.closed = False
        self._changing = threading.Lock()

    def ready(self, hello: Hello) -> None:
        """Starts a process unless there is one."""
        with self._changing:
            if self.closed:
                raise RunError("the pool of workers was closed")
            if self.process is not None:
                return
            self.known, self.logs = set(), {}
            self.process = _start(hello.plan.threads)
        assert self.process.stdin is not None
        write_frame(self.process.stdin, pack(hello))

    def advance(self, spec: str, log: BaseLog) -> Advance:
        """What brings this process' base to the version of `log`."""
        before = self.logs.get(spec, BaseLog()).patches
        same = len(before) <= log.version and all(old is new for old, new in zip(before, log.patches, strict=False))
        kept = len(before) if same else 0
        self.logs[spec] = log
        return Advance(kept, log.since(kept))

    def asked(self, data: bytes) -> bytes:
        """What the process answers to a frame; raises EOFError or OSError when it dies over that."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        write_frame(self.process.stdin, data)
        return read_frame(self.process.stdout)

    def buried(self) -> None:
        """Takes note of a process that is dead."""
        code = self.end()
        self.died += 1
        named = code < 0 and -code in set(signal.Signals)
        self.reason = signal.Signals(-code).name if named else f"exit code {code}"

    def end(self) -> int:
        """Ends the process, which holds nothing that is not held elsewhere; its exit code."""
        with self._changing:
            process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was still to be written finds nobody
                    pipe.close()
        return code


def cost(ask: Ask, settings: TrainSettings) -> float:
    """About how long an ask takes, in tokens that pass forward through the network; 0 where that cannot be told."""
    request, data = ask.request, ask.data
    try:
        if data is None or len(data) == 0:
            return 0.0
        rows = data.options if isinstance(data, ChoiceSet) else data
        tokens = float(rows.lengths.double().mean())
        if not isinstance(request, Fit):
            return min(len(data), getattr(request, "limit", None) or len(data)) * tokens
        steps, epochs = request.steps, request.epochs
        if steps is None and epochs is None:
            steps, epochs = settings.steps, settings.epochs
            steps = None if steps is None else steps * request.times
        examples = steps * settings.batch_size if steps is not None else (epochs or 0) * len(data)
        return _BACKWARD * examples * tokens
    except Exception:  # a malformed request is to fail where it is answered
        return 0.0


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.closed = True
        worker.end()


def _start(threads: int) -> subprocess.Popen[bytes]:
    """A process that finds the modules which this one finds. Its own session: an interruption is this one's to handle.

    A fresh interpreter, no fork: threads and their locks would not survive that.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        # Not by -m, which would name its classes by __main__, and ours are called otherwise.
        [sys.executable, "-P", "-c", "from coterie.training.pool_worker import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def _received(data: bytes, count: int) -> list[Done | Exception]:
    said: Any = unpack(data)
    listed = said if isinstance(said, list) else [said] * count
    return [one.error() if isinstance(one, Told) else one for one in listed]


def _unsendable(unit: Sequence[Ask], error: Exception) -> RunError:
    ask = unit[0]
    return RunError(
        f"{ask.party}: its {type(ask.request).__name__} cannot be handed to a worker process "
        f"({type(error).__name__}: {error}); take execution.workers=1, or make it of tensors and plain values"
    )
