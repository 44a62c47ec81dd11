r"""The lenient answer: the last box, else the answer block, else the last number or choice."""

import pytest
from hostile import HOSTILE

from gtpo.grading import compare, grade_text, lenient, lenient_answer, timeouts

# text, gold, lenient answer, right by the strict rule, right by the lenient rule
CASES = [
    ("We add 7 and 11, so the answer is 18.", "18", "18.", False, True),
    (r"First 20, then $\boxed{18}$ as 5 shows", "18", "18", False, True),
    (r"\boxed{20} is wrong, \boxed{18} is right", "18", "18", False, True),
    (r"\boxed{\frac{1}{2}} of 8", "0.5", r"\frac{1}{2}", False, True),
    (r"<answer>20</answer> so \boxed{18}", "18", "18", False, True),
    (r"<answer>18</answer>", "18", "18", True, True),
    (r"\boxed{20}<answer>18</answer>", "18", "20", True, True),  # right by the strict rule is right by the other
    ("18</answer>", "18", "18", False, True),
    ("<answer>18", "18", "18", False, True),
    ("<answer>x^2+1</answer>", "x^2+1", "x^2+1", True, True),  # not its last number
    ("<answer>5\\text{ no solution}</answer>", "18", "5\\text{ no solution}", False, False),
    ("<answer>She makes 18 dollars every day.</answer>", "18", "18", False, True),
    ("<answer>See above.</answer> It was 18, as said.", "18", "18", False, True),
    ("<answer>18</answer><answer>20</answer>", "18", "20", False, False),
    ("The total is $1,234.50 in all", "1234.5", "$1,234.50", False, True),
    ("1,234 and 5,67", "67", "67", False, True),
    ("It falls to -3 degrees", "-3", "-3", False, True),
    ("It falls to −3 degrees", "-3", "−3", False, True),
    ("10-3", "3", "3", False, True),
    ("x-3", "3", "3", False, True),
    ("three quarters, 3/4 of it", "0.75", "3/4", False, True),
    (r"that is 2\frac{1}{2} cups", "2.5", r"2\frac{1}{2}", False, True),
    (r"that is -\frac{3}{4}", "-0.75", r"-\frac{3}{4}", False, True),
    ("a tax of 5 %", r"5\%", "5 %", False, True),
    ("it is 18, not 20", "18", "20", False, False),
    ("so it is (C) 15", r"\text{(C)}", "C", False, True),
    ("so it is (C) 15", "15", "15", False, True),
    ("B or C? The answer is A.", "A", "A", False, True),
    ("Option B. A car is fast", "B", "B", False, True),
    ("the result is 5×10^3", "5000", "5×10^3", False, True),
    (r"so $5 \times 10^{3}$ m", "5000", r"5 \times 10^{3}", False, True),
    ("it is 5 x 10³ now", "5000", "5 x 10³", False, True),
    ("The answer is 1.5e3", "1500", "1.5e3", False, True),
    ("it is 2E-3 or so", "0.002", "2E-3", False, True),
    ("So it is ½.", "1/2", "½", False, True),
    ("So it is 2½ cups", "2.5", "2½", False, True),
    (r"\boxed{2} and \boxed{3}", "2, 3", "2, 3", False, True),
    (r"$x = \boxed{2}$ or $x = \boxed{3}$.", r"\{3, 2\}", "2, 3", False, True),
    ("\\boxed{7}, so\n\\boxed{2} and \\boxed{3}", "2,3", "2, 3", False, True),
    (r"\boxed{2} and \boxed{3}", "3", "3", False, True),  # the last one, where the gold answer is no list
    (r"It is $\frac{1+\sqrt{5}}{2}$", "2", r"\frac{1+\sqrt{5}}{2}", False, False),
    (r"It is $\frac{1+\sqrt{5}}{2}$", r"\frac{1+\sqrt{5}}{2}", r"\frac{1+\sqrt{5}}{2}", False, True),
    ("the code AZYUK2A", "2", None, False, False),
    ("H2O and x2", "2", None, False, False),
    ("$-[0,1)$", "1", "-[0,1)", False, False),
    ("in [0, 1)", "1", "[0, 1)", False, False),
    ("at (3, 4)", "(3,4)", "(3, 4)", False, True),
    ("5 of them, 2x more", "5", "5", False, True),
    (r"it is 2\sqrt{3}", "3", None, False, False),
    ("2^10", "10", None, False, False),
    ("(1+√5)/2", "2", "1", False, False),
    ("walks 12km", "12", "12", False, True),
    ("so $x = 5$ holds", "5", "x = 5", False, True),
    (r"thus \(n = 12\).", "12", "n = 12", False, True),
    ("it costs $5 and sells at $7", "7", "$7", False, True),
    ("a total of (18)", "18", "18", False, True),
    ("**18**", "18", "18", False, True),
    (r"so \textbf{18}", "18", "18", False, True),
    ("no number here", "18", None, False, False),
    ("", "18", None, False, False),
]


@pytest.mark.parametrize(("text", "gold", "answer", "strict", "right"), CASES, ids=[case[0][:30] for case in CASES])
def test_lenient_verdicts(text: str, gold: str, answer: str | None, strict: bool, right: bool) -> None:
    verdicts = grade_text(text, gold)
    assert verdicts[1:] == (strict, answer, right)


def test_other_tags() -> None:
    assert grade_text("[a]18[/a] of 20", "18", "[a]", "[/a]") == ("18", True, "18", True)
    assert grade_text("<answer>18</answer> of 20", "18", "[a]", "[/a]") == (None, False, "20", False)


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:20] for text in HOSTILE])
def test_hostile_text_has_a_verdict(text: str) -> None:
    for completion in (text, f"<answer>{text}</answer>", rf"\boxed{{{text}}}"):
        lenient_answer(completion, None, "18")
        lenient_answer(completion, None, "(A)")
    assert not grade_text(f"<answer>{text}</answer>", "1.23456789").correct_leniently


def test_an_answer_is_compared_once_and_a_late_one_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
