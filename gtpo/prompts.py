"""The text contract of the paper (Appendix 8.2): what the policy is asked, and the shape its completion should have."""

REASONING_OPEN, REASONING_CLOSE = "<reasoning>", "</reasoning>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
TAGS = (REASONING_OPEN, REASONING_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)

SYSTEM_PROMPT = (  # box 8.2, word for word
    "You are a helpful assistant for solving math problems.\n"
    f"Given a question, first think step by step between {REASONING_OPEN} and {REASONING_CLOSE}.\n"
    f"Then, give the final answer between {ANSWER_OPEN} and {ANSWER_CLOSE}."
)


def to_messages(question: str) -> list[dict[str, str]]:
    """The conversation that asks one question; the model's own chat template turns it into tokens."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def to_completion(reasoning: str, answer: str) -> str:
    """A completion in the paper's format: the reference that SFT trains on, full marks for formatting."""
    return f"{REASONING_OPEN}\n{reasoning}\n{REASONING_CLOSE}\n{ANSWER_OPEN}\n{answer}\n{ANSWER_CLOSE}"
