"""The grading process: sympy and math-verify. worker.py starts it as ``python -I symbolic.py FD PATH...``.

It is a process of its own, killed when late, because an alarm does not interrupt sympy's C code. The text is never
evaluated as Python: the only parser is math-verify's LaTeX grammar, which passes only numbers to `sympy.sympify`.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

MEMORY_LIMIT = 2 * 1024**3  # bytes of address space; sympy and the grammar need about 0.3 GiB
ORPHAN_LIMIT = 8  # seconds; the parent kills after 5, so this takes effect only if the parent is gone
MAX_DIGITS = 300  # a constant that is 0 to this many digits counts as 0


def main() -> None:
    """Answer requests, JSON lists on the connection FD, until the parent closes it."""
    number, *paths = sys.argv[1:]
    connection = Connection(int(number))
    sys.path += paths  # -I ignores PYTHONPATH
    limit_resources()
    try:
        prepare()
    except ImportError as error:
        connection.send_bytes(str(error).encode())
        return
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, MemoryError):  # MemoryError: the parent starts a new process
        while True:
            request = json.loads(connection.recv_bytes())
            signal.alarm(ORPHAN_LIMIT)  # the default action ends the process, even inside C code
            answer = reply(*request)
            signal.alarm(0)
            connection.send_bytes(answer)


def limit_resources() -> None:
    """Limit the address space and forbid writing files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not supported on every system; the time limit still applies
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may ignore alarms, and children inherit that


def prepare() -> None:
    """Import sympy and build the grammar's tables."""
    # With gmpy2, ((20!)!)! aborts the process and (10^8)! ignores signals; without it both raise Python errors.
    os.environ.update(SYMPY_GROUND_TYPES="python", MPMATH_NOGMPY="1")
    is_same("x+1", "1+x", None)


def reply(a: str, b: str, tolerance: str | None, alone: bool) -> bytes:
    """1 if `is_same`, or math-verify ``alone``, says so; 0 also if sympy raises an exception."""
    try:
        same = math_verify_accepts(a, b) if alone else is_same(a, b, tolerance)
    except MemoryError:
        raise
    except Exception:  # sympy raises anything, including RecursionError, on text that it cannot handle
        same = False
    return b"1" if same else b"0"


def is_same(a: str, b: str, tolerance: str | None) -> bool:
    """True if two LaTeX expressions, equations, relations or sets, without delimiters, are equal.

    ``tolerance`` is the largest absolute difference of two equal constants, as a fraction; None compares exactly.
    """
    from math_verify import verify
    from sympy import Eq, Expr, Rational, nan, oo, simplify, zoo

    x, y = read_latex(a), read_latex(b)
    if x is None or y is None:
        return False
    if isinstance(x, Expr) and isinstance(y, Expr):
        not_finite = (oo, -oo, zoo, nan)
        if x.has(*not_finite) or y.has(*not_finite):
            return bool(x == y)
        if tolerance is not None and not (x - y).free_symbols:
            return bool(abs((x - y).evalf(30)) <= Rational(tolerance))
        if is_nonzero(x - y):
            return False
    elif isinstance(x, Eq) and isinstance(y, Eq):
        # The same curve: one equation is a multiple of the other. math-verify would solve both, and calls two equations
        # without solutions equal.
        ratio = simplify((x.lhs - x.rhs) / (y.lhs - y.rhs))
        return bool(x.free_symbols and ratio.is_number and ratio.is_finite and not ratio.is_zero)
    # math-verify is not symmetric
    return any(verify(p, q, float_rounding=12, timeout_seconds=None) for p, q in ((x, y), (y, x)))


def math_verify_accepts(gold: str, answer: str) -> bool:
    """The verdict of math-verify with its own settings, both texts as LaTeX. The parent process enforces the limits.

    Its other extraction, of plain arithmetic, is left out: it evaluates the text as Python.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    read = [parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=0) for text in (gold, answer)]
    return verify(*read, timeout_seconds=None)


@lru_cache(maxsize=1024)
def read_latex(latex: str) -> Any:
    """The sympy object of a LaTeX answer; None if it cannot be parsed."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify.parser import NormalizationConfig
    from sympy import Complement, I, Intersection, MatMul, Product, Sum, Union
    from sympy.core.expr import UnevaluatedExpr

    config = LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, boxed="none"),
    )
    found = parse(f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=0)
    if not found:
        return None
    # math-verify parses i as a symbol; as the imaginary unit, i^2 is -1.
    read = found[0].xreplace({s: I for s in found[0].free_symbols if s.name == "i"})
    return read.doit() if read.has(Sum, Product, UnevaluatedExpr, MatMul, Union, Intersection, Complement) else read


def is_nonzero(difference: Any) -> bool:
    """True if the difference of two expressions is provably not zero: it has a nonzero digit at a fixed point.

    Exact where math-verify rounds (1/2^99 and 1/2^98), and fast where it would try to simplify unequal expressions.
    """
    from sympy import Rational
    from sympy.core.evalf import PrecisionExhausted

    symbols = sorted(difference.free_symbols, key=str)
    for numerator, denominator in ((13, 7), (29, 17)):
        point = {symbol: Rational(numerator + 4 * i, denominator + i) for i, symbol in enumerate(symbols)}
        try:
            value = difference.subs(point).evalf(10, maxn=MAX_DIGITS, strict=True)
        except PrecisionExhausted:
            continue
        if value.is_number and not value.is_zero and (value.is_finite or not symbols):  # 0/0 equals nothing
            return True
    return False


if __name__ == "__main__":
    main()
