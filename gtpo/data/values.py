"""Values of your data as text: prompts, gold answers, solutions. What a file cannot mean is refused, with its place."""

import contextlib
import json
import re
import reprlib
from decimal import Decimal
from typing import Any

from gtpo.data.tables import refuse_half_characters
from gtpo.errors import UsageError
from gtpo.grading import last_boxed, listed

# Texts of a missing value, in any case.
MISSING = {"nan", "n/a", "n.a.", "#n/a", "none", "null", "<na>", "-", "--", "?", "..."}
DECIMAL_COMMA = re.compile(r"(?!-?\d{1,3}(?:,\d{3})+\Z)-?[\d.]+,\d+")  # 2,5 and not 1,234
_ROUNDED = re.compile(r"-?\d{16,}\.0")  # a float as pandas writes it to CSV
_MARKED = re.compile(r"####(?P<gold>[^\n#]+)\Z")  # the end of a GSM8K solution, also on one line
_EXACT = 2**53  # integers from here on are not all floats
_CONVERSATION = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")


def is_empty(value: Any) -> bool:
    """Nothing, whitespace, or pandas' NaN for a missing value."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or value == [] or value != value


def is_missing(value: Any) -> bool:
    """Also the texts that stand for a missing gold answer: N/A, None, -."""
    text = str(value).strip()
    return is_empty(value) or text == "NA" or text.casefold() in MISSING  # Na is sodium


def to_text(value: Any, where: str) -> str:
    """A value as text; 18.0 becomes 18: pandas stores integer columns with missing values as floats."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise UsageError(
            f"{where} is {reprlib.repr(value)}: expected a string or a number (of an object a field, as COLUMN.FIELD)."
        )
    is_float = isinstance(value, float) or _ROUNDED.fullmatch(str(value).strip())
    if is_float and abs(float(value)) >= _EXACT:
        raise UsageError(
            f"{where} is {value}, a float of 2^53 or more, whose last digits are lost: store an integer or text."
        )
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return str(value)


def to_answer(value: Any, elements: list[Any] | None, where: str, answer_list: str, graded: bool | None = True) -> str:
    """An answer as text; ``graded``: the gold answer in it, where it is a whole solution.

    Of ``elements``, where it is a list, any counts, then it is JSON; or all, with commas between them.
    """
    texts = [to_text(each, where) for each in ([value] if elements is None else elements)]
    different = list(dict.fromkeys(map(gold_in, texts) if graded else texts))
    if len(different) == 1 or answer_list == "all":
        return ", ".join(different)
    return json.dumps(different, ensure_ascii=False)


def gold_in(text: str) -> str:
    """The gold answer in a column of your data: of a whole solution what follows its last ``####``, or its last box.

    Another text is the answer itself.
    """
    marked = _MARKED.search(text.strip())
    if marked and "\\boxed" not in marked["gold"]:
        return marked["gold"].strip()
    return last_boxed(text) or text


def elements_of(value: Any) -> list[Any] | None:
    """The elements of a list, also where a text contains it; None for another value."""
    if isinstance(value, str):
        return listed(value)
    return value if isinstance(value, list) else None


def to_question(value: Any, where: str, may_be_answered: bool = False) -> Any:
    """A prompt as a string or a conversation; text that is a conversation in JSON is read as one: CSV has no lists."""
    if isinstance(value, str):
        if not _CONVERSATION.match(value):
            return value
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
        refuse_half_characters(value, f"{where}, the prompt,")
    if not isinstance(value, list) or not all(
        isinstance(turn, dict) and "role" in turn and isinstance(turn.get("content"), str) for turn in value
    ):
        raise UsageError(
            f"{where}: prompt {reprlib.repr(value)} is neither a string nor a conversation, in JSON "
            '[{"role": "user", "content": "..."}].'
        )
    if is_answered(value) and not may_be_answered:
        raise UsageError(
            f"{where}: the last turn of the prompt is the assistant's, so the model would be shown its answer: end the "
            "prompt with the user's turn, and put the answer into --answer_column. train_sft.py takes it as it is."
        )
    return value


def is_answered(question: Any) -> bool:
    """Whether a conversation ends with the assistant's turn."""
    return isinstance(question, list) and question[-1]["role"] == "assistant"
