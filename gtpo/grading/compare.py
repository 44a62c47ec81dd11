r"""The one judge of "correct": reads the answer out of a text and decides whether two answers mean the same.

Rewards, evaluation, voting and data loading all ask here, so that a training curve and a table can never disagree. The
cheap and exact rules come first, and most rows end there; sympy is the last resort and lives in another process:

1. equal after `normalise` (delimiters, LaTeX spellings, thousands separators);
2. exact numbers: decimals, fractions, mixed numbers and percentages as `fractions.Fraction`, without a tolerance;
3. structure, element by element: tuples and intervals in order and with their brackets, sets and lists in any order,
   unions, matrices, ``x = ...``;
4. units, number bases, words;
5. math-verify for what is left (surds, polynomials, equations), in one worker process with 5 seconds and 2 GiB.

Model output is hostile input. Nothing here evaluates it: the worker parses a LaTeX grammar, is killed when it is late,
and the answer is then wrong. A text longer than 1,000 characters is no answer. `is_correct` and `equivalent` raise
nothing because of a text, work from any thread, and survive a fork.

Conventions where public graders differ: ``10\%`` equals both ``10`` and ``0.1``; a unit may be missing but not another
one; ``1, 2`` equals ``2, 1`` and ``\{2, 1\}``, and ``(1, 2)`` only in that order; ``204_5`` equals only ``204_5``; a
decimal equals an exact value if it is exact, or right to the last of at least 10 significant digits.
"""
# ruff: noqa: RUF001 (look-alikes of ASCII characters are what `_ascii` is for)

import atexit
import math
import os
import re
from fractions import Fraction
from functools import lru_cache

from gtpo.grading.normalise import _FUNCTIONS, _OPENING, _TEXT, _closing, _depth, normalise
from gtpo.grading.worker import _Clock, _GivenUp, _worker

TIME_LIMIT = 5.0  # seconds that one comparison may spend in the worker
START_LIMIT = 60.0  # seconds for the worker to import sympy, on a cold disk
_MAX_ITEMS = 64  # elements compared in any order, which takes their square
_SIGNIFICANT = 10  # digits from which a decimal may stand for a value that it only rounds

# ---- reading an answer out of a text -----------------------------------------------------------------------


# ---- the verdict -------------------------------------------------------------------------------------------


def is_correct(prediction: str | None, gold: str) -> bool:
    """True if the answer `prediction` means the same as `gold`; None (no answer found) is wrong."""
    return prediction is not None and equivalent(gold, prediction)


def equivalent(a: str, b: str) -> bool:
    """True if two answers mean the same. Symmetric: maj@k groups samples with it. An empty answer equals nothing."""
    first, second = sorted((normalise(a), normalise(b)))  # one order: symmetric by construction, and one cache entry
    return bool(first) and _decide(first, second)


def timeouts() -> int:
    """Comparisons of this process that were given up, out of time or memory, and so counted as wrong."""
    return _worker.given_up


def worker_calls() -> int:
    """Comparisons of this process that reached sympy; all others were decided by the rules of this file."""
    return _worker.calls


@lru_cache(maxsize=2**16)
def _decide(a: str, b: str) -> bool:
    try:
        return _same(a, b, _Clock())
    except (_GivenUp, RecursionError):
        return False


# ---- 1. normal form ----------------------------------------------------------------------------------------


