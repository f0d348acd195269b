"""One worker of a pool: it answers units of work on bases that it shares, until its standard input ends.

Started by `coterie.training.pool` as a process of its own. Standard input and output carry frames; whatever is printed
here goes to standard error.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from coterie.protocol import BaseLog
from coterie.protocol.base_log import Patch
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.frames import pack, read_frame, unpack, write_frame
from coterie.training.heap import keep_heap
from coterie.training.shared_bases import opened

ABANDONED = 1


@dataclass(frozen=True)
class Hello:
    """The first frame: where the bases are, and what an executor needs beside them."""

    folder: str
    settings: TrainSettings
    plan: Plan


@dataclass(frozen=True)
class Advance:
    """Of a base: how many patches of the worker's log stay, and those that follow."""

    kept: int
    added: tuple[Patch, ...]


@dataclass(frozen=True)
class Job:
    """A unit of work, and what brings the bases to the version on which it is to be done, by spec."""

    bases: dict[str, Advance]
    asks: list[Ask]


@dataclass(frozen=True)
class Told:
    """An exception that cannot be pickled: the name of its class, what it says, and the stack that it came from."""

    kind: str
    text: str
    note: str

    def error(self) -> Exception:
        """An exception of a class of this name that says the same."""
        made: Exception = type(self.kind, (Exception,), {})(self.text)
        made.add_note(self.note)
        return made


def main() -> None:
    """Serves the process that started this one, and ends with it, whatever is being computed."""
    keep_heap()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    hello: Hello = unpack(read_frame(sys.stdin.buffer))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox, hello.folder), daemon=True).start()
    _serve(hello, inbox, output)


def _read(inbox: queue.SimpleQueue[bytes], folder: str) -> None:
    """Takes in frames while others are being answered; at the end of input all ends, the shared folder too."""
    try:
        while True:
            inbox.put(read_frame(sys.stdin.buffer))
    except EOFError:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(ABANDONED)


def _serve(hello: Hello, inbox: queue.SimpleQueue[bytes], output: BinaryIO) -> None:
    """Answers every frame by a list of answers, or by the one exception that kept it from being read."""
    executor = Executor(opened(Path(hello.folder)), hello.settings, hello.plan)
    logs: dict[str, BaseLog] = {}
    shelf: dict[int, Tensor] = {}
    while True:
        try:
            job: Job = unpack(inbox.get(), shelf)
            for spec, advance in job.bases.items():
                before = logs.get(spec, BaseLog()).patches[: advance.kept]
                logs[spec] = BaseLog((*before, *advance.added))
                executor.set_base(logs[spec], spec)
            (answers,) = executor.perform([job.asks])
            said: Any = [answer if isinstance(answer, Done) else _portable(answer) for answer in answers]
        except Exception as error:
            said = _portable(error)
        write_frame(output, pack(said))


def _portable(error: Exception) -> Exception | Told:
    """The error as it can travel, with the stack that it came from as a note."""
    note = "in a worker process:\n" + "".join(traceback.format_exception(error))
    try:
        whole = str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        whole = False
    if not whole:
        return Told(type(error).__name__, str(error), note)
    error.add_note(note)
    return error
