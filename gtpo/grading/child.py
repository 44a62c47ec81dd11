"""The process of worker.py: answers the requests for one script, with limits of memory and time, until it is closed.

It runs as ``python -I child.py SCRIPT FD PATH...``, in which SCRIPT is symbolic.py. A script has
``prepare()``, which imports what it needs before any time limit applies, ``reply(*request) -> bytes``, MEMORY_LIMIT in
bytes of address space, and ORPHAN_LIMIT in seconds. Requests arrive on the connection FD as JSON lists.
"""

import contextlib
import json
import resource
import runpy
import signal
import sys
from multiprocessing.connection import Connection


def main() -> None:
    """Answer requests until the parent closes the connection."""
    script, number, *paths = sys.argv[1:]
    connection = Connection(int(number))
    sys.path += paths  # -I ignores PYTHONPATH
    served = runpy.run_path(script)
    limit_resources(served["MEMORY_LIMIT"])
    try:
        served["prepare"]()
    except ImportError as error:
        connection.send_bytes(str(error).encode())
        return
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, MemoryError):  # MemoryError: the parent starts a new process
        while True:
            request = json.loads(connection.recv_bytes())
            signal.alarm(served["ORPHAN_LIMIT"])  # the default action ends the process, even inside C code
            reply = served["reply"](*request)
            signal.alarm(0)
            connection.send_bytes(reply)


def limit_resources(memory: int) -> None:
    """Limit the address space and forbid writing files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not supported on every system; the time limit still applies
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may ignore alarms, and children inherit that


if __name__ == "__main__":
    main()
