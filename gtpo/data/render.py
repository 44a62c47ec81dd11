"""Tries chat templates before tokenizer.py renders them, in a process that is killed when it is late (child.py).

A template is a program, and may be a stranger's: loops in it need not end, and a few characters can fill the memory. It
runs here as Transformers runs it, in Jinja's sandbox.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

MEMORY_LIMIT = 2**30  # bytes of address space
ORPHAN_LIMIT = 15  # seconds; the parent kills after 5, so this takes effect only if the parent is gone
MAX_LENGTH = 2**24  # characters of a rendered conversation


def prepare() -> None:
    """Import Jinja."""
    compiled("")


def reply(template: str, variables: dict[str, Any]) -> bytes:
    """What is wrong with a template for these variables, in JSON; null if it renders them."""
    return json.dumps(fault_of(template, variables)).encode()


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
