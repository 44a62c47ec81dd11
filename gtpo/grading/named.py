"""Values with names, ``x = 3, y = 4``, next to a tuple or a list: the names decide the order."""

import re
from itertools import pairwise

from gtpo.grading.latex import FUNCTIONS
from gtpo.grading.structure import Items, Structure

NAME = re.compile(  # x, x_1, f(x), f^{-1}(x), (x,y), \angle ABC, Area; not \sin x
    rf"(?!.*\\(?:{FUNCTIONS}|frac|sqrt))"
    r"(?:[A-Za-z\\(),' |:]|_\{\w+\}|(?<=[a-zA-Z])\^\{-1\}(?=\()|\(-?\d+\)|\\text\{[^{}]*\}"
    r"|\\(?:math(?:bf|rm|it|cal)|vec|overline|overrightarrow|bar|hat|dot|ddot|tilde)\{[A-Za-z]+\})+"
)


def without_names(a: Structure, b: Structure) -> tuple[Structure, Structure]:
    """The two structures as values in comparable order.

    Of two that are named the names decide. Against one without, letters next to each other are in the order of the
    alphabet, others in that of the text; ``x = 1, x = 2`` and ``x_1 = 1, x_2 = 2`` are roots, a list in any order.
    """
    names_a, names_b = _names(a), _names(b)
    by_name = set(names_a) == set(names_b)
    letters = {name.partition("_")[0] for name in names_a + names_b}
    are_roots = len(letters) == 1 and not by_name and "()" not in (a[0], b[0])
    if names_a and names_b and not by_name and not are_roots:
        return a, b
    return _values(a, names_a, are_roots, by_name), _values(b, names_b, are_roots, by_name)


def _names(structure: Structure) -> Items:
    """The name of each element, of the first one for ``x = 2, -3``; empty if they have none."""
    kind, items = structure
    names = [item[: max(item.find("="), 0)] for item in items]
    if kind not in ("list", "()", "set") or not NAME.fullmatch(names[0]):
        return ()
    if not any(names[1:]) and not re.search(r"[<>]|\\[lg]eq|\\in(?![a-zA-Z])|\\neq", "".join(items)):
        names = names[:1] * len(names)
    return tuple(names) if all(map(NAME.fullmatch, names)) else ()


def _values(structure: Structure, names: Items, are_roots: bool, by_name: bool) -> Structure:
    """A list of roots, one tuple, or for names that repeat a list of tuples."""
    count = len(set(names))
    first = names[:count]
    if not names or names != first * (len(names) // count):
        return structure
    values = tuple(item.partition("=")[2] or item for item in structure[1])
    if are_roots or count == 1:
        return "list", values
    # x, y, z and a, b; not m, b, a slope and an intercept
    are_neighbours = "".join(first).isalpha() and all(ord(y) - ord(x) < 3 for x, y in pairwise(sorted("".join(first))))
    ordered = sorted(first) if by_name or are_neighbours else first
    places = [first.index(name) for name in ordered]
    rows = [tuple(values[start + i] for i in places) for start in range(0, len(values), count)]
    return ("()", rows[0]) if len(rows) == 1 else ("list", tuple(f"({','.join(row)})" for row in rows))
