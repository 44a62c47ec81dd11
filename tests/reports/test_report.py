"""One group as HTML: colours, strikethrough and escaping."""

import re
from xml.etree import ElementTree

from gtpo.reports.html import Group, group_html

GREEN = "background: rgba(46, 160, 67, 0.4)"
GREY = "background: rgba(128, 128, 128, 0.4)"

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
THIRD |= {"cut_off": True}
VIEW = Group(["format", "accuracy"], [FIRST, SECOND, THIRD])


def show(group: Group) -> ElementTree.Element:
    """The page as a browser reads it."""
    return ElementTree.fromstring(group_html(group))


def test_rows_are_completions_sorted_by_advantage() -> None:
    header, *rows = [["".join(cell.itertext()) for cell in row] for row in show(VIEW).iter("tr")]
    assert header == ["A", "format", "accuracy", "⟨H⟩", "completion"]
    assert rows == [
        ["+1.25", "1", "0", "0.750", "<answer>2</s>"],
        ["+0.00", "0", "2.5", "0.693", "3 ✂"],
        ["-0.50", "10", "10", "0.100", "<answer>↵1</s>"],
    ]


def test_tokens_have_their_colour_and_filtered_completions_a_line() -> None:
    codes = show(VIEW).findall(".//td/code")
    pieces = [[(span.attrib["style"], span.text) for span in code.iter("span")] for code in codes]
    assert pieces == [[(GREEN, "<answer>"), (GREEN, "</s>")], [], [(GREY, "<answer>↵"), (GREY, "</s>")]]
    assert ["".join(line.itertext()) for line in show(VIEW).iterfind(".//td/code/s")] == ["<answer>2</s>"]


def test_turns_of_the_prompt_and_gold_answer_are_blocks() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    page = group_html(Group([], [FIRST | {"messages": turns, "gold_answer": "2"}]))
    blocks = re.findall(r"<b>([^<]*)</b><br/><code[^>]*>([^<]*)</code>", page)
    assert blocks == [("system", "Be brief."), ("user", "1 + 1?"), ("gold answer", "2")]
    assert "How many?" not in page  # the text of the template
    assert "&lt;s&gt;How many?\nSay it." in group_html(VIEW)
