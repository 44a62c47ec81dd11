"""Bars over completions, which move with each token and fit 80 columns, and the bars of a training run."""

from typing import Any

import pytest
import trl
from pytest import CaptureFixture, MonkeyPatch

from gtpo.runs.bars import PHASE, until_end
from gtpo.training.trainer import GTPOTrainer


def test_generation_has_a_bar_that_changes_no_token(
    build: Any, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    trainer = build("gtpo", top_k=1)  # the most likely tokens, also from TRL's sampler
    prompts = trainer.processing_class(["Question?", "A longer question?"])["input_ids"]

    def generate(kind: Any = GTPOTrainer) -> list[list[int]]:
        return kind._generate_single_turn(trainer, prompts, None, {}, num_generations=2)[0]

    plain = generate(trl.GRPOTrainer)
    tokens = sum(map(len, plain))
    capsys.readouterr()
    assert generate() == plain
    assert capsys.readouterr().err == ""  # it takes less than the delay
    monkeypatch.setitem(PHASE, "delay", 0.0)
    monkeypatch.setitem(PHASE, "mininterval", 0.0)
    assert generate() == plain
    assert f"0/2, {tokens} tokens]" in capsys.readouterr().err.split("generating:")[-1]
    with trainer.open_bar("initial entropy", 5) as bar:
        generate()
        assert bar.unstored == bar.tokens == tokens
        bar.count_completions([{"tokens": len(ids)} for ids in plain])
        assert (bar.done, bar.unstored) == (2, 0)
    shown = capsys.readouterr().err
    assert "initial entropy:" in shown and "generating" not in shown
    generate()
    assert "initial entropy" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "ends", "expected"),
    [([5, 7, 6, 7], {7}, ([5, 7], True)), ([5, 6], {7}, ([5, 6], False)), ([5, 8, 7], [7, 8], ([5, 8], True))],
)
def test_a_completion_goes_to_its_first_end_token(tokens: list[int], ends: Any, expected: Any) -> None:
    assert until_end(tokens, ends) == expected
