"""The sandbox: honest programs pass, and what is locked stays locked, by the kernel and by the interpreter alone."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.serve import sandbox
from coterie.serve.sandbox import Verdict, run_program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox runs on Unix")
KERNEL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
LEVELS = [pytest.param(False, id="kernel", marks=pytest.mark.skipif(not KERNEL, reason="needs seccomp")), True]

HONEST = """
import math, re, itertools, collections, json, decimal, statistics
from typing import List
def f(xs: List[int]) -> int:
    return sum(sorted(xs)) + math.gcd(12, 18)
assert f([3, 1, 2]) == 12
print("said to nobody")
assert json.loads('{"a": 1}')["a"] == 1 and decimal.Decimal("0.1") + decimal.Decimal("0.2") == decimal.Decimal("0.3")
"""


@pytest.mark.parametrize("alone", LEVELS)
def test_an_honest_program_passes_and_a_wrong_one_fails_by_its_name(alone: bool) -> None:
    found = run_program(HONEST, interpreter_only=alone)
    assert found == Verdict(True, "", "interpreter" if alone else "kernel")
    assert run_program("assert 1 == 2", interpreter_only=alone).reason == "AssertionError"
    assert run_program("def f(:", interpreter_only=alone).reason == "SyntaxError"


@pytest.mark.parametrize(
    "program", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()", "exit()"]
)
def test_a_program_that_leaves_early_has_not_passed(program: str) -> None:
    assert not run_program(program).passed


def test_an_endless_loop_is_ended_by_its_processor_time() -> None:
    started = time.monotonic()
    assert run_program("while True: pass", seconds=1).reason == "time"
    assert time.monotonic() - started < 60


def test_a_program_that_sleeps_is_ended_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.serve.sandbox._STARTING", 1.0)
    assert run_program("import time; time.sleep(600)", seconds=1).reason == "time"


@pytest.mark.parametrize("alone", LEVELS)
def test_memory_is_bounded(alone: bool) -> None:
    found = run_program("held = bytearray(1 << 30)", memory=1 << 28, interpreter_only=alone)
    assert not found.passed and found.reason in ("MemoryError", "died")


FORKS = """
import os
for _ in range(20):
    try:
        if os.fork() == 0:
            open({place!r} + str(os.getpid()), "w").close()
            while True: pass
    except BaseException:
        continue
"""


@pytest.mark.parametrize("alone", LEVELS)
def test_a_bomb_of_processes_makes_none(tmp_path: Path, alone: bool) -> None:
    found = run_program(FORKS.format(place=f"{tmp_path}/"), interpreter_only=alone)
    assert found.passed and not list(tmp_path.iterdir())
    for program in ("import subprocess; subprocess.run(['/bin/true'])", "import os; os.execv('/bin/true', ['true'])"):
        assert not run_program(program, interpreter_only=alone).passed


@pytest.mark.parametrize("alone", LEVELS)
def test_no_file_is_written_removed_or_renamed(tmp_path: Path, alone: bool) -> None:
    held = tmp_path / "held.txt"
    held.write_text("as it was")
    programs = [
        f"open({str(held)!r}, 'w').write('changed')",
        f"open({str(tmp_path / 'new')!r}, 'x')",
        f"import os; os.open({str(held)!r}, os.O_WRONLY | os.O_TRUNC)",
        f"import os; os.remove({str(held)!r})",
        f"import os; os.rename({str(held)!r}, {str(tmp_path / 'other')!r})",
        f"import os; os.mkdir({str(tmp_path / 'folder')!r})",
        f"import os; os.truncate({str(held)!r}, 0)",
        "open('here', 'w')",
    ]
    for program in programs:
        assert run_program(program, interpreter_only=alone).reason == "PermissionError", program
    assert held.read_text() == "as it was" and list(tmp_path.iterdir()) == [held]


@pytest.mark.parametrize("alone", LEVELS)
def test_nothing_is_connected_to(alone: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        found = run_program(program, interpreter_only=alone)
        assert not found.passed and found.reason in ("PermissionError", "OSError")
        with pytest.raises(TimeoutError):
            server.accept()


AROUND = """
import ctypes, os, runpy, socket, threading
cell = runpy.run_path({cell!r})
libc = ctypes.CDLL(None)
libc.open, libc.fork, libc.unlink, libc.kill, libc.prctl, libc.rename, libc.execv  # found before they are refused
held = os.open({held!r}, os.O_RDONLY)
assert cell["_filter_calls"]()
assert os.read(held, 2) == b"as"
assert libc.open({held!r}, os.O_WRONLY) == -1 and libc.open({new!r}, os.O_CREAT, 0o600) == -1
assert libc.unlink({held!r}) == -1 and libc.rename({held!r}, {new!r}) == -1
assert libc.fork() == -1 and libc.kill(os.getppid(), 0) == -1 and libc.prctl(22, 0, 0, 0, 0) == -1
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
    try:
        socket.socket(family)
    except PermissionError:
        continue
    raise AssertionError(family)
for refused in (lambda: os.execv("/bin/true", ["true"]), lambda: os.chmod({held!r}, 0o777), lambda: os.mkdir({new!r})):
    try:
        refused()
    except PermissionError:
        continue
    raise AssertionError(refused)
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("all refused")
"""


@pytest.mark.skipif(not KERNEL, reason="needs seccomp")
def test_the_kernels_filter_holds_without_the_interpreters_hook(tmp_path: Path) -> None:
    held, new = str(tmp_path / "held"), str(tmp_path / "new")
    Path(held).write_text("as it was")
    cell = str(Path(sandbox.__file__).with_name("cell.py"))
    program = AROUND.format(cell=cell, held=held.encode(), new=new.encode())
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "all refused\n", done.stderr
    assert Path(held).read_text() == "as it was" and not Path(new).exists()


def test_the_environment_and_standard_input_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    program = "import os, sys; assert 'SECRET_OF_MINE' not in os.environ; assert sys.stdin.read() == ''"
    assert run_program(program).passed
    assert run_program("import os; assert os.listdir('.') == []").passed
    assert run_program("import coterie").reason == "ModuleNotFoundError"
