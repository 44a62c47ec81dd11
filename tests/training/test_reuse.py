"""A run that trains several steps on a batch of completions, resumed within it, is the run without the interruption."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import trained_weights
from helpers.runs import metrics_of
from helpers.weights import Weights, same_weights

from gtpo.runs.directory import RunDirectory
from gtpo.training.metrics_writer import MetricsWriter

NAMES = ("step", "loss", "grad_norm", "learning_rate", "entropy", "filtered_fraction", "completion_length")
TWICE = {"num_iterations": 2, "log_completions": True}
THREE_STEPS = {"per_device_train_batch_size": 4, "steps_per_generation": 3}
TWO_MICRO_BATCHES = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "num_iterations": 2}


@pytest.fixture
def train(build: Any, tmp_path: Path) -> Any:
    """``train(name, step=None, **settings)``: the trained weights, from a checkpoint of the run ``run``."""

    def train(name: str, step: int | None = None, **settings: Any) -> Weights:
        trainer = build("gtpo", name, max_steps=5, save_strategy="steps", save_steps=1, **settings)
        trainer.add_callback(MetricsWriter(RunDirectory(trainer.args.output_dir)))
        if step:
            trainer.train = partial(trainer.train, str(tmp_path / "run" / f"checkpoint-{step}"))
        return trained_weights(trainer)

    return train


def lines(folder: Path) -> list[Any]:
    """Without metrics that the recorder collects over a whole batch: of a part of it there are none."""
    return [{name: line[name] for name in NAMES if name in line} for line in metrics_of(folder)]


@pytest.mark.parametrize(
    ("step", "settings"), [(1, TWICE), (2, TWICE), (1, THREE_STEPS), (2, THREE_STEPS), (3, TWO_MICRO_BATCHES)]
)
def test_a_resumed_run_trains_on_the_batch_of_its_checkpoint(
    step: int, settings: Any, train: Any, tmp_path: Path
) -> None:
    """Also in another directory."""
    expected = train("run", **settings)
    assert same_weights(train("other", step, **settings), expected)
    assert lines(tmp_path / "other") == lines(tmp_path / "run") and len(lines(tmp_path / "run")) == 5


def test_a_batch_is_stored_only_between_its_steps(train: Any, tmp_path: Path) -> None:
    train("run", num_iterations=2)
    train("plain")
    stored = sorted(tmp_path.glob("*/checkpoint-*/reused-batch-0.pt"))
    assert [path.parent.name for path in stored] == ["checkpoint-1", "checkpoint-3", "checkpoint-5"]
    (batch,) = torch.load(stored[0], weights_only=True)
    assert len(batch["completion_ids"]) == 12


@pytest.mark.parametrize("batches", [0, 2])
def test_without_its_batch_later_batches_are_in_place(
    batches: int, train: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier revision stored none; other settings have others."""
    train("run", num_iterations=2)
    stored = tmp_path / "run" / "checkpoint-1" / "reused-batch-0.pt"
    found = torch.load(stored, weights_only=True)
    torch.save(batches * found, stored) if batches else stored.unlink()
    train("other", 1, num_iterations=2)
    assert "checkpoint-1 does not have its batch of completions: the next step samples another one" in caplog.text
    assert [line["step"] for line in lines(tmp_path / "other") if "completion_length" in line] == [1, 2, 3, 5]
