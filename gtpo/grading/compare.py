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
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
import unicodedata
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

MAX_LENGTH = 1_000  # characters; the longest answer in MATH has 168
TIME_LIMIT = 5.0  # seconds that one comparison may spend in the worker
START_LIMIT = 60.0  # seconds for the worker to import sympy, on a cold disk
_MAX_DEPTH = 40  # nested brackets; the grammar is recursive
_MAX_ITEMS = 64  # elements compared in any order, which takes their square
_SIGNIFICANT = 10  # digits from which a decimal may stand for a value that it only rounds

# ---- reading an answer out of a text -----------------------------------------------------------------------


def extract_answer(text: str) -> str | None:
    """The content of the last complete ``<answer>...</answer>`` block, stripped; in time linear in the text.

    None if there is no such block, if the last one is empty, or if blocks disagree: listing several answers is not
    answering. A block starts at the last ``<answer>`` before its ``</answer>``.
    """
    blocks: list[str] = []
    position = 0
    while (end := text.find("</answer>", position)) >= 0:
        start = text.rfind("<answer>", position, end)
        if start >= 0:
            block = text[start + len("<answer>") : end].strip()
            if blocks and block != blocks[-1] and not equivalent(block, blocks[-1]):
                return None
            blocks[:] = [block]
        position = end + len("</answer>")
    return blocks[0] or None if blocks else None


def last_boxed(text: str) -> str | None:
    r"""The gold answer of a MATH solution: the content of its last ``\boxed`` or ``\fbox``, None if missing or empty.

    Braces are matched, because 23 % of MATH golds nest them; ``\boxed 2`` and ``\boxed {17}`` occur as well.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        bare = re.match(r"[^\s$\\{}.,]+", rest)
        return bare[0] if bare else None
    end = _closing(rest, 0)
    return rest[1:end].strip() or None if end else None


def gsm8k_gold(answer_text: str) -> str | None:
    """The gold number of a GSM8K solution: the text after its last ``#### ``, commas removed; None if there is none."""
    _, mark, gold = answer_text.rpartition("#### ")
    return gold.replace(",", "").strip() or None if mark else None


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

_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|pi|rho|sigma|tau|phi|omega"
_TEXT = r"\\(text(?:normal|rm|bf|it)?|mbox|math(?:rm|bf|it|sf)|operatorname)\s*\{([^{}]*)\}"
_AND = r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑﹣－", "-"),
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "±": r"\pm "},
        **{"π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "º": r"^\circ "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap "},
        **{"∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"'},
        **{**dict.fromkeys("€£¥", "$"), "。": "."},
    }
)
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789-+n0123456789")

_PROSE = re.compile(
    r"(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:answer|result|solution|value)s?\s*(?:(?:is|are)\b|=|:)\s*:?\s*",
    re.IGNORECASE,
)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))

