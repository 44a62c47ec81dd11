import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Bad input, told in one sentence: what came, what was expected, the way out. Scripts exit with 2 on it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(" ".join(sentence.split()))  # a value of the user's or a library's words may hold line breaks


class RunError(RuntimeError):
    """A run that cannot go on, told in one sentence: what happened, what is kept, the way out. Exit code 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known name, or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
