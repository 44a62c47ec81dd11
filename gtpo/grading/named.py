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
    if not names_a and not names_b:
        return a, b
    has_both, is_same = bool(names_a and names_b), set(names_a) == set(names_b)
    letters = {name.partition("_")[0] for name in names_a + names_b}
    are_roots = len(letters) == 1 and not is_same and (has_both or "()" not in (a[0], b[0]))
    if has_both and not is_same and not are_roots:
        return a, b
    return _values(a, names_a, are_roots, is_same), _values(b, names_b, are_roots, is_same)


def _names(structure: Structure) -> Items:
    """The name of each element, of the first one for ``x = 2, -3``; empty if they have none."""
    kind, items = structure
    names = [item.rpartition("=")[0].partition("=")[0] for item in items]
    if kind not in ("list", "()", "set") or not NAME.fullmatch(names[0]):
        return ()
    if not any(names[1:]) and not re.search(r"[<>]|\\[lg]eq|\\in(?![a-zA-Z])|\\neq", "".join(items)):
        names = names[:1] * len(names)
    return tuple(names) if all(map(NAME.fullmatch, names)) else ()


def _values(structure: Structure, names: Items, are_roots: bool, by_name: bool) -> Structure:
    """A list of roots, one tuple, or for names that repeat a list of tuples."""
    values = tuple(item.partition("=")[2] or item for item in structure[1])
    count = len(set(names))
    if not names or names != names[:count] * (len(names) // count):
        return structure
    if are_roots or count == 1:
        return "list", values
    order = [*range(count)]
    if by_name or _are_neighbours(names[:count]):
        order.sort(key=names.__getitem__)
    rows = [tuple(values[start + i] for i in order) for start in range(0, len(values), count)]
    return ("()", rows[0]) if len(rows) == 1 else ("list", tuple(f"({','.join(row)})" for row in rows))


def _are_neighbours(names: Items) -> bool:
    """True for x, y, z and for a, b; not for m, b, a slope and an intercept."""
    letters = sorted(map(ord, names)) if max(map(len, names)) == 1 else []
    return bool(letters) and all(y - x <= 2 for x, y in pairwise(letters))