# In this order. Each line: what it rewrites, and into what.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),  # sizes of brackets
        (
            r"(?<=\d)\s*(?:,\s*\\!|\{\s*,\s*\}|\\[,;:!])\s*(?=\d{3}(?!\d))",
            "",
        ),  # 1,\!234  1{,}234  1\,234: surely thousands
        (r"(?:\\\\)+\s*$|(?<!\\)\\!|\\(?:display|text)style(?![a-zA-Z])|\\(?:limits|phantom)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[,;:>\s]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\s+", " "),  # runs of blanks would cost the patterns below cubic time
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\[dt]binom(?![a-z])", r"\\binom"),
        (r"<=|\\leq?(?:slant)?(?![a-zA-Z])", r"\\leq "),
        (r">=|\\geq?(?:slant)?(?![a-zA-Z])", r"\\geq "),
        (r"!=|\\neq?(?![a-zA-Z])", r"\\neq "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\*\*", "^"),
        (r"\\(?:cdot|times|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])|\\lparen(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])|\\rparen(?![a-zA-Z])", ")"),
        (r"\\[lr]vert(?![a-zA-Z])|\\vert(?![a-zA-Z])", "|"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"(?:[a-zA-Z]\s*\\in\s*)?\\mathbb\s*\{?R\}?$|(?i:^(?:\\text\{)?all real numbers\}?$)", r"(-\\infty,\\infty)"),
        (r"\\?%|\s*(?:\\text\{)?\s*\bper\s?cent\b\s*\}?", "%"),
        (r"\\?\$|\\text\{\s*\$\s*\}", ""),  # currency, or math delimiters in a sentence
        (r"[(\[]?\s*\\begin\{(?:[bB]matrix|smallmatrix|matrix|array)\}(?:\{[lcr| ]*\})?", r"\\begin{pmatrix}"),
        (r"\\end\{(?:[bB]matrix|smallmatrix|matrix|array)\}\s*[)\]]?", r"\\end{pmatrix}"),
        (rf"\s*,?\s*(?:\\(?:text|mbox)\s*\{{\s*,?\s*{_AND}\s*\}}|{_AND})\s*", ", "),  # a list; 18 or 20 is not 18
        (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])|\\inf(?![a-zA-Z])", r"\\infty "),
        (rf"(?<![a-zA-Z\\])({_FUNCTIONS}|sqrt|{_GREEK})(?![a-zA-Z])", r"\\\1 "),  # plain-text mathematics
        (r"(?<=\d)\^\{?\\(?:text|mathrm)?\{?(?:st|nd|rd|th)\}?\}?$|(?<=\d)(?:st|nd|rd|th)\b", ""),  # ordinals
        (r"^\s*\\approx(?![a-zA-Z])", ""),
        (r"(?<=\S)\s*\\approx(?![a-zA-Z])[^,;]*$", ""),  # 2/3 \approx 0.67: the exact value stands first
        (r"^(\s*[-+]?\s*\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # 3 1/2
        (r"(?<![\w.})^/])(\d+)\s*/\s*(\d+)(?!\s*[\d.!^_])", r"\\frac{\1}{\2}"),  # 1/2x is half of x, as in y = 1/2x + 3
        (r"\s*[({]?(?:\\text\{)?\s*(?:in )?\bbase[ -](\d+)\}?[)}]?$", r"_{\1}"),  # 204 (base 5)
        (r"\\text\s*\{\s*(\w+)\s*\}(?=\s*_)|\\(?:mathrm|text)\{([ie])\}", r"\1\2"),  # \text{A5}_{11}, \mathrm{i}
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),  # x^(1/2)
        (r"\^\s*(-?\d+|[a-zA-Z])", r"^{\1}"),  # x^10 is written by people who mean ten
        (r"_\s*(\d+|[a-zA-Z])(?![a-zA-Z])", r"_{\1}"),
        (r"_\{\s*\(?\s*(?:\\text\{)?(\w+)\}?\s*\)?\s*\}", r"_{\1}"),
    )
]
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z]))")
_THOUSANDS = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")


def _repeating(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as 15/90."""
    once, block = match[1] + match[2], match[3]
    top, bottom = int(once + block) - int(once or 0), 10 ** len(match[2]) * (10 ** len(block) - 1)
    return rf"\frac{{{top}}}{{{bottom}}}"


@lru_cache(maxsize=2**14)
def normalise(text: str) -> str:
    """One spelling for what is written in many: the form in which answers are compared and cached.

    The empty string if there is nothing to compare: a blank text, or one of more than 1,000 characters.
    """
    text = text.strip()
    if not text or len(text) > MAX_LENGTH:
        return ""
    text = _unwrap(" ".join(_ascii(text).split()))
    if len(text) > MAX_LENGTH or _depth(text) or _deepest(text) > _MAX_DEPTH:
        return ""
    text = _REPEATING.sub(_repeating, text)
    text = _THOUSANDS.sub(lambda m: m[0] if _depth(text[: m.start()]) else m[0].replace(",", ""), text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    # Degrees of a plain angle are a unit; inside a function they are a factor, and sin 15 is not sin 15°.
    if re.search(rf"\\(?:{_FUNCTIONS})", text):
        text = re.sub(rf"(\d+(?:\.\d+)?){_DEGREES.pattern}", r"(\\frac{\1\\pi}{180})", text)
    text = _DEGREES.sub("", text)
    text = _brace_arguments(text)
    text = re.sub(r"\s*([^\w\s\\]|\\[{}])\s*", r"\1", text)  # white space matters between words and digits only
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?![a-zA-Z])|\s+(?=\\[a-zA-Z])", r"\1", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;:").removeprefix("+").strip()


def _ascii(text: str) -> str:
    """ASCII for the mathematics of Unicode; NFKC alone would read ``5²`` as 52 and ``1½`` as 11/2."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SCRIPTS) + "}", text)
    text = re.sub(r"[₀-₉]+", lambda m: "_{" + m[0].translate(_SCRIPTS) + "}", text)
    text = re.sub(
        r"[¼-¾⅐-⅞]", lambda m: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", m[0]).split("⁄")), text
    )
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    return "".join(
        " " if unicodedata.category(char) == "Cc" else char for char in text if unicodedata.category(char) != "Cf"
    )


