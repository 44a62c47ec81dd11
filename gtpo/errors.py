"""The two errors that scripts report as one sentence instead of a traceback."""

import difflib
import re
import shlex
import sys
from collections.abc import Iterable


class _OneLine(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))  # user values and library messages have line breaks


class UsageError(_OneLine, ValueError):
    """Invalid user input; the message says what came, what was expected and how to fix it. Scripts exit with code 2."""


class CodeError(UsageError):
    """Code of the user that cannot be used; Python's traceback of its cause is printed above the message."""


class RunError(_OneLine):
    """A run that cannot continue; the message says what happened, what is kept and how to resume. Exit code 1."""


def printable(text: str) -> str:
    """``text`` with control characters escaped, Hub tokens and passwords of URLs hidden: a message quotes its input."""
    text = re.sub(r"(https?:/+)\S*@", r"\1", text)
    text = re.sub(r"\bhf_[A-Za-z0-9]{20,}", "hf_...", text)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def counted(number: int, noun: str) -> str:
    """``1 prompt``, ``1,200 prompts``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def command_again(*flags: str) -> str:
    """The command of this process with more flags, as it can be pasted; never the value of ``--hub_token``."""
    words = ["python", *sys.argv, *flags]
    for i, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag in ("--hub_token", "--hub-token"):
            words[i : i + 2 - bool(equals)] = [flag, "YOUR_TOKEN"]
    return re.sub(r"^python .*?(\w+)/__main__\.py'?", r"python -m \1", shlex.join(words))


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known name, or an empty string."""
    names = list(known)
    exchanged = [other for other in names if sorted(other) == sorted(name)]
    match = exchanged or difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f" (did you mean {match[0]!r}?)" if match else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message without its full stop, or the type of an error without a message."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0].rstrip(".")


def last_line(error: BaseException) -> str:
    """The type of an error and the last line of its message, without control characters and full stop."""
    lines = str(error).strip().splitlines()
    text = ": ".join([type(error).__name__, *lines[-1:]])
    return printable(text).rstrip(".")
