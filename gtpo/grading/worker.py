"""Runs sympy comparisons in a separate process (symbolic.py): starts it, enforces the time limit, restarts it.

The process starts at the first comparison and is shared by all threads. A forked process starts its own.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from fractions import Fraction
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

START_LIMIT = 60.0  # seconds for the process to import sympy from a cold disk
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE")  # all that the process inherits: no tokens
SCRIPT = Path(__file__).resolve().with_name("symbolic.py")


class Worker:
    """A process that compares pairs of LaTeX expressions, one at a time.

    It runs symbolic.py as a script instead of using multiprocessing. Spawn and forkserver import the user's main module
    again, with torch and trl. A forked process inherits the memory and the locks of the training process.
    """

    def __init__(self) -> None:
        self.calls = 0  # comparisons that reached sympy; the exact rules decide all others
        self.timeouts = 0  # counted by compare.equivalent
        self.process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False
        self._lock = threading.Lock()
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self.reset_after_fork)

    def compare(
        self,
        a: str,
        b: str,
        tolerance: Fraction | None,
        limit: float,
        alone: bool = False,
    ) -> tuple[bool | None, float]:
        """(True if two LaTeX expressions are equal, seconds taken); :func:`gtpo.grading.symbolic.is_same`.

        None instead of a verdict if the ``limit`` in seconds is exceeded or the process dies.
        """
        request = json.dumps([a, b, tolerance, alone], default=str).encode()
        self.calls += 1
        with self._lock:
            reply, seconds = self._request(request, limit)
            if not reply and seconds < limit:  # the process died, perhaps killed from outside: retry once
                reply, more = self._request(request, limit - seconds)
                seconds += more
            if not reply:
                self._start()  # the next process imports what it needs in the background
        return reply == b"1" if reply else None, seconds

    def start(self) -> None:
        """Start the process in the background: the first comparison then waits for less of its imports."""
        with self._lock:
            if self.process is None:
                self._start()

    def stop(self) -> None:
        """Kill the process if it is running."""
        process, self.process = self.process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def reset_after_fork(self) -> None:
        """In a forked child: drop the parent's process, its connection, and the lock that a thread may have held."""
        if self._connection is not None:
            self._connection.close()
        self.process, self._connection, self._lock = None, None, threading.Lock()

    def _request(self, request: bytes, limit: float) -> tuple[bytes, float]:
        """(reply, seconds taken). The reply is empty, and the process stopped, if it is late or dies."""
        self._connect()
        start = time.monotonic()
        reply = b""
        try:
            reply = self._receive(max(limit, 0.01), request)
        finally:
            if not reply:  # also after Ctrl-C: a late reply must not be read as the reply to the next request
                self.stop()
        return reply, time.monotonic() - start

    def _receive(self, limit: float, request: bytes | None = None) -> bytes:
        """The next message of the process, a reply if there is a ``request``; empty if it is late or dies."""
        assert self._connection is not None
        with suppress(OSError, EOFError):
            if request:
                self._connection.send_bytes(request)
            if self._connection.poll(limit):
                return self._connection.recv_bytes()
        return b""

    def _connect(self) -> None:
        """Wait for a process that is ready for a request."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        if self._is_ready:
            return
        message = self._receive(START_LIMIT)
        if not message:  # killed, or late: once more
            self._start()
            message = self._receive(START_LIMIT)
        if message != b"ready":  # what is not installed
            self.stop()
            raise RuntimeError(
                f"the process did not start ({message.decode()}): install math-verify and sympy"
                if message
                else f"the process was killed while it started, or took over {START_LIMIT:g} seconds, two times: "
                "free memory or cores of this machine"
            )
        self._is_ready = True

    def _start(self) -> None:
        self.stop()
        ours, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", SCRIPT, str(theirs.fileno()), *filter(None, sys.path)],
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        self._connection, self._is_ready = ours, False


shared_worker = Worker()


def timeouts() -> int:
    """Pairs of answers in this process that a limit made different, from the cache too; at most one per completion."""
    return shared_worker.timeouts
