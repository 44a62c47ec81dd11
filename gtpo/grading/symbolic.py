"""The process that owns sympy and math-verify: answers.py starts it, sends pairs of LaTeX answers, kills it when late.

It runs alone (``python -I answer_worker.py PATH...``) because sympy cannot be bounded from inside: a C call outlives
any alarm, and memory is the process's own. Standard input is a socket: a JSON line ``[a, b, tolerance]`` in, one byte
out. Nothing is evaluated as code: the only parser is math-verify's LaTeX grammar.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from fractions import Fraction
from functools import lru_cache
from typing import Any

MEMORY_LIMIT = 2 * 1024**3  # bytes of address space; sympy and the grammar need about 0.3 GiB
ORPHAN_LIMIT = 8  # seconds; the parent kills at 5, so this fires only where the parent is gone
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of <sched.h>
NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS of <sys/prctl.h>
CREATE_RULESET, RESTRICT_SELF = 444, 446  # system calls of Landlock, Linux 5.13
WRITING, TRUNCATING = 0b1111111110010, 1 << 14  # Landlock's rights on files but to execute and to read; Linux 6.2
DIGITS = 300  # a constant that stays 0 to so many digits is taken as 0


def main() -> None:
    """Serve comparisons until the parent closes its end."""
    parent = socket.socket(fileno=0)
    with contextlib.suppress(ValueError, OSError):  # a system without address-space limits still has the time limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    isolate()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent that ignores alarms would have passed that on
    # gmpy2 makes ((20!)!)! abort the process and (10^8)! ignore signals; without it both end as Python errors.
    os.environ.update(SYMPY_GROUND_TYPES="python", MPMATH_NOGMPY="1")
    sys.path.extend(path for path in sys.argv[1:] if path not in sys.path)  # -I dropped PYTHONPATH and the like
    try:
        same("x+1", "1+x", None)  # imports, and builds the grammar's tables, before the clock of a comparison runs
    except ImportError as error:
        parent.sendall(f"{error}\n".encode())
        return
    parent.sendall(b"ready\n")
    for line in parent.makefile("rb"):
        signal.alarm(ORPHAN_LIMIT)  # default action: the process ends, even inside a C call
        try:
            answer = same(*json.loads(line))
        except MemoryError:
            return  # start afresh
        except Exception:  # sympy raises anything, RecursionError included, on text it cannot handle
            answer = False
        signal.alarm(0)
        parent.sendall(b"1" if answer else b"0")


def isolate() -> None:
    """Give up the network and the changing of files, as far as the system allows: the parser reads hostile text.

    A network namespace of its own (Linux, where users may make one), Landlock (Linux 5.13), and a file size limit of 0.
    Files can still be read: Python imports from many places.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if libc.unshare(NEW_NETWORK):  # not root
        libc.unshare(NEW_USER | NEW_NETWORK)
    rights = WRITING | (TRUNCATING if libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1) >= 3 else 0)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(ctypes.c_uint64(rights)), ctypes.c_size_t(8), 0)
    if ruleset >= 0:  # rights that no rule of it grants are gone
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        libc.syscall(RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def same(a: str, b: str, tolerance: str | None) -> bool:
    """True if two LaTeX expressions, equations, relations or sets are equal, either way round.

    Args:
        a: LaTeX without delimiters.
        b: The same.
        tolerance: The unit in the last place where one side is a long decimal; None compares exactly.
    """
    from sympy import Eq, Expr, Rational, nan, oo, simplify, zoo

    x, y = read(a), read(b)
    if x is None or y is None:
        return False
    if isinstance(x, Expr) and isinstance(y, Expr):
        if x.has(oo, -oo, zoo, nan) or y.has(oo, -oo, zoo, nan):
            return bool(x == y)
        if tolerance is not None and not (x - y).free_symbols:
            return bool(abs((x - y).evalf(30)) <= Rational(Fraction(tolerance)))
        if differ(x - y):
            return False
    elif isinstance(x, Eq) and isinstance(y, Eq):
        # The same curve: one side is a multiple of the other. math-verify solves, and takes "no solution" for equal.
        ratio = simplify((x.lhs - x.rhs) / (y.lhs - y.rhs))
        return bool(x.free_symbols and ratio.is_number and ratio.is_finite and not ratio.is_zero)
    return verify_either_way(x, y)


def verify_either_way(x: Any, y: Any) -> bool:
    """math-verify's verdict, which is not symmetric, in both orders; no alarms, because the parent keeps the time."""
    from math_verify import verify

    return any(verify(p, q, float_rounding=12, timeout_seconds=None) for p, q in ((x, y), (y, x)))


@lru_cache(maxsize=1024)
def read(latex: str) -> Any:
    """The sympy object of a LaTeX answer; None if the grammar does not accept it."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify.parser import NormalizationConfig
    from sympy import I

    config = LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, boxed="none"),
    )
    found = parse(f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=0)
    # math-verify leaves i a symbol, and would miss that i^2 = -1.
    return found[0].xreplace({s: I for s in found[0].free_symbols if s.name == "i"}) if found else None


def differ(difference: Any) -> bool:
    """True if an expression is proved not to vanish: a digit other than 0 at a fixed point.

    Exact where math-verify rounds (1/2^99 against 1/2^98), and quick where it would simplify two unequal answers.
    """
    from sympy import Rational
    from sympy.core.evalf import PrecisionExhausted

    symbols = sorted(difference.free_symbols, key=lambda symbol: str(symbol.name))
    for numerator, denominator in ((13, 7), (29, 17)):
        point = {symbol: Rational(numerator + 4 * i, denominator + i) for i, symbol in enumerate(symbols)}
        try:
            value = difference.subs(point).evalf(10, maxn=DIGITS, strict=True)
        except PrecisionExhausted:
            continue
        if value.is_number and not value.is_zero and (value.is_finite or not symbols):  # 0/0 equals nothing
            return True
    return False


if __name__ == "__main__":
    main()
