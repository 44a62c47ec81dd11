"""How a question is asked and an answer is written: the paper's prompt and tags (Appendix 8.2), or others."""

from collections.abc import Sequence
from dataclasses import dataclass

REASONING_OPEN, REASONING_CLOSE = "<reasoning>", "</reasoning>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
Tags = tuple[str, str, str, str]
Conversation = list[dict[str, str]]  # turns: role and content
TAGS = (REASONING_OPEN, REASONING_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)


def default_system_prompt(tags: Sequence[str] = TAGS) -> str:
    """The paper's system prompt, with these tags."""
    return (  # box 8.2, word for word
        "You are a helpful assistant for solving math problems.\n"
        f"Given a question, first think step by step between {tags[0]} and {tags[1]}.\n"
        f"Then, give the final answer between {tags[2]} and {tags[3]}."
    )


SYSTEM_PROMPT = default_system_prompt()


@dataclass(frozen=True)
class PromptFormat:
    """The system prompt, and the tags of a completion; by default the paper's."""

    system_prompt: str | None = SYSTEM_PROMPT  # None: the question alone
    tags: Tags = TAGS  # around the reasoning, and around the answer

    @property
    def answer_tags(self) -> tuple[str, str]:
        """Around the answer."""
        _, _, start, end = self.tags
        return start, end

    def to_messages(self, question: str | Conversation) -> Conversation:
        """The conversation that asks one question, or one as it is; the chat template turns it into tokens."""
        if not isinstance(question, str):
            return question
        messages = [{"role": "user", "content": question}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def to_completion(self, reasoning: str, answer: str) -> str:
        """A completion in this format: the reference for SFT, full score for formatting."""
        start, end, answer_start, answer_end = self.tags
        return f"{start}\n{reasoning}\n{end}\n{answer_start}\n{answer}\n{answer_end}"

    def follows_format(self, text: str) -> bool:
        """Whether each of the four tags occurs exactly once, in order, and only white space follows the last one.

        The paper says "includes all tags"; the order is that of the prompt, the rule for the end that of the authors'
        code. Text before and between the tags is allowed.
        """
        for tag in self.tags:
            if text.count(tag) != 1:
                return False
        positions = [text.find(tag) for tag in self.tags]
        return positions == sorted(positions) and text.rstrip().endswith(self.tags[-1])

    def has_empty_block(self, text: str) -> bool:
        """Whether a text in this format has no reasoning or no answer between its tags, white space aside."""
        for start, end in (self.tags[:2], self.answer_tags):
            block = text.partition(start)[2].partition(end)[0]
            if not block.strip():
                return self.follows_format(text)
        return False


PAPER = PromptFormat()
to_messages = PAPER.to_messages
to_completion = PAPER.to_completion
follows_format = PAPER.follows_format
