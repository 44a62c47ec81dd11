r"""Rule 3: splits an answer into its elements (tuple, interval, set, list, union, matrix, ``\pm``)."""

import re
from functools import lru_cache

from gtpo.grading.latex import OPENING, TEXT, closing_index, split_top_level

Structure = tuple[str, tuple[str, ...]]


@lru_cache(maxsize=2**14)
def parse_structure(text: str) -> Structure:
    """(kind, items); kinds: the two brackets, "matrix N" (N columns), "list", "set", "union", "" (scalar)."""
    if whole := re.fullmatch(TEXT, text):
        text = whole["content"].strip()  # \text{A, B}
    if matrix := _matrix(text):
        return matrix
    if len(items := split_top_level(text, "[,;]")) > 1:
        return "list", _expand_signs(items)
    if len(items := split_top_level(text, r"\\cup(?![a-zA-Z])")) > 1:
        return "union", tuple(items)
    body = text.removeprefix("\\")
    if body and body[0] in OPENING and closing_index(body, 0) == len(body) - 1:
        inner = body[1:-1].removesuffix("\\")
        if bracketed := _bracketed(body[0] + body[-1], inner):
            return bracketed
    if len(signs := _expand_signs([text])) > 1:
        return "list", signs
    return "", (text,)


def _matrix(text: str) -> Structure | None:
    """The entries of a LaTeX matrix, row by row; None if the text is not a matrix with rows of equal length."""
    matrix = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if not matrix or "\\begin" in matrix[1]:
        return None
    rows = [row.split("&") for row in matrix[1].replace("\\cr", "\\\\").split("\\\\") if row.strip()]
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        return None
    return f"matrix {len(rows[0])}", tuple(entry.strip() for row in rows for entry in row)


def _bracketed(kind: str, inner: str) -> Structure | None:
    """The structure of `inner` in the brackets `kind`; None for an absolute value or a one-element interval."""
    items = _expand_signs(split_top_level(inner, "[,;]"))
    rows = [parse_structure(item) for item in items] if kind == "[]" and inner.startswith("[") else []
    if len(rows) > 1 and len({len(row) for _, row in rows}) == 1:
        return f"matrix {len(rows[0][1])}", tuple(entry for _, row in rows for entry in row)  # [[1,2],[3,4]]
    if kind == "{}" and len(items) > 1:
        return "set", items
    if len(items) > 1:
        return ("()" if len(items) > 2 and kind == "[]" else kind), items  # [1,2,3] is a vector, [1,2] an interval
    if kind == "{}" and inner == r"\emptyset":
        return "set", (inner,)
    if kind in ("()", "{}") and inner:
        return parse_structure(inner)  # redundant brackets
    return None


def _expand_signs(items: list[str]) -> tuple[str, ...]:
    r"""The items, with ``1 \pm \sqrt 2`` replaced by its two values."""
    return tuple(value for item in items for value in _plus_minus(item))


def _plus_minus(item: str) -> list[str]:
    if not re.search(r"\\[pm][pm](?![a-zA-Z])", item):
        return [item]
    upper = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", item)).strip()
    lower = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", item)).strip()
    return [upper.removeprefix("+"), lower.removeprefix("+")]
