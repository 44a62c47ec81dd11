"""The prompt is box 8.2 of the paper, and the reference completion has its format."""

from gtpo.prompts import SYSTEM_PROMPT, to_completion, to_messages

BOX_8_2 = """\
You are a helpful assistant for solving math problems.
Given a question, first think step by step between <reasoning> and </reasoning>.
Then, give the final answer between <answer> and </answer>."""


def test_the_system_prompt_is_box_8_2_verbatim() -> None:
    assert SYSTEM_PROMPT == BOX_8_2
    assert to_messages("1 + 1?") == [
        {"role": "system", "content": BOX_8_2},
        {"role": "user", "content": "1 + 1?"},
    ]


def test_a_reference_completion_has_the_tags() -> None:
    assert to_completion("1 + 1 = 2", "2") == "<reasoning>\n1 + 1 = 2\n</reasoning>\n<answer>\n2\n</answer>"