def _unwrap(text: str) -> str:
    """Takes off what surrounds an answer: delimiters, bold, "The answer is", one box, the final period."""
    text = re.sub(r"\*\*([A-Za-z][A-Za-z :]*)\*\*", r"\1", text)  # **Answer:** 18
    for _ in range(8):  # layers
        before = text
        text = text.strip().rstrip(".,;:").strip().removeprefix("=")
        prose = _PROSE.match(text)
        text = text[prose.end() :] if prose else text
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and closing not in inner:
                text = inner
        if text.count("\\boxed") + text.count("\\fbox") == 1:
            box = last_boxed(text)
            outside = text.replace(box, "", 1) if box else text
            if box and not re.search(r"\d", outside):  # a number beside the box is a second answer
                text = box
        if text == before:
            break
    return text


def _brace_arguments(text: str) -> str:
    r"""``\frac12``, ``\frac 9{20}``, ``\sqrt3``, ``\sqrt(2)`` with the braces that TeX lets one leave out."""
    out: list[str] = []
    position = 0
    for match in re.finditer(r"\\(frac|binom|sqrt)(?![a-zA-Z])\s*(\[[^\[\]]*\])?", text):
        if match.start() < position:
            continue
        out.append(text[position : match.end()].rstrip())
        position = match.end()
        for _ in range(1 if match[1] == "sqrt" else 2):
            # \frac123 is 1/2 times 3, but nobody writes \sqrt12 for the root of 1 times 2
            bare = re.compile(r"\s*(\\[a-zA-Z]+|\d+|[^\s{}()\[\]\\])" if match[1] == "sqrt" else r"\s*(\\[a-zA-Z]+|\w)")
            group = re.compile(r"\s*([{(])").match(text, position)
            if group and (group[1] == "{" or match[1] == "sqrt") and (end := _closing(text, group.end() - 1)):
                out.append("{" + _brace_arguments(text[group.end() : end]) + "}")
                position = end + 1
            elif argument := bare.match(text, position):
                if argument[1] == r"\sqrt":  # \frac\sqrt32: leave the inner command its own argument
                    break
                out.append("{" + argument[1] + "}")
                position = argument.end()
            else:
                break
    return "".join(out) + text[position:]


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
_OPENING, _CLOSING = "([{", ")]}"


def _depth(text: str) -> int:
    return sum((char in _OPENING) - (char in _CLOSING) for char in text)


def _deepest(text: str) -> int:
    return max(accumulate((char in _OPENING) - (char in _CLOSING) for char in text), default=0)


def _closing(text: str, start: int) -> int:
    """Index of the brace or bracket that closes the one at `start`; 0 if none does."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPENING) - (text[i] in _CLOSING)
        if depth == 0:
            return i
    return 0


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


class _GivenUp(Exception):
    """A comparison that ran out of time or memory."""


_REFUSED = [
    re.compile(pattern)
    for pattern in (
        r"[^\x20-\x7e]",  # not mathematics after `normalise`
        r"__|[@#`?\"]|\d{300}|\|(?:.*\|){8}",  # code, absurd integers, bars that the grammar pairs up in every way
        r"\d \.?\d|\d'|[\d)}]_|dots",  # the grammar adds 18 19 to 37, and drops primes, bases and dots
        r"\\infty\]|\[-?\\infty",  # no interval: sympy would read it as a half-open one
        r"\^\{-?\d{5}|\^\{[^a-zA-Z]*\^|\^\{\d+\}\^",  # huge powers (MATH goes to 2^{4950}) and towers of numbers
        r"\^\{\d{3,}\}\)+\^\{\d{3}|[a-z][^()]*\)\^\{\d{3}",  # powers of powers, sums to the power of hundreds
        r"\^\{[^{}]*\^\{[^{}]*\^",  # towers of anything
        r"![\s)}\]]*!|\d{5}[\s)}\]]*!|\^.*[)}]\s*!|\\binom.*\d{5}",  # huge factorials (MATH goes to 2004!)
    )
]


def _refused(text: str) -> bool:
    """Texts that are no answers and would cost sympy seconds or gigabytes."""
    return any(pattern.search(text) for pattern in _REFUSED)


class _Clock:
    """The time that one comparison may still spend in the worker, over all of its elements."""

    def __init__(self) -> None:
        self.left = TIME_LIMIT

    def judge(self, a: str, b: str) -> bool:
        """math-verify's verdict on two expressions, equations, relations or sets."""
        if _refused(a) or _refused(b):
            return False
        tolerance = _last_place(a, b)
        verdict, seconds = _worker.ask(_latex(a), _latex(b), tolerance, self.left)
        self.left -= seconds
        return verdict


