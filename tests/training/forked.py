"""Workers of a pool forked from one process that has imported everything, which spares each of them seconds.

What they do with frames is that of real ones; how real ones are started, `test_pool.py` shows.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from functools import cache

ASKED = struct.Struct("q")
"""A request: 0 for a worker on the two file descriptors that come along, or the worker whose end to wait for. An
answer: the worker's process, or how it ended."""

_one_at_a_time = threading.Lock()


@cache
def _nursery() -> socket.socket:
    """The other end of a process that forks workers, started when first needed; it ends with this process."""
    ours, theirs = socket.socketpair()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with theirs:
        command = [sys.executable, "-P", "-m", "training.forked", str(theirs.fileno())]
        process = subprocess.Popen(command, env=environment | single, pass_fds=[theirs.fileno()])
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def _answer(number: int, files: list[int]) -> int:
    with _one_at_a_time:
        socket.send_fds(_nursery(), [ASKED.pack(number)], files)
        said = _nursery().recv(ASKED.size, socket.MSG_WAITALL)
    return int(ASKED.unpack(said)[0])


class Forked:
    """A worker process, as far as a pool makes use of one."""

    def __init__(self) -> None:
        (its_input, stdin), (stdout, its_output) = os.pipe(), os.pipe()
        self.pid = _answer(0, [its_input, its_output])
        os.close(its_input)
        os.close(its_output)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self.code: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        self.code = _answer(self.pid, [])
        return self.code

    def poll(self) -> int | None:
        """How it ended, as far as anybody waited for that."""
        return self.code


def serve(asked: socket.socket) -> None:
    """Forks workers and waits for them, until nobody is left to ask."""
    while True:
        data, files, *_ = socket.recv_fds(asked, ASKED.size, 2)
        if not data:
            return
        (number,) = ASKED.unpack(data)
        if number:
            _, status = os.waitpid(number, 0)
            asked.send(ASKED.pack(os.waitstatus_to_exitcode(status)))
            continue
        child = os.fork()
        if not child:
            asked.close()
            os.setsid()
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            try:
                main()
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        for file in files:
            os.close(file)
        asked.send(ASKED.pack(child))


if __name__ == "__main__":
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401

    from coterie.training.pool_worker import main

    serve(socket.socket(fileno=int(sys.argv[1])))
