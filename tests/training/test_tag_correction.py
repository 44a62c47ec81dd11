"""The correction on tags (examples/objectives/tag_correction.py), against the tokens of each tag by decoding."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from examples.objectives.tag_correction import Settings, TagCorrection
from gtpo.prompts import TAGS


def test_the_correction_on_tags_weights_shared_tags_alone(build: Any, tiny: Path) -> None:
    """Of two equal completions: lambda is 2 (A = 1) or 0 (A = -1) on the tags, 1 on words and on a tag that is cut."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "<reasoning> first guess </reasoning> <answer> 5 </answer>"
    ids = torch.tensor([tokenizer(text + text[:11], add_special_tokens=False)["input_ids"]] * 2)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    trainer = build("grpo")
    trainer.settings = Settings()
    trainer.__class__ = type("Tagged", (TagCorrection,), {})
    advantages = torch.tensor([1.0, -1.0])
    inputs = {"completion_ids": ids, "completion_mask": mask, "advantages": advantages, "conflict_mask": mask.bool()}
    weights = torch.ones(ids.shape)
    for tag in TAGS:
        weights[:, _tokens_of(tokenizer, ids[0], tag)] = torch.tensor([[2.0], [0.0]])
    assert 4 <= (weights[0] == 2).sum() < ids.shape[1] - 2
    logps = torch.linspace(-2, -1, ids.numel()).view(ids.shape).requires_grad_()
    loss, measured = trainer.objective(logps, torch.zeros_like(logps), inputs)
    assert torch.equal(measured.weights * mask, weights * mask)
    loss.backward()
    torch.testing.assert_close(logps.grad, -advantages[:, None] * weights * mask / mask.sum(1, keepdim=True) / 2)


def _tokens_of(tokenizer: Any, row: torch.Tensor, tag: str) -> list[int]:
    """The tokens of a tag's first occurrence, by decoding every prefix; none without one."""
    lengths = [len(tokenizer.decode(row[:i])) for i in range(len(row) + 1)]
    start = tokenizer.decode(row).find(tag)
    end = start + len(tag) if start >= 0 else 0
    return [i for i in range(len(row)) if lengths[i] < end and lengths[i + 1] > start]
