"""Bars over completions, which move with each token and fit 80 columns, and the bars of a training run."""

import re
from typing import Any

import pytest
import trl
from pytest import CaptureFixture, MonkeyPatch

from gtpo.reports.progress import ProgressBar
from gtpo.runs.bars import PHASE, CompletionBar, until_end
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


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_bar_fits_80_columns(columns: str, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """Of a run with a long name, of which the beginning stays."""
    monkeypatch.setenv("COLUMNS", columns)
    with CompletionBar("my-run-" + "x" * 200, 100_000, 12_345, 1500) as bar:
        bar.count_tokens(98_765)
        bar.bar.refresh()
    lines = [line for line in re.split("[\r\n]", capsys.readouterr().err) if line.strip()]
    assert lines and max(map(len, lines)) <= 80 and lines[-1].lstrip().startswith("my-run-xxx")
    assert lines[-1].rstrip().endswith("12345/100000, 98.8k tokens]")


@pytest.mark.parametrize(
    ("tokens", "ends", "expected"),
    [([5, 7, 6, 7], {7}, ([5, 7], True)), ([5, 6], {7}, ([5, 6], False)), ([5, 8, 7], [7, 8], ([5, 8], True))],
)
def test_a_completion_goes_to_its_first_end_token(tokens: list[int], ends: Any, expected: Any) -> None:
    assert until_end(tokens, ends) == expected


def test_the_bar_of_a_training_has_the_latest_scores(build: Any, capsys: CaptureFixture[str]) -> None:
    trainer = build("gtpo", max_steps=2, disable_tqdm=False)
    ProgressBar.attach(trainer)
    trainer.train()
    shown = capsys.readouterr()
    reward, entropy = (trainer.state.log_history[1][name] for name in ("reward", "entropy"))
    assert f"H={entropy:.3g}, reward={reward:.3g}, loss=" in shown.err.split("2/2")[-1]
    assert "grad_norm" not in shown.out + shown.err  # a line of all metrics


def test_without_a_bar_transformers_prints(build: Any, capsys: CaptureFixture[str]) -> None:
    trainer = build("gtpo", max_steps=1, disable_tqdm=True)
    ProgressBar.attach(trainer)
    trainer.train()
    shown = capsys.readouterr()
    assert "'grad_norm'" in shown.out and "1/1" not in shown.err
