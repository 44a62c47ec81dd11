r"""Rule 3: splits an answer into its elements (tuple, interval, set, list, union, matrix, ``\pm``)."""

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache

from gtpo.grading.latex import OPENING, closing_index, split_top_level

Items = tuple[str, ...]
Structure = tuple[str, Items]

ELLIPSIS = "\\ldots"
MAX_UNORDERED = 64  # elements compared in any order, which takes quadratic time

_MATRIX = re.compile(r"\\begin\{(pmatrix|cases)\}((?:(?!\\begin).)*)\\end\{\1\}")
_COMPONENT = re.compile(  # +2\hat{j}, 2j
    r"(?:^|(?=[+-]))([+-]?)([^+-]*?)\s*\*?(?:\\(?:hat|vec|widehat)\s*\{?([ijk])\}?|(?<![a-zA-Z\\])([ijk]))(?=[+-]|$)"
)


@lru_cache(maxsize=2**14)
def parse_structure(text: str) -> Structure:
    """(kind, items); kinds: the two brackets, "matrix N" (N columns), "cases", "list", "set", "union", "" (scalar)."""
    if special := _matrix(text) if "\\begin" in text else _vector(text):
        return special
    items = split_top_level(text, "[,;]")
    if len(items) > 1:
        return "list", _continued(_expand_signs(items))
    parts = split_top_level(text, r"\\cup(?![a-zA-Z])")
    if len(parts) > 1:
        return "union", tuple(parts)
    body = text.removeprefix("\\")
    if body and body[0] in OPENING and closing_index(body) == len(body) - 1:
        inner = body[1:-1].removesuffix("\\")
        if bracketed := _bracketed(body[0] + body[-1], inner, is_set=body != text):
            return bracketed
    signs = _expand_signs([text])
    if len(signs) > 1:
        return "list", signs
    return "", (text,)


def _matrix(text: str) -> Structure | None:
    """The entries of a LaTeX matrix, row by row; the rows of cases. None if rows are missing or differ in length."""
    match = _MATRIX.fullmatch(text)
    if not match:
        return None
    lines = match[2].replace("\\cr", "\\\\").split("\\\\")
    rows = [re.split(r"\s*[,.]?\s*&\s*", line.strip(" ,.")) for line in lines if line.strip()]
    table = _table(rows)
    if not table or match[1] != "cases":
        return table
    if table[0] == "matrix 1":
        return "list", tuple(itertools.chain(*rows))
    return "cases", tuple(f"({','.join(row)})" for row in rows)


def _table(rows: Sequence[Sequence[str]]) -> Structure | None:
    """The entries of a matrix, row by row; None if there are no rows, or they differ in length."""
    widths = set(map(len, rows))
    return (f"matrix {widths.pop()}", tuple(itertools.chain(*rows))) if len(widths) == 1 else None


def _vector(text: str) -> Structure | None:
    r"""``\hat{i} + 2\hat{j} + 3\hat{k}`` as (1, 2, 3)."""
    if not re.search(r"[ijk]\}?$", text):
        return None
    terms = _COMPONENT.findall(text)
    found = {marked or bare: sign.strip("+") + (factor or "1") for sign, factor, marked, bare in terms}
    if _COMPONENT.sub("", text) or len(found) < max(2, len(terms)):
        return None
    return "()", tuple(found.get(name, "0") for name in ("ijk" if "k" in found else "ij"))


def _bracketed(kind: str, inner: str, *, is_set: bool) -> Structure | None:
    """The structure of `inner` in the brackets `kind`; None for an absolute value or a one-element interval."""
    items = _continued(_expand_signs(split_top_level(inner, "[,;]")))
    if kind == "[]" and inner.startswith("[") and len(items) > 1:  # [[1,2],[3,4]]
        matrix = _table([parse_structure(item)[1] for item in items])
        if matrix:
            return matrix
    if kind == "{}" and (is_set or len(items) > 1):
        return "set", tuple(dict.fromkeys(items))
    if kind == "[]" and len(items) > 2:
        return "()", items  # [1,2,3] is a vector, [1,2] an interval
    if len(items) > 1:
        return kind, items
    if kind in ("()", "{}") and inner:
        return parse_structure(inner)  # redundant brackets
    return None


def _continued(items: Items) -> Items:
    r"""``1, 3, \ldots, 9`` as its five numbers, ``1, 3, 5, \ldots`` as ``1, 3, \ldots``; other items as they are."""
    if ELLIPSIS not in items[1:]:
        return items
    count = items.index(ELLIPSIS)
    try:
        shown, after = [*map(int, items[:count])], [*map(int, items[count + 1 :])]
    except ValueError:
        return items
    step = shown[1] - shown[0] if count > 1 else 1
    whole = [shown[0] + step * i for i in range(MAX_UNORDERED)]
    if after:
        length = whole.index(after[-1]) + 1 if after[-1] in whole else 0
        whole = whole[:length]
    if whole[:count] != shown or whole[len(whole) - len(after) :] != after:
        return items
    return tuple(map(str, whole)) if after else (*items[: min(count, 2)], ELLIPSIS)


def _expand_signs(items: list[str]) -> Items:
    r"""The items, with ``1 \pm \sqrt 2`` replaced by its two values."""
    values = []
    for item in items:
        for plus, minus in ("+-", "-+"):
            value = re.sub(r"\\pm(?![a-zA-Z])", plus, item)
            value = re.sub(r"\\mp(?![a-zA-Z])", minus, value)
            if value != item:
                value = value.strip().removeprefix("+")
                value = f"({value})" if re.fullmatch(r"\d+-\d+", value) else value  # no range
            values.append(value)
            if value == item:
                break
    return tuple(values)
