r"""The lenient answer: the last box, else the answer block, else the last number or choice."""

import pytest
from helpers.files import tables_of

from gtpo.grading import compare, grade_text, lenient, timeouts

TABLES = tables_of(__file__)

# text, gold, lenient answer, right by the strict rule, right by the lenient rule
CASES = TABLES["cases"]


@pytest.mark.parametrize(("text", "gold", "answer", "strict", "right"), CASES, ids=[case[0][:30] for case in CASES])
def test_lenient_verdicts(text: str, gold: str, answer: str | None, strict: bool, right: bool) -> None:
    verdicts = grade_text(text, gold)
    assert verdicts[1:] == (strict, answer, right)


def test_other_tags() -> None:
    assert grade_text("[a]18[/a] of 20", "18", "[a]", "[/a]") == ("18", True, "18", True)
    assert grade_text("<answer>18</answer> of 20", "18", "[a]", "[/a]") == (None, False, "20", False)


def test_an_answer_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(lenient, "is_correct", lambda answer, gold, budget: asked.append(answer) or False)
    for text in ("<answer>$20$</answer>", r"<answer>20</answer> \boxed{ 20.}", r"<answer>20</answer> \boxed{21}"):
        grade_text(text, "18")
    assert asked == ["$20$", "20", "20", "21"]  # the second has the same answer in normal form
    monkeypatch.undo()
    monkeypatch.setattr(compare, "decide", lambda a, b: asked.append((a, b)) or (True, 9.0))
    asked.clear()
    late = timeouts()
    assert not grade_text(r"<answer>x+1</answer> \boxed{18}", "18").correct_leniently
    assert (len(asked), timeouts() - late) == (1, 1)  # above its time: one comparison, which counts as wrong
