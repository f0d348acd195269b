"""The inside of the sandbox: a script that locks its own process down and then runs one program.

Started by `coterie.serve.sandbox` in an interpreter of its own; it imports nothing outside the standard library. What
is to run comes as JSON on standard input, the verdict goes out on standard output. Locks, in this order:

1. limits of the system on processor time, memory, file size, open files and processes;
2. where the system allows it, name spaces of its own: no network interface is up, and root's powers are left behind;
3. a hook of the interpreter, which refuses to write files, connect, and start processes;
4. on Linux a filter of the kernel (seccomp): a list of system calls that a computation needs. Every other one fails,
   among them sockets, new processes and threads, signals to others, and opening a file in order to write.

The fourth holds against a program that means harm. The third alone does not: it stops mistakes. Neither hides the
files that the user may read.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
import sys
from typing import Any

_ARCHITECTURES = {
    # AUDIT_ARCH; the numbers of the calls that a computation needs: on what is open, memory, handlers of signals, time,
    # what and where it is; then openat, and open where there is one: (number, which argument is flags).
    "x86_64": (
        0xC000003E,
        "0-1 3-15 17 19-25 28 32-33 35-39 60 63 72 79 89 96-100 102 104 107-108 110 131 158 186 201-202 204 "
        "217 228-231 262 267 269-271 273 292-293 309 318 332 334 439",
        [(257, 2), (2, 1)],
    ),
    "aarch64": (
        0xC00000B7,
        "17 23-25 48 57 59 61-67 72-73 78-80 93-94 98-99 101-103 113-115 123-124 132 134-135 139 153 160 163 "
        "165 168-169 172-179 214-216 222 226 233 278 291 293 439",
        [(56, 2)],
    ),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # the second answers EPERM
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_NEW_USER, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000

_FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.utime",
    "os.chdir",
    "os.putenv",
    "os.unsetenv",
    "shutil.",
    "tempfile.",
    "pty.",
    "sqlite3.",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "signal.pthread_kill",
    "resource.setrlimit",
    "webbrowser.",
    "urllib.",
    "http.",
    "ftplib.",
    "smtplib.",
)


def main() -> None:
    """Reads an order from standard input, locks this process, runs the program, and writes what came of it."""
    order = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in (0, 1, 2):
        os.dup2(nothing, place)
    os.close(nothing)
    _limit(order["seconds"], order["memory"])
    _leave_the_network()
    for name in order["imports"]:  # while files may still be looked for in any way
        __import__(name)
    sys.addaudithook(_refuse)
    level = "interpreter" if order["interpreter_only"] or not _filter_calls() else "kernel"
    said = _run(order["program"])
    os.write(report, json.dumps({"token": order["token"], "said": said, "level": level}).encode())
    os._exit(0)


def _run(program: str) -> str:
    """Nothing where the program ran to its end, else the kind of what it raised."""
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        return type(error).__name__[:80]
    return ""


def _limit(seconds: float, memory: int) -> None:
    import resource

    whole = int(seconds) + 1
    limits = {
        resource.RLIMIT_CPU: whole,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):  # macOS knows some limits by name only
            continue


def _leave_the_network() -> None:
    """Name spaces of its own, where the system lets this process have them."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    if unshare is not None and unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC) != 0:
        unshare(_NEW_NETWORK)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The interpreter's hook: writing, connecting and starting processes raise PermissionError."""
    if event == "open":
        mode, flags = (*arguments, None, None)[1:3]
        written = isinstance(mode, str) and set(mode) & set("wax+")
        if written or (isinstance(flags, int) and flags & _WRITES):
            raise PermissionError("the sandbox opens no file for writing")
    elif event.startswith(_FORBIDDEN):
        raise PermissionError(f"the sandbox has no {event}")


def _filter_calls() -> bool:
    """Whether the kernel's filter is in force from now on."""
    known = _ARCHITECTURES.get(platform.machine())
    if sys.platform != "linux" or known is None:
        return False
    rules = b"".join(struct.pack("<HBBI", *rule) for rule in _rules(*known))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]

    held = Program(len(rules) // 8, rules)
    alone = _prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    return alone and bool(_prctl(_SET_SECCOMP, _FILTER, ctypes.byref(held), 0, 0) == 0)


def _rules(architecture: int, calls: str, opens: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """A program for the kernel's packet filter: (operation, jump if true, jump if not, operand)."""
    rules = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for span in calls.split():
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, argument in opens:
        flags = 16 + 8 * argument  # the lower half, as on every machine named here
        rules += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, flags),
            (_ANY_BIT, 0, 1, _WRITES),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        ]
    return [*rules, (_RETURN, 0, 0, _REFUSE)]


_prctl: Any = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1) if os.name == "posix" else (lambda *_: -1)

if __name__ == "__main__":
    main()