# ---- 2. exact numbers --------------------------------------------------------------------------------------

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"  # ASCII digits only: Fraction() would take 1_8 and Arabic digits
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\(?(?P<inner>-?)(?:(?P<whole>[0-9]+)?\\frac\{{(?P<top>-?{_DECIMAL})\}}\{{(?P<bottom>-?{_DECIMAL})\}}"
    rf"|(?P<over>{_DECIMAL})/(?P<under>-?{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?:(?:\*10\^\{{|[eE])(?P<power>[-+]?[0-9]{{1,3}})\}}?)?)\)?(?P<percent>%?)"
)


@lru_cache(maxsize=2**14)
def _number(text: str) -> tuple[Fraction, bool] | None:
    """The exact value as written and whether a percent sign follows it; None if the text is not a number."""
    match = _NUMBER.fullmatch(text)
    if not match or text.count("(") != text.count(")"):
        return None
    part = match.groupdict()
    if part["decimal"]:
        value = Fraction(part["decimal"]) * Fraction(10) ** int(part["power"] or 0)
    else:
        top, bottom = (part["top"], part["bottom"]) if part["top"] else (part["over"], part["under"])
        if not Fraction(bottom):
            return None
        if part["whole"] and not (top + bottom).isdigit():
            return None  # 3\frac{-1}{2} is no mixed number
        value = Fraction(top) / Fraction(bottom) + int(part["whole"] or 0)
    return value * (-1) ** (part["sign"] + part["inner"]).count("-"), bool(part["percent"])


def _same_number(a: str, b: str) -> bool | None:
    """Exact comparison of two numbers; None if one of them is not a number."""
    x, y = _number(a), _number(b)
    if x is None or y is None:
        return None
    if x[0] == y[0]:
        return True  # 10% and 10 too: MATH writes either
    if x[1] != y[1]:
        return x[0] / (100 if x[1] else 1) == y[0] / (100 if y[1] else 1)
    tolerance = _last_place(a, b)
    return tolerance is not None and abs(x[0] - y[0]) <= tolerance


def _last_place(a: str, b: str) -> Fraction | None:
    """The unit in the last place of a long decimal that is compared with a value of another form; else None."""
    decimals = [text for text in (a, b) if re.fullmatch(rf"-?{_DECIMAL}", text)]
    if len(decimals) != 1 or len(re.sub(r"\D", "", decimals[0]).lstrip("0")) < _SIGNIFICANT or "." not in decimals[0]:
        return None  # two decimals are compared exactly
    return Fraction(1, 10 ** len(decimals[0].partition(".")[2]))


# ---- 3. structure ------------------------------------------------------------------------------------------

_RELATION = r"[<>=]|\\(?:leq|geq|neq)(?![a-zA-Z])"


def _split(text: str, separator: str) -> list[str]:
    """The pieces between the matches of `separator` that no bracket encloses."""
    pieces, start, depth, position = [], 0, 0, 0
    for match in re.finditer(separator, text):
        depth += _depth(text[position : match.start()])
        position = match.start()
        if depth == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    return [*pieces, text[start:].strip()]


@lru_cache(maxsize=2**14)
def _structure(text: str) -> tuple[str, tuple[str, ...]]:
    """(kind, items) of an answer; kind: its two brackets, "matrix N" (columns), "list", "union", or "" (scalar)."""
    if whole := re.fullmatch(_TEXT, text):
        text = whole[2].strip()  # \text{A, B}
    matrix = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if matrix and "\\begin" not in matrix[1]:
        rows = [row.split("&") for row in matrix[1].replace("\\cr", "\\\\").split("\\\\") if row.strip()]
        if rows and all(len(row) == len(rows[0]) for row in rows):
            return f"matrix {len(rows[0])}", tuple(entry.strip() for row in rows for entry in row)
    if len(items := _split(text, "[,;]")) > 1:
        return "list", tuple(piece for item in items for piece in _signs(item))
    if len(items := _split(text, r"\\cup(?![a-zA-Z])")) > 1:
        return "union", tuple(items)
    body = text.removeprefix("\\")
    if body and body[0] in _OPENING and _closing(body, 0) == len(body) - 1:
        inner = body[1:-1].removesuffix("\\")
        kind = body[0] + body[-1]
        items = [piece for item in _split(inner, "[,;]") for piece in _signs(item)]
        rows = [_structure(item) for item in items] if kind == "[]" and inner.startswith("[") else []
        if len(rows) > 1 and len({len(row) for _, row in rows}) == 1:
            return f"matrix {len(rows[0][1])}", tuple(entry for _, row in rows for entry in row)  # [[1,2],[3,4]]
        if kind == "{}" and len(items) > 1:
            return "list", tuple(items)  # a set: the order says nothing
        if len(items) > 1:
            return ("()" if len(items) > 2 and kind == "[]" else kind), tuple(items)  # a vector; [1,2] is an interval
        if kind in ("()", "{}") and inner:
            return _structure(inner)  # redundant brackets
    if len(items := _signs(text)) > 1:
        return "list", tuple(items)
    return "", (text,)


def _signs(item: str) -> list[str]:
    r"""``1 \pm \sqrt 2`` as its two values."""
    if not re.search(r"\\[pm][pm](?![a-zA-Z])", item):
        return [item]
    upper = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", item)).strip()
    lower = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", item)).strip()
    return [upper.removeprefix("+"), lower.removeprefix("+")]


def _same(a: str, b: str, clock: "_Clock") -> bool:
    """The rules after normalisation, on two whole answers or two elements of them."""
    if a == b:
        return bool(a)
    (name_a, value_a), (name_b, value_b) = _assignment(a, clock), _assignment(b, clock)
    if name_a and name_b:
        return _same(value_a, value_b, clock) if name_a == name_b else clock.judge(a, b)
    if name_a or name_b:
        if "=" in a and "=" in b:  # y = 2x + 3 and 2x - y + 3 = 0
            return clock.judge(a, b)
        return _same(value_a, value_b, clock)
    if (value_a, value_b) != (a, b):
        return _same(value_a, value_b, clock)
    (kind_a, items_a), (kind_b, items_b) = _structure(a), _structure(b)
    kinds = {kind_a, kind_b}
    if kinds == {""}:
        return _same_scalar(items_a[0], items_b[0], clock)
    if kinds <= {"list", "union"}:  # a union of intervals may be listed: x < 2 or x > 5
        worded = any(re.fullmatch(r"[A-Za-z ]{2,}", item) for item in items_a)  # a ranking
        same = _same_items(items_a, items_b, clock, ordered=worded)
        return same or (kinds == {"union"} and clock.judge(a, b))
    if kind_a == kind_b or kinds <= {"()", "list", "matrix 1"}:  # 1,2 for (1,2); (1,2) for a column
        return _same_items(items_a, items_b, clock, ordered=True)
    spans = {"()", "(]", "[)", "[]", "union"}
    related = "" in kinds and re.search(rf"{_RELATION}|\\setminus", a + b)
    if (kinds <= spans and "union" in kinds) or (kinds & spans and related):
        return clock.judge(a, b)  # touching intervals for one, x > 2 for an interval
    return False


def _same_items(a: tuple[str, ...], b: tuple[str, ...], clock: "_Clock", *, ordered: bool) -> bool:
    if len(a) != len(b):
        return False
    if ordered or len(a) > _MAX_ITEMS:
        return all(_same(x, y, clock) for x, y in zip(a, b, strict=True))
    rest = list(b)
    for x in a:
        match = next((y for y in rest if x == y), None) or next((y for y in rest if _same(x, y, clock)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


_NAME = re.compile(  # x, x_1, f(x), (x,y), \angle ABC, Area; not \sin x, not "is not"
    rf"(?!.*(?:\\(?:{_FUNCTIONS}|frac|sqrt)|\bnot\b))(?:[A-Za-z\\(),' ]|_\{{\w+\}}|\\text\{{[^{{}}]*\}})+"
)


def _assignment(text: str, clock: "_Clock") -> tuple[str, str]:
    r"""(name, value) of ``x = 5`` or ``x \in [0, 1]``; the name is empty where there is none.

    A chain is worth its last member if its members agree: ``0.56 = 56\%``; ``18 = 19`` stays what it is.
    """
    if ("=" not in text and "\\in" not in text) or len(_split(text, "[,;]")) > 1:
        return "", text
    name, *values = _split(text, r"=|\\in(?![a-zA-Z])")
    if not values or not all(values):
        return "", text
    if not _NAME.fullmatch(name):
        name, values = "", [name, *values]
    if len(values) > 1 and _letters("".join(values)):
        return "", text  # an equation
    if not all(_same(value, values[-1], clock) for value in values[:-1]):
        return "", text
    return name.replace(" ", ""), values[-1]


def _letters(text: str) -> set[str]:
    """The variables of an expression: its letters outside commands, without i and e."""
    return set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+(?:\{[a-z]*matrix\})?", " ", text))) - {"i", "e"}


# ---- 4. units, bases, words --------------------------------------------------------------------------------

_UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inche",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "yr year",
        "g": "g gm gram",
        "kg": "kg kilogram",
        "lb": "lb pound",
        "oz": "oz ounce",
        "ml": "ml milliliter",
        "l": "l liter litre",
        "gal": "gal gallon",
        "$": "dollar usd buck",
        "c": "cent",
        "euro": "euro",
        "am": "am",
        "pm": "pm",
        "2": "square sq 2",
        "3": "cubic cu 3",
        "": "degree deg unit point way digit integer mph people person child children each old total",  # fit any other
    }.items()
    for name in names.split()
}
_NOT_UNITS = re.compile(  # plurals and small words that change the value
    r"plus|minus|times|less|over|not?|is|are|was|if|but|for|than|at|of|to|wrong|false|maybe|about|others?|factorial|equals|versus|modulus|"
    r"tens|dozens?|(?:hundred|thousand|million|billion)s|halves|(?:third|quarter|fourth|fifth)s|squares|cubes|percents"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_TRAILING = re.compile(
    rf"(?P<value>.*[\d)}}\]%]|.*\\pi)\s*(?:{_TEXT}|(?P<words>(?<=[^a-zA-Z\\])[a-zA-Z][a-zA-Z./ ]*))"
    r"(?:\^\{?(?P<power>[23])\}?)?"
)


@lru_cache(maxsize=2**14)
def _unit(text: str) -> tuple[str, str | None]:
    """(value, unit) of a scalar. Unit None: none there; "": one that contradicts nothing, such as units or dogs.

    A bare word is a unit if it is known or a plural (18 ducks). A bare letter is a variable (2s stays 2s) unless the
    other side has that unit; it is marked with a "?".
    """
    match = _TRAILING.fullmatch(text)
    if not match:
        return text, None
    marked, words = match[3], match["words"]
    if marked is not None and not re.fullmatch(r"[A-Za-z./,\s-]*[23]?", marked):
        return text, None  # \text{ maybe 19}
    tokens = re.findall(r"[a-z]\.m\.?|[a-z]+|/|\d", (words if marked is None else marked).lower())
    value, power = match["value"], match["power"] or ""
    if any(_NOT_UNITS.fullmatch(token) for token in tokens):
        return text, None
    if len(tokens) == 1 and tokens[0] in _SCALES:
        return f"{value}*10^{{{_SCALES[tokens[0]]}}}", None
    names = [token.replace(".", "") for token in tokens]
    known = [_UNITS.get(name, _UNITS.get(name.removesuffix("s"))) for name in names]
    loose = match[2] in ("text", "mbox")  # here any word is a unit
    if not loose and tokens and known[-1] is None and not re.search(r"[a-z]{3}s", tokens[-1]):
        return text, None
    if None in known or "" in known:
        return value, ""
    unit = "".join(sorted([*map(str, known), power]))
    return value, f"?{unit}" if marked is None and len(words.strip()) == 1 else unit


def _same_scalar(a: str, b: str, clock: "_Clock") -> bool:
    """Two answers without structure: a number, a number in a base, words, or an expression."""
    if (verdict := _same_number(a, b)) is not None:
        return verdict
    a, b = _plain(a), _plain(b)
    (value_a, unit_a), (value_b, unit_b) = _unit(a), _unit(b)
    if unit_a and unit_b and unit_a.lstrip("?") != unit_b.lstrip("?"):
        return False
    if unit_a and unit_a[0] == "?" and (not unit_b or unit_b[0] == "?"):
        value_a, unit_a = a, None
    if unit_b and unit_b[0] == "?" and not unit_a:
        value_b = b
    if value_a == value_b or ((value_a + value_b).isalpha() and value_a.casefold() == value_b.casefold()):
        return True
    if (value_a, value_b) != (a, b) and (verdict := _same_number(value_a, value_b)) is not None:
        return verdict
    if bool(re.search(_RELATION, value_a)) != bool(re.search(_RELATION, value_b)):
        return False  # 2x = 18 is not 18
    bases = [re.fullmatch(r"(-?[0-9A-Z.]+)_\{(\w+)\}", value) for value in (value_a, value_b)]
    if any(bases):  # 204_5 is neither 204_6 nor 204 nor 54; only a subscript 10 says nothing
        digits_a, digits_b = (
            match[1] if match and match[2] == "10" else value
            for match, value in zip(bases, (value_a, value_b), strict=True)
        )
        return bool(_same_number(digits_a, digits_b))
    if ":" in value_a + value_b:  # ratios and times, part by part: 05:00 is 5:00, and 1:2 is not 1/2
        parts_a, parts_b = value_a.split(":"), value_b.split(":")
        return len(parts_a) == len(parts_b) and all(map(_same_number, parts_a, parts_b))
    if _wordy(value_a) or _wordy(value_b):
        return _squash(value_a) == _squash(value_b) != ""
    if (_number(value_a) or _number(value_b)) and _letters(value_a + value_b) and "\\" not in value_a + value_b:
        return False  # what still carries a variable is not a number; functions may cancel, so sympy sees those
    return not _far_apart(value_a, value_b) and clock.judge(value_a, value_b)


def _plain(text: str) -> str:
    r"""A scalar without its text wrapper, article, choice brackets: ``\text{(E)}`` and ``E``, "four" and 4."""
    if whole := re.fullmatch(_TEXT, text):
        text = whole[2].strip()
    text = re.sub(r"^(?:an?|the|option|choice)(?:\s+(?=[a-zA-Z])|(?=\())", "", text, flags=re.IGNORECASE)
    if choice := re.fullmatch(r"\(([A-Za-z])\)", text):
        text = choice[1]
    return str(_WORDS.index(text.lower())) if text.lower() in _WORDS else text


def _wordy(text: str) -> bool:
    """Words rather than a product of variables: four letters in a row, or two capitals."""
    bare = re.sub(r"\\(?!text|mbox)[a-zA-Z]+", " ", text)
    return bool(re.search(r"[a-zA-Z]{4}|[A-Z]{2}|\\text|\\mbox", bare))


def _squash(text: str) -> str:
    return re.sub(r"[\s'\"{}]|\\(?:text|mbox)|(?<=[a-zA-Z])[.-]", "", text).casefold()


# ---- 5. expressions ----------------------------------------------------------------------------------------

_TOKEN = re.compile(rf"\\frac|\\sqrt|\\pi|{_DECIMAL}|[a-zA-Z]|[-+*/^(){{}}\[\]]")


def _far_apart(a: str, b: str) -> bool:
    """True if floating point proves two expressions unequal, which spares sympy nearly all wrong answers.

    It never proves them equal, and is silent on all that it cannot read or that rounding could spoil.
    """
    x, y = _estimate(a), _estimate(b)
    return x is not None and y is not None and abs(x - y) > 1e-6 * max(1.0, abs(x), abs(y))


@lru_cache(maxsize=2**14)
def _estimate(text: str) -> complex | None:
    try:
        return _Estimate(text).value
    except (ValueError, ArithmeticError, IndexError):
        return None


class _Estimate:
    """The value of an expression of numbers, letters, fractions, roots and powers, each letter at a fixed point.

    A variable may stand for any number, so a difference at one point is a difference. ValueError where the grammar is
    unknown or ambiguous (functions, subscripts, 1/2x) and where an intermediate value is too large to subtract safely.
    """

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        if "".join(self._tokens) != text.replace(" ", ""):
            raise ValueError("unknown token")
        self._tokens.append("")
        self._next = 0
        self.value = self._sum()
        self._expect("")

    def _expect(self, token: str) -> None:
        if self._tokens[self._next] != token:
            raise ValueError("unexpected token")
        self._next += 1

    def _sum(self) -> complex:
        total = 0j
        while True:
            sign = 1
            while self._tokens[self._next] in ("+", "-"):
                sign *= -1 if self._tokens[self._next] == "-" else 1
                self._next += 1
            total += sign * self._product()
            if self._tokens[self._next] not in ("+", "-"):
                return total

    def _product(self) -> complex:
        value, divided = self._power(), False
        while (token := self._tokens[self._next]) not in ("", "+", "-", ")", "}", "]"):
            if token in ("*", "/"):
                self._next += 1
            elif divided:
                raise ValueError("1/2x has two readings")
            divided = token == "/"
            value = value / self._power() if divided else value * self._power()
        if not abs(value) < 1e9:
            raise ValueError("too large for differences of floats")
        return value

    def _power(self) -> complex:
        base = self._atom()
        if self._tokens[self._next] != "^":
            return base
        self._next += 1
        exponent = self._group("{", "}")
        if exponent.imag or (exponent.real % 1 and (base.imag or base.real < 0)):
            raise ValueError("several branches")
        return base**exponent.real

    def _group(self, opening: str, closing: str) -> complex:
        self._expect(opening)
        value = self._sum()
        self._expect(closing)
        return value

    def _atom(self) -> complex:
        token = self._tokens[self._next]
        if token in ("(", "{"):
            return self._group(token, ")" if token == "(" else "}")
        self._next += 1
        if token == r"\pi":
            return complex(math.pi)
        if token == r"\frac":
            return self._group("{", "}") / self._group("{", "}")
        if token == r"\sqrt":
            degree = self._group("[", "]").real if self._tokens[self._next] == "[" else 2.0
            radicand = self._group("{", "}")
            if radicand.imag or radicand.real < 0:
                raise ValueError("several branches")
            return complex(radicand.real ** (1 / degree))
        if token in ("i", "e"):
            return 1j if token == "i" else complex(math.e)
        if token.isalpha():
            return complex(1 + ord(token) / 131)
        if not token[:1].isdigit() and token[:1] != ".":
            raise ValueError("unexpected token")
        mixed = self._tokens[self._next : self._next + 7]
        if token.isdigit() and mixed[:1] == [r"\frac"] and mixed[2].isdigit() and mixed[5].isdigit():
            return float(token) + self._atom()  # 1\frac{1}{2} is three halves
        return complex(float(token))


# ---- 6. the worker -----------------------------------------------------------------------------------------


atexit.register(_worker.stop)
os.register_at_fork(after_in_child=_worker.forget)
