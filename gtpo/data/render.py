"""The process that tries chat templates before tokenizer.py renders them; it is killed when it is late.

A template is a program, and may be a stranger's: loops in it need not end, and a few characters can fill the memory. It
runs here as Transformers runs it, in Jinja's sandbox, as ``python -I render.py FD PATH...``. Requests arrive on the
connection FD as JSON ``[template, variables]``; the reply is an error in JSON, or null.
"""

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

MEMORY_LIMIT = 2**30  # bytes of address space
ORPHAN_LIMIT = 15  # seconds; the parent kills after 5, so this takes effect only if the parent is gone
MAX_LENGTH = 2**24  # characters of a rendered conversation


def main() -> None:
    """Answer requests until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not supported on every system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.path += sys.argv[2:]  # -I ignores PYTHONPATH
    try:
        compiled("")
    except ImportError as error:
        connection.send_bytes(str(error).encode())
        return
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            template, variables = json.loads(connection.recv_bytes())
            signal.alarm(ORPHAN_LIMIT)
            fault = fault_of(template, variables)
            signal.alarm(0)
            connection.send_bytes(json.dumps(fault).encode())


def fault_of(template: str, variables: dict[str, Any]) -> str | None:
    """What is wrong with a template for these variables; None if it renders them."""
    try:
        length = len(compiled(template).render(**variables))
    except MemoryError:
        return f"it takes more than {MEMORY_LIMIT >> 30} GiB of memory"
    except Exception as error:  # a template raises anything
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[-1].strip()[:500]}"
    return f"it writes {length:,} characters" if length > MAX_LENGTH else None


@lru_cache(maxsize=16)
def compiled(template: str) -> Any:
    """A template with the functions and blocks that Transformers gives to it."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):  # {% generation %}, around what an assistant writes
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment.from_string(template)


if __name__ == "__main__":
    main()
