import json
import re
import socket
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

from gtpo.grading.compare import START_LIMIT, TIME_LIMIT, _last_place


class _GivenUp(Exception):
    """A comparison that ran out of time or memory."""


_REFUSED = [
    re.compile(pattern)
    for pattern in (
        r"[^\x20-\x7e]",  # not mathematics after `normalise`
        r"__|[@#`?\"]|\d{300}|\|(?:.*\|){8}",  # code, absurd integers, bars that the grammar pairs up in every way
        r"\d \.?\d|\d'|[\d)}]_|dots",  # the grammar adds 18 19 to 37, and drops primes, bases and dots
        r"\\infty\]|\[-?\\infty",  # no interval: sympy would read it as a half-open one
        r"\^\{-?\d{5}|\^\{[^a-zA-Z]*\^|\^\{\d+\}\^",  # huge powers (MATH goes to 2^{4950}) and towers of numbers
        r"\^\{\d{3,}\}\)+\^\{\d{3}|[a-z][^()]*\)\^\{\d{3}",  # powers of powers, sums to the power of hundreds
        r"\^\{[^{}]*\^\{[^{}]*\^",  # towers of anything
        r"![\s)}\]]*!|\d{5}[\s)}\]]*!|\^.*[)}]\s*!|\\binom.*\d{5}",  # huge factorials (MATH goes to 2004!)
    )
]


def _refused(text: str) -> bool:
    """Texts that are no answers and would cost sympy seconds or gigabytes."""
    return any(pattern.search(text) for pattern in _REFUSED)


class _Clock:
    """The time that one comparison may still spend in the worker, over all of its elements."""

    def __init__(self) -> None:
        self.left = TIME_LIMIT

    def judge(self, a: str, b: str) -> bool:
        """math-verify's verdict on two expressions, equations, relations or sets."""
        if _refused(a) or _refused(b):
            return False
        tolerance = _last_place(a, b)
        verdict, seconds = _worker.ask(_latex(a), _latex(b), tolerance, self.left)
        self.left -= seconds
        return verdict


def _latex(text: str) -> str:
    """The text for math-verify, without what its grammar misreads."""
    # Floats would be compared with an absolute rounding: decimals become fractions.
    text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    text = text.replace("%", r"*\frac{1}{100}")
    # 1\frac{2}{3}\pi would be 1 times 2/3 times \pi, and (2)(3) the sum 2 + 3.
    text = re.sub(r"(?<![\d}])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\w\\}\]^])\{([^{}]*)\}", r"(\1)", text)
    return re.sub(r"(?<=\d)(?=[({]|\\binom)|(?<=\))(?=[\d(])", "*", text)


class _Worker:
    """The process that runs answer_worker.py: started at the first question, replaced when late or dead."""

    def __init__(self) -> None:
        self.calls = 0
        self.given_up = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._greeted = False

    def ask(self, a: str, b: str, tolerance: Fraction | None, limit: float) -> tuple[bool, float]:
        """(verdict, seconds spent); raises _GivenUp after `limit` seconds, or if the process dies of the question."""
        question = json.dumps([a, b, None if tolerance is None else str(tolerance)]).encode() + b"\n"
        with self._lock:
            self.calls += 1
            spent = 0.0
            for _ in range(2):  # a process that someone else has killed gets a successor, and the question again
                connection = self._connect()
                start = time.monotonic()
                reply = b""
                try:
                    connection.settimeout(max(limit - spent, 0.01))
                    connection.sendall(question)
                    reply = connection.recv(1)
                except OSError:
                    pass  # late, or dead
                finally:
                    spent += time.monotonic() - start
                    if not reply:  # also where Ctrl-C comes between question and reply: they must not go out of step
                        self.stop()
                if reply or spent >= limit:
                    break
            if not reply:
                self.given_up += 1
                self._start()  # the successor imports sympy while the caller goes on
                raise _GivenUp
            return reply == b"1", spent

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # The root holds an evaluate.py, which must not stand in for the package of that name: -I drops the root.
        paths = [path for path in sys.path if path and Path(path).resolve() != _WORKER_FILE.parent]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER_FILE), *paths],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the parent alone
            )
        self._socket, self._greeted = ours, False

    def _connect(self) -> socket.socket:
        """The connection to a process that is ready."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        assert self._socket is not None
        if not self._greeted:
            self._socket.settimeout(START_LIMIT)
            try:
                greeting = self._socket.makefile().readline()
            except OSError as error:
                greeting = str(error)
            if greeting != "ready\n":
                self.stop()
                raise RuntimeError(
                    f"the answer worker did not start ({greeting.strip() or 'it ended at once'}): "
                    "math-verify and sympy are in requirements-cpu.txt"
                )
            self._greeted = True
        return self._socket

    def stop(self) -> None:
        """Ends the process, if one runs."""
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def forget(self) -> None:
        """In a forked child: the process is the parent's, a thread of it may hold the lock, and the socket closes."""
        if self._socket is not None:
            self._socket.close()
        self._process, self._socket, self._lock = None, None, threading.Lock()


_WORKER_FILE = Path(__file__).resolve().with_name("answer_worker.py")


_worker = _Worker()
