"""Renders chat templates for tokenizer.py, in a process that is killed when it is late (child.py).

A template is a program, and may be a stranger's: loops in it need not end, and a few characters can fill the memory. It
runs here as Transformers runs it, in Jinja's sandbox.
"""

import json
from typing import Any

MEMORY_LIMIT = 2**30  # bytes of address space
ORPHAN_LIMIT = 15  # seconds; the parent kills after 5, so this takes effect only if the parent is gone
MAX_LENGTH = 2**24  # characters of a rendered conversation


def prepare() -> None:
    """Import what Transformers renders with; PyTorch is not imported."""
    import transformers.utils.chat_template_utils  # noqa: F401


def reply(template: str, messages: list[Any], variables: Any) -> bytes:
    """[a conversation as text, what is wrong with the template for it], in JSON."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template([messages], chat_template=template, **variables)
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it writes {len(text):,} characters")
    except Exception as error:  # a template raises anything; MemoryError too
        return json.dumps(["", f"{type(error).__name__}: {error}"[:500]]).encode()
    return json.dumps([text, None]).encode()
