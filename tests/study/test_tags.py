"""ln pi of the tags in sampled completions."""

from pathlib import Path
from typing import Any

import torch
from helpers.canned import batch_of, canned_group
from pytest import approx
from transformers import AutoTokenizer

from examples.objectives.tag_correction import Settings, TagCorrection
from gtpo.prompts import TAGS
from study.tags import TAG_METRICS, tag_logps, tag_span, tag_spans
from study.train import with_measures


def test_a_tag_touches_all_tokens_with_its_parts() -> None:
    assert tag_span(["x <", "ans", "wer>Y"], "<answer>") == (0, 3)
    assert tag_span(["a", "<answer>", "b", "<answer>"], "<answer>") == (1, 2)  # the first one
    assert tag_span(["<ans", "wer"], "<answer>") is None
    assert tag_span([None, "<answer", None, ">"], "<answer>") == (1, 4)  # ids above the tokenizer's vocabulary


def test_spans_are_those_of_the_decoded_tags(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    texts = ["<reasoning>\n2 + 3 = 5\n</reasoning>\n<answer>\n5\n</answer>", "<reasoning>\n5\n<answer>"]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    spans = tag_spans(tokenizer, batch["input_ids"], batch["attention_mask"], TAGS).tolist()
    for row, found in zip(batch["input_ids"], spans, strict=True):
        assert [[*range(first, end)] for first, end in found] == [_tokens_of(tokenizer, row, tag) for tag in TAGS]


def test_ln_pi_is_averaged_where_a_tag_is() -> None:
    """Tokens are counted without padding; of the third tag there is none."""
    valid = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    spans = torch.tensor([[[0, 2], [2, 3], [0, 0]], [[1, 2], [0, 0], [0, 0]]])
    logps = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, -7.0, -8.0]])
    assert str(tag_logps(spans, valid, logps).tolist()) == "[-5.0, -3.0, nan]"  # (-1 - 2 - 7) / 2


def test_the_metrics_of_a_step(build: Any) -> None:
    """Each tag is the first token of every completion; a tag that no completion has is not logged."""
    trainer = build("grpo")
    first, *_ = trainer._tokenizer.convert_ids_to_tokens(canned_group(0)[0][:1])
    trainer.__class__ = with_measures(type(trainer), (first, "<x>", first, first))
    batch = batch_of(trainer)
    texts = trainer._tokenizer.batch_decode(batch["completion_ids"])
    assert batch["is_guess"].tolist() == ["guess" in text for text in texts]
    batch["is_guess"][0] = True
    logps = torch.full(batch["completion_mask"].shape, -2.0)
    metrics = trainer.objective(logps, torch.zeros_like(logps), batch)[1].metrics
    assert str([float(metrics[name]) for name in TAG_METRICS]) == "[-2.0, nan, -2.0, -2.0]"
    assert float(metrics["guesses"]) == approx(100 * float(batch["is_guess"].float().mean()))


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
