"""One group as HTML: colours, strikethrough and escaping."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from helpers.hostile_html import HOSTILE
from markupsafe import escape

from gtpo.reports.html import Group, group_html

GREEN = "rgba(46, 160, 67, 0.4)"
GREY = "rgba(128, 128, 128, 0.4)"
PLAIN = None

VIEW = Group(
    prompt="<s>How many?\nSay it.",
    tokens=[["<answer>", "\n", "1", "</s>"], ["<answer>", "2", "</s>"], ["3"]],
    rewards={"format": [10.0, 1.0, 0.0], "accuracy": [10.0, 0.0, 2.5]},
    advantages=[-0.5, 1.25, 0.0],
    weights=[[0.0, 0.0, 1.0, 0.0], [2.0, 1.0, 2.0], [1.0]],
    entropy=[0.1, 0.75, 0.6931],
    keep=[1.0, 0.0, 1.0],
)


class Table(HTMLParser):
    """What a browser shows: the cells of each row, and the pieces of each completion with colour and strikethrough."""

    void = frozenset({"br", "meta", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.pieces: list[list[tuple[str, str | None, bool]]] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append((tag, dict(attrs).get("style") or ""))
        if tag == "tr":
            self.rows.append([])
            self.pieces.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = [tag for tag, _ in self.open]
        if "td" in names or "th" in names:
            self.rows[-1][-1] += data
        if "td" in names and "code" in names:
            colours = [match[1] for tag, style in self.open if (match := re.fullmatch("background: (.*)", style))]
            self.pieces[-1].append((data, colours[-1] if colours else PLAIN, "s" in names))


def test_rows_are_completions_sorted_by_advantage() -> None:
    header, *rows = Table(group_html(VIEW)).rows
    assert header == ["A", "format", "accuracy", "⟨H⟩", "completion"]
    assert rows == [
        ["+1.25", "1", "0", "0.750", "<answer>2</s>"],
        ["+0.00", "0", "2.5", "0.693", "3"],
        ["-0.50", "10", "10", "0.100", "<answer>↵1</s>"],
    ]


def test_tokens_are_coloured_by_their_weight_and_filtered_completions_struck_out() -> None:
    assert Table(group_html(VIEW)).pieces[1:] == [
        [("<answer>", GREEN, True), ("2", PLAIN, True), ("</s>", GREEN, True)],
        [("3", PLAIN, False)],
        [("<answer>↵", GREY, False), ("1", PLAIN, False), ("</s>", GREY, False)],
    ]


def test_a_completion_that_was_cut_off_has_a_mark() -> None:
    _, *rows = Table(group_html(dataclasses.replace(VIEW, cut_off=[False, False, True]))).rows
    assert [row[-1] for row in rows] == ["<answer>2</s>", "3 ✂", "<answer>↵1</s>"]


def test_the_turns_of_the_prompt_and_the_gold_answer_are_blocks() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    page = group_html(dataclasses.replace(VIEW, messages=turns, gold_answer="2"))
    blocks = re.findall(r"<b>([^<]*)</b><br><code[^>]*>([^<]*)</code>", page)
    assert blocks == [("system", "Be brief."), ("user", "1 + 1?"), ("gold answer", "2")]
    assert "How many?" not in page  # the text of the template
    assert "<b>" not in group_html(VIEW) and "&lt;s&gt;How many?\nSay it." in group_html(VIEW)


@pytest.mark.parametrize("text", HOSTILE)
def test_everything_is_escaped(text: str) -> None:
    view = Group(text, [[text[:3], text[3:]]], {text: [1.0]}, [0.0], [[1.0, 1.0]], [0.5], [1.0])
    table = Table(group_html(view))
    assert table.rows == [["A", text, "⟨H⟩", "completion"], ["+0.00", "1", "0.500", text]]
    assert table.tags <= {"div", "p", "code", "table", "thead", "tbody", "tr", "th", "td", "span", "s"}
    prompt = group_html(dataclasses.replace(view, tokens=[["x"]], weights=[[1.0]], rewards={}))
    assert escape(text) in prompt and Table(prompt).tags <= table.tags
