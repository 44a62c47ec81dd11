"""One group as HTML: colours, strikethrough and escaping."""

import re
from xml.etree import ElementTree

from gtpo.reports.html import Group, group_html

GREEN = "rgba(46, 160, 67, 0.4)"
GREY = "rgba(128, 128, 128, 0.4)"
PLAIN = None

FIRST = {
    "prompt": "<s>How many?\nSay it.",
    "spans": [("<answer>\n", 0.0), ("1", 1.0), ("</s>", 0.0)],
    "format": 10.0,
    "accuracy": 10.0,
    "advantage": -0.5,
    "entropy": 0.1,
    "delta": 1.0,
}
SECOND = FIRST | {"spans": [("<answer>", 2.0), ("2", 1.0), ("</s>", 2.0)], "format": 1.0, "accuracy": 0.0}
SECOND |= {"advantage": 1.25, "entropy": 0.75, "delta": 0.0}
THIRD = FIRST | {"spans": [("3", 1.0)], "format": 0.0, "accuracy": 2.5, "advantage": 0.0, "entropy": 0.6931}
VIEW = Group(["format", "accuracy"], [FIRST, SECOND, THIRD])


class Table:
    """What a browser shows: the cells of each row, and the pieces of each completion with colour and strikethrough."""

    def __init__(self, text: str) -> None:
        root = ElementTree.fromstring(text)
        self.tags = {element.tag for element in root.iter()}
        self.rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
        self.pieces = [pieces_of(code) for code in root.iterfind(".//td/code")]


def pieces_of(code: ElementTree.Element) -> list[tuple[str | None, str | None, bool]]:
    struck = code.find("s")
    inside = code if struck is None else struck
    pieces = [(inside.text, PLAIN, struck is not None)]
    for span in inside:
        pieces.append((span.text, span.attrib["style"].removeprefix("background: "), struck is not None))
        pieces.append((span.tail, PLAIN, struck is not None))
    return [piece for piece in pieces if piece[0]]


def test_rows_are_completions_sorted_by_advantage() -> None:
    header, *rows = Table(group_html(VIEW)).rows
    assert header == ["A", "format", "accuracy", "⟨H⟩", "completion"]
    assert rows == [
        ["+1.25", "1", "0", "0.750", "<answer>2</s>"],
        ["+0.00", "0", "2.5", "0.693", "3"],
        ["-0.50", "10", "10", "0.100", "<answer>↵1</s>"],
    ]


def test_tokens_have_their_colour_and_filtered_completions_a_line() -> None:
    assert Table(group_html(VIEW)).pieces == [
        [("<answer>", GREEN, True), ("2", PLAIN, True), ("</s>", GREEN, True)],
        [("3", PLAIN, False)],
        [("<answer>↵", GREY, False), ("1", PLAIN, False), ("</s>", GREY, False)],
    ]


def test_a_completion_that_was_cut_off_has_a_mark() -> None:
    _, *rows = Table(group_html(Group(VIEW.rewards, [FIRST, SECOND, THIRD | {"cut_off": True}]))).rows
    assert [row[-1] for row in rows] == ["<answer>2</s>", "3 ✂", "<answer>↵1</s>"]


def test_turns_of_the_prompt_and_gold_answer_are_blocks() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    page = group_html(Group([], [FIRST | {"messages": turns, "gold_answer": "2"}]))
    blocks = re.findall(r"<b>([^<]*)</b><br/><code[^>]*>([^<]*)</code>", page)
    assert blocks == [("system", "Be brief."), ("user", "1 + 1?"), ("gold answer", "2")]
    assert "How many?" not in page  # the text of the template
    assert "<b>" not in group_html(VIEW) and "&lt;s&gt;How many?\nSay it." in group_html(VIEW)
