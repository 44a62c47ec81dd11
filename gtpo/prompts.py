"""The paper's prompt and completion format (Appendix 8.2)."""

REASONING_OPEN, REASONING_CLOSE = "<reasoning>", "</reasoning>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
TAGS = (REASONING_OPEN, REASONING_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)

SYSTEM_PROMPT = (  # box 8.2, word for word
    "You are a helpful assistant for solving math problems.\n"
    f"Given a question, first think step by step between {REASONING_OPEN} and {REASONING_CLOSE}.\n"
    f"Then, give the final answer between {ANSWER_OPEN} and {ANSWER_CLOSE}."
)


def to_messages(question: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation that asks one question, or a conversation as it is; the chat template turns it into tokens."""
    if not isinstance(question, str):
        return question
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def to_completion(reasoning: str, answer: str) -> str:
    """A completion in the paper's format: the reference for SFT, full score for formatting."""
    return f"{REASONING_OPEN}\n{reasoning}\n{REASONING_CLOSE}\n{ANSWER_OPEN}\n{answer}\n{ANSWER_CLOSE}"


def follows_format(text: str) -> bool:
    """Whether each of the four tags occurs exactly once, in order, and only white space follows the last one.

    The paper says "includes all tags"; the order is that of the prompt, the rule for the end that of the authors' code.
    Text before and between the tags is allowed.
    """
    positions = [text.find(tag) for tag in TAGS]
    once = all(text.count(tag) == 1 for tag in TAGS)
    return once and positions == sorted(positions) and text.rstrip().endswith(ANSWER_CLOSE)
