"""ln pi of the tags in sampled completions."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import batch_of, canned_group
from transformers import AutoTokenizer

from examples.objectives.tag_correction import Settings, TagCorrection
from gtpo.prompts import TAGS
from study.tags import TAG_METRICS, tag_logps, tag_span, tag_spans
from study.train import with_measures


def test_a_tag_touches_all_tokens_with_its_parts() -> None:
    assert tag_span(["x <", "ans", "wer>Y"], "<answer>") == (0, 3)
    assert tag_span(["<answer>"], "<answer>") == (0, 1)
    assert tag_span(["a", "<answer>", "b", "<answer>"], "<answer>") == (1, 2)  # the first one
    assert tag_span(["<ans", "wer"], "<answer>") is None
    assert tag_span([None, "<answer", None, ">"], "<answer>") == (1, 4)  # ids above the tokenizer's vocabulary


def test_ln_pi_is_averaged_where_a_tag_is(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    texts = ["<reasoning>\n2 + 3 = 5\n</reasoning>\n<answer>\n5\n</answer>", "<reasoning>\n5\n<answer>"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, rows)) + 2
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    valid = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logps = -torch.arange(1.0, 2 * width + 1).view(2, width)
    spans = [[_span(tokenizer, row, tag) for tag in TAGS] for row in rows]
    assert spans[1][1] is None and spans[1][3] is None
    expected = []
    for column in range(4):
        sums = [sum(logps[i, a].item() for a in span[column]) for i, span in enumerate(spans) if span[column]]
        expected.append(sum(sums) / len(sums))
    assert tag_logps(tag_spans(tokenizer, ids, valid, TAGS), valid, logps).tolist() == expected
    assert math.isnan(tag_logps(tag_spans(tokenizer, ids, valid, ["<x>"]), valid, logps).item())


def test_the_metrics_of_a_step(build: Any) -> None:
    """Each tag is the first token of every completion; a tag that no completion has is not logged."""
    trainer = build("grpo")
    first, *_ = trainer._tokenizer.convert_ids_to_tokens(canned_group(0)[0][:1])
    trainer.__class__ = with_measures(type(trainer), (first, "<x>", first, first))
    batch = batch_of(trainer)
    assert batch["tag_spans"][0].tolist() == [[0, 1], [0, 0], [0, 1], [0, 1]]
    logps = torch.full(batch["completion_mask"].shape, -2.0)
    _, measured = trainer.objective(logps, torch.zeros_like(logps), batch)
    found = {name: float(value) for name, value in measured.metrics.items() if name in TAG_METRICS}
    assert found[TAG_METRICS[0]] == -2.0 and math.isnan(found[TAG_METRICS[1]])
    texts = trainer._tokenizer.batch_decode(batch["completion_ids"])
    assert batch["is_guess"].tolist() == ["guess" in text for text in texts]
    batch["is_guess"][:3] = True
    _, measured = trainer.objective(logps, torch.zeros_like(logps), batch)
    assert float(measured.metrics["guesses"]) == pytest.approx(100 * batch["is_guess"].float().mean())
    assert 25 <= float(measured.metrics["guesses"]) < 100


def test_the_correction_on_tags_weights_shared_tags_alone(build: Any, tiny: Path) -> None:
    """A rewarded and a penalized completion are the same; a fifth tag is cut off by the end.

    | A | tokens | lambda |
    |---|---|---|
    | +1 | <reasoning> first guess </reasoning> ... | 2 on the tags, 1 on the words |
    | -1 | the same | 0 on the tags, 1 on the words |
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "<reasoning> first guess </reasoning> <answer> 5 </answer>"
    ids = torch.tensor([tokenizer(text + text[:11], add_special_tokens=False)["input_ids"]] * 2)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # the fifth tag is cut off
    trainer = build("grpo")
    trainer.settings = Settings()
    trainer.__class__ = type("Tagged", (TagCorrection,), {})
    advantages = torch.tensor([1.0, -1.0])
    inputs = {
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "conflict_mask": mask.bool(),
    }
    is_tag = torch.zeros(ids.shape[1], dtype=torch.bool)
    for tag in TAGS:
        spans = _span(tokenizer, ids[0].tolist(), tag)
        is_tag[spans] = True
    assert 4 <= is_tag.sum() < ids.shape[1] - 2
    logps = torch.linspace(-2, -1, ids.numel()).view(ids.shape).requires_grad_()
    loss, measured = trainer.objective(logps, torch.zeros_like(logps), inputs)
    weights = torch.stack([torch.where(is_tag, 2.0, 1.0), torch.where(is_tag, 0.0, 1.0)])
    assert torch.equal(measured.weights * mask, weights * mask)
    loss.backward()
    expected = -advantages[:, None] * weights * mask / mask.sum(1, keepdim=True) / 2
    torch.testing.assert_close(logps.grad, expected)


def _span(tokenizer, row: list[int], tag: str) -> list[int] | None:  # type: ignore[no-untyped-def]
    """The tokens of a tag, by decoding every prefix."""
    lengths = [len(tokenizer.decode(row[:i])) for i in range(len(row) + 1)]
    start = tokenizer.decode(row).find(tag)
    if start < 0:
        return None
    return [i for i in range(len(row)) if lengths[i] < start + len(tag) and lengths[i + 1] > start]
