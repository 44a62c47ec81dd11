"""Structure of an answer: its kind and its elements."""

import pytest

from gtpo.grading.structure import parse_structure


@pytest.mark.parametrize(
    ("text", "kind", "items"),
    [
        ("18", "", ["18"]),
        ("((18))", "", ["18"]),
        ("|x|", "", ["|x|"]),
        ("1,2", "list", ["1", "2"]),
        (r"\{1,2\}", "set", ["1", "2"]),
        (r"\{\emptyset\}", "set", [r"\emptyset"]),
        (r"\text{A,B}", "list", ["A", "B"]),
        (r"1\pm x", "list", ["1+ x", "1- x"]),
        (r"(1\pm x,2)", "()", ["1+ x", "1- x", "2"]),
        ("(1,2)", "()", ["1", "2"]),
        ("[1,2)", "[)", ["1", "2"]),
        ("[1,2]", "[]", ["1", "2"]),
        ("[1,2,3]", "()", ["1", "2", "3"]),
        ("[[1,2],[3,4]]", "matrix 2", ["1", "2", "3", "4"]),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "matrix 2", ["1", "2", "3", "4"]),
        (r"[0,1)\cup[2,3]", "union", ["[0,1)", "[2,3]"]),
    ],
)
def test_parse_structure(text: str, kind: str, items: list[str]) -> None:
    assert parse_structure(text) == (kind, tuple(items))


def test_a_matrix_with_rows_of_unequal_length_has_no_structure() -> None:
    text = r"\begin{pmatrix}1&2\\3\end{pmatrix}"
    assert parse_structure(text) == ("", (text,))
