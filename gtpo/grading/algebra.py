"""Rule 5: math-verify in the worker process, for pairs that the exact rules cannot decide; and the time limits."""

import contextlib
import json
import re
from fractions import Fraction
from functools import lru_cache

from gtpo.grading.normal_form import rewrite
from gtpo.grading.numerals import rounding_tolerance
from gtpo.grading.worker import shared_worker

TIME_LIMIT = 5.0  # seconds per comparison, over all elements of the answers, and per completion

_DECORATED = r"\\(?:vec|bar|hat|tilde|dot|ddot|overline|widehat|mathcal)\{"
_REFUSED = re.compile(  # texts that are not answers, or that would cost sympy seconds or gigabytes
    r"""(?x)
      [^\x20-\x7e]  # not mathematics after `normalise`
    | __|[@#`?"]|\d{300}|\|(?:.*\|){8}  # code, huge integers, bars that the grammar can pair up in many ways
    | \d[ ]\.?\d|[\d)]_|[^a-zA-Z]}_|dots|:  # the grammar reads 18 19 as 37, and ignores bases and dots
    | (?<![a-zA-Z'])(?<!_\{\w\})'  # it ignores primes, those before a number too
    | \\(?:gcd|lcm)[^()]*\([^()]*[a-zA-Z]  # it takes letters for polynomials
    | \\infty\]|\[-?\\infty  # not an interval; sympy would read it as a half-open one
    | \^\{-?\d{5}  # huge powers (MATH has 2^{4950})
    | \^\{(?:[^a-zA-Z{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\^|\^\{\d+\}\^  # towers of numbers; 2^{3}*5^{2} is none
    | \^\{\d{3,}\}\)+\^\{\d{3}|[a-z][^()]*\)\^\{\d{3}  # powers of powers; sums to a power of 100 or more
    | \\(?:sum|prod|int).*\d{4}  # long sums
    | \^\{[^{}]*\^\{[^{}]*\^  # towers of any kind
    | ![\s)}\]]*!|\d{5}[\s)}\]]*!|\^.*[)}]\s*!|\\binom.*\d{5}  # huge factorials (MATH has 2004!)
    """
    rf"|(?:{_DECORATED}(?:(?!{_DECORATED}).)*+){{12}}"  # the grammar takes 30 ms for each
)


class ComparisonFailed(Exception):
    """A comparison that exceeded its time or memory limit."""


class TimeBudget:
    """Seconds that one comparison, or all comparisons of some completions, may take, TIME_LIMIT each.

    Waiting for the worker to start and for the comparisons of other threads does not count, so that a verdict does not
    depend on them.
    """

    def __init__(self, completions: int = 1) -> None:
        self.seconds_left = completions * TIME_LIMIT

    def sympy_equal(self, a: str, b: str, tolerance: Fraction | None = None) -> bool:
        """True if math-verify says that two expressions are equal; ComparisonFailed above a limit of time or memory.

        ``tolerance``: the largest difference of equal constants; by default that of a long decimal.
        """
        for text in (a, b):
            if _REFUSED.search(text):
                return False
        if tolerance is None:
            tolerance = rounding_tolerance(a, b)
        verdict, seconds = shared_worker.compare(to_latex(a), to_latex(b), tolerance, self.seconds_left)
        if verdict is None:
            raise ComparisonFailed
        self.seconds_left -= seconds
        return verdict


def alternatives(gold: str) -> list[str]:
    """The answers that count, of which any does: of ``["14", "14 apples"]``, a list as text, two; else `gold`.

    Of a GSM8K solution it is what follows ``#### ``.
    """
    _, _, last = gold.rpartition("#### ")
    return listed(gold) or [last or gold]


_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_LIST = re.compile(rf"(?:array\()?[\[(]\s*(?:(?:{_STRING})[\s,]*)+[\])](?:,\s*dtype=[^()]*)?\)?", re.DOTALL)


def listed(text: str) -> list[str] | None:
    """The elements of a list of strings that is written as text, in JSON or as Python and NumPy print it; else None."""
    text = text.strip()
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text) if text.startswith("[") else []
        if found and all(isinstance(each, str) for each in found):
            return found
    if not _LIST.fullmatch(text):
        return None
    return [re.sub(r"\\([\\'\"])", r"\1", element[1:-1]) for element in re.findall(_STRING, text)]


def math_verify_accepts(answer: str | None, gold: str) -> bool:
    """True if math-verify alone says so, without the rules of this package. None (no answer) is wrong.

    So is an answer that exceeds a time or memory limit; it counts as one of `timeouts`.
    """
    verdicts = [_verify_alone(each, answer) for each in alternatives(gold)] if answer else []
    shared_worker.timeouts += None in verdicts
    return any(verdicts)


@lru_cache(maxsize=2**16)
def _verify_alone(gold: str, answer: str) -> bool | None:
    """None for a comparison that exceeds a limit."""
    return shared_worker.compare(gold, answer, None, TIME_LIMIT, alone=True)[0]


def to_latex(text: str) -> str:
    """LaTeX for math-verify, rewritten where its grammar reads the text differently."""
    # Decimals become fractions, because math-verify rounds floats to an absolute precision.
    text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    return rewrite(text, "grammar")
