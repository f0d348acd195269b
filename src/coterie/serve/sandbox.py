"""Runs a generated program once, locked down and for a bounded time; what the locks are stands in `cell`.

On Linux (x86-64, ARM64) the kernel filters the program's calls: it can compute and read files that the user may read,
and nothing else. Elsewhere on Unix limits and a hook of the interpreter remain, which stop mistakes and no malice:
run generated code there on a machine that you can lose. Windows has neither, and no program is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coterie.errors import RunError

MEMORY = 1 << 29
"""Bytes that a program may use."""

_CELL = Path(__file__).with_name("cell.py")
_MOST = 1 << 16
_STARTING = 10.0  # seconds of wall clock beyond the program's own, to start an interpreter on a busy machine
_IMPORTS = ("collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing", "hashlib")


@dataclass(frozen=True)
class Verdict:
    """passed: the program ran to its end. reason: else the kind of exception that it raised, "time", or "died".

    level: which lock held, see `cell`; empty where the program never came to say so.
    """

    passed: bool
    reason: str
    level: Literal["kernel", "interpreter", ""]


def run_program(
    program: str,
    seconds: float = 5.0,
    memory: int = MEMORY,
    *,
    imports: Sequence[str] = _IMPORTS,
    interpreter_only: bool = False,
) -> Verdict:
    """Run Python code to its end, in an empty folder of its own and without an environment, input or output.

    seconds: of processor time; of wall clock ten more. imports: modules that are loaded before the locks close.
    interpreter_only: without the kernel's filter, to see what the other locks do.

    Raises:
        RunError: a system without limits on processes, such as Windows.
    """
    if os.name != "posix":
        raise RunError("generated programs are run on Unix only, where the system can limit them; use Linux")
    token = secrets.token_hex(16)
    order = {
        "program": program,
        "seconds": seconds,
        "memory": memory,
        "imports": list(imports),
        "token": token,
        "interpreter_only": interpreter_only,
    }
    with tempfile.TemporaryDirectory(prefix="coterie-cell-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CELL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said, in_time = _heard(process, json.dumps(order).encode(), seconds + _STARTING)
        finally:
            _end(process)
    try:
        found = json.loads(said)
        told = found["said"] if found["token"] == token else None
    except (ValueError, KeyError, TypeError):
        told = None
    if told is None:
        ended_by_limit = process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return Verdict(False, "time" if not in_time or ended_by_limit else "died", "")
    return Verdict(told == "", told, found["level"])


def _heard(process: subprocess.Popen[bytes], order: bytes, seconds: float) -> tuple[bytes, bool]:
    """What the process says until it closes its output, at most a little; and whether it did so in time."""
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + seconds
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(order)
    said = b""
    while len(said) < _MOST:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return said, False
        part = os.read(process.stdout.fileno(), _MOST)
        if not part:
            break
        said += part
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    return said, True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and whatever is left of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
