"""A reward that differs between the completions of a random model, so that advantages are not 0."""

from typing import Any


def text_sum(completions: list[Any], **kwargs: Any) -> list[float]:
    """The sum of the code points of a completion, modulo 101."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(sum(map(ord, text)) % 101) for text in texts]
