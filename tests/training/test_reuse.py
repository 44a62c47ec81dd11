"""A run that trains several steps on a batch of completions, resumed within it, is the run without the interruption."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import trained_weights
from helpers.runs import metrics_of

from gtpo.runs.directory import RunDirectory
from gtpo.training.metrics_writer import MetricsWriter

NAMES = ("step", "loss", "grad_norm", "learning_rate", "entropy", "filtered_fraction", "completion_length")
TWICE = {"num_iterations": 2, "log_completions": True}
THREE_STEPS = {"per_device_train_batch_size": 4, "steps_per_generation": 3}
TWO_MICRO_BATCHES = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "num_iterations": 2}


@pytest.fixture
def train(build: Any, tmp_path: Path) -> Any:
    """``train(name, step=None, source="", **settings)``: the trained weights, from a checkpoint of ``source``."""

    def train(name: str, step: int | None = None, source: str = "", **settings: Any) -> dict[str, torch.Tensor]:
        trainer = build("gtpo", name, max_steps=5, save_strategy="steps", save_steps=1, **settings)
        trainer.add_callback(MetricsWriter(RunDirectory(trainer.args.output_dir)))
        if step:
            plain = trainer.train
            checkpoint = tmp_path / (source or name) / f"checkpoint-{step}"
            trainer.train = lambda: plain(resume_from_checkpoint=str(checkpoint))
        return trained_weights(trainer)

    return train


def lines(folder: Path) -> list[dict[str, Any]]:
    """Without metrics that the recorder collects over a whole batch: of a part of it there are none."""
    return [{name: line[name] for name in NAMES if name in line} for line in metrics_of(folder)]


@pytest.mark.parametrize(
    ("step", "settings"), [(1, TWICE), (2, TWICE), (1, THREE_STEPS), (2, THREE_STEPS), (3, TWO_MICRO_BATCHES)]
)
def test_a_resumed_run_trains_on_its_stored_batch(
    step: int, settings: dict[str, Any], train: Any, tmp_path: Path
) -> None:
    expected = train("run", **settings)
    logged = lines(tmp_path / "run")
    found = train("run", step, **settings)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert lines(tmp_path / "run") == logged and len(logged) == 5


def test_the_batch_is_that_of_the_checkpoint(train: Any) -> None:
    expected = train("run", num_iterations=2)
    train("other", num_iterations=2, seed=7)
    found = train("other", 1, "run", num_iterations=2)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_batch_is_stored_only_between_its_steps(train: Any, tmp_path: Path) -> None:
    train("run", num_iterations=2)
    train("plain")
    stored = [path.parent.name for path in sorted(tmp_path.glob("*/checkpoint-*/reused-batch-0.pt"))]
    assert stored == ["checkpoint-1", "checkpoint-3", "checkpoint-5"]
    batches = torch.load(tmp_path / "run" / "checkpoint-1" / "reused-batch-0.pt", weights_only=True)
    assert [len(batch["completion_ids"]) for batch in batches] == [12]


@pytest.mark.parametrize("change", ["absent", "other size"])
def test_without_its_batch_later_batches_are_in_place(
    change: str, train: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Any
) -> None:
    train("run", num_iterations=2)
    logged = lines(tmp_path / "run")
    stored = tmp_path / "run" / "checkpoint-1" / "reused-batch-0.pt"
    if change == "absent":  # of an earlier revision
        stored.unlink()
    else:
        batches = torch.load(stored, weights_only=True)
        torch.save(2 * batches, stored)
    with caplog.at_level(logging.WARNING):
        train("run", 1, num_iterations=2)
    assert "checkpoint-1 does not have its batch of completions: the next step samples another one" in caplog.text
    sampled = [line["step"] for line in lines(tmp_path / "run") if "completion_length" in line]
    assert sampled == [1, 2, 3, 5] and [line["step"] for line in logged if "completion_length" in line] == [1, 3, 5]