def _latex(text: str) -> str:
    """The text for math-verify, without what its grammar misreads."""
    # Floats would be compared with an absolute rounding: decimals become fractions.
    text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    text = text.replace("%", r"*\frac{1}{100}")
    # 1\frac{2}{3}\pi would be 1 times 2/3 times \pi, and (2)(3) the sum 2 + 3.
    text = re.sub(r"(?<![\d}])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\w\\}\]^])\{([^{}]*)\}", r"(\1)", text)
    return re.sub(r"(?<=\d)(?=[({]|\\binom)|(?<=\))(?=[\d(])", "*", text)


class _Worker:
    """The process that runs answer_worker.py: started at the first question, replaced when late or dead."""

    def __init__(self) -> None:
        self.calls = 0
        self.given_up = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._greeted = False

    def ask(self, a: str, b: str, tolerance: Fraction | None, limit: float) -> tuple[bool, float]:
        """(verdict, seconds spent); raises _GivenUp after `limit` seconds, or if the process dies of the question."""
        question = json.dumps([a, b, None if tolerance is None else str(tolerance)]).encode() + b"\n"
        with self._lock:
            self.calls += 1
            spent = 0.0
            for _ in range(2):  # a process that someone else has killed gets a successor, and the question again
                connection = self._connect()
                start = time.monotonic()
                reply = b""
                try:
                    connection.settimeout(max(limit - spent, 0.01))
                    connection.sendall(question)
                    reply = connection.recv(1)
                except OSError:
                    pass  # late, or dead
                finally:
                    spent += time.monotonic() - start
                    if not reply:  # also where Ctrl-C comes between question and reply: they must not go out of step
                        self.stop()
                if reply or spent >= limit:
                    break
            if not reply:
                self.given_up += 1
                self._start()  # the successor imports sympy while the caller goes on
                raise _GivenUp
            return reply == b"1", spent

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # The root holds an evaluate.py, which must not stand in for the package of that name: -I drops the root.
        paths = [path for path in sys.path if path and Path(path).resolve() != _WORKER_FILE.parent]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER_FILE), *paths],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the parent alone
            )
        self._socket, self._greeted = ours, False

    def _connect(self) -> socket.socket:
        """The connection to a process that is ready."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        assert self._socket is not None
        if not self._greeted:
            self._socket.settimeout(START_LIMIT)
            try:
                greeting = self._socket.makefile().readline()
            except OSError as error:
                greeting = str(error)
            if greeting != "ready\n":
                self.stop()
                raise RuntimeError(
                    f"the answer worker did not start ({greeting.strip() or 'it ended at once'}): "
                    "math-verify and sympy are in requirements-cpu.txt"
                )
            self._greeted = True
        return self._socket

    def stop(self) -> None:
        """Ends the process, if one runs."""
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def forget(self) -> None:
        """In a forked child: the process is the parent's, a thread of it may hold the lock, and the socket closes."""
        if self._socket is not None:
            self._socket.close()
        self._process, self._socket, self._lock = None, None, threading.Lock()


_WORKER_FILE = Path(__file__).resolve().with_name("answer_worker.py")
_worker = _Worker()
atexit.register(_worker.stop)
os.register_at_fork(after_in_child=_worker.forget)
