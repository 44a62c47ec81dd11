"""A run that is resumed anywhere is the run without the interruption: order of each epoch, whole generations."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import FILTER, _Canned, reward_parity, trained_weights
from helpers.runs import metrics_of
from helpers.weights import Weights, same_weights
from trl import GRPOTrainer

from gtpo.runs.directory import RunDirectory, sorted_checkpoints, step_of
from gtpo.training.generations import WholeGenerations
from gtpo.training.metrics_writer import MetricsWriter

NAMES = ("step", "loss", "grad_norm", "learning_rate", "entropy", "filtered_fraction", "completion_length", "epoch")
# Eight prompts, three for each batch of completions: two batches an epoch, and two prompts that it leaves out.
DATA = {"per_device_train_batch_size": 12, "num_generations": 4, "shuffle_dataset": True}
TWO_MICRO_BATCHES = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
THREE_STEPS = {"per_device_train_batch_size": 4, "steps_per_generation": 3}
LAST_STEP_IS_SHORT = {"per_device_train_batch_size": 4, "steps_per_generation": 3, "gradient_accumulation_steps": 4}
WITHIN_STEPS = {"per_device_train_batch_size": 4, "steps_per_generation": 3, "gradient_accumulation_steps": 2}
TABLE = [  # settings, and the steps of the checkpoints of three epochs
    ({}, [1, 2, 3, 4, 5, 6]),
    ({"num_generations": 3}, [1, 2, 3, 4, 5, 6]),  # four prompts a batch divide the eight
    (TWO_MICRO_BATCHES, [1, 2, 3, 4, 5, 6]),
    ({"num_iterations": 2, "log_completions": True, "num_completions_to_print": 1}, [2, 4, 6, 8, 10, 12]),
    (TWO_MICRO_BATCHES | {"num_iterations": 2}, [2, 4, 6, 8, 10, 12]),
    (THREE_STEPS, [3, 6, 9, 12, 15, 18]),
    (LAST_STEP_IS_SHORT, [2, 4, 6]),
    (WITHIN_STEPS, [3, 6, 9]),
    ({"save_strategy": "epoch", "num_iterations": 2}, [4, 8, 12]),
    ({"save_steps": 3, "num_iterations": 2}, [4, 6, 10, 12]),  # those of 3 and 9 one step later
    ({"dataloader_num_workers": 1}, [1, 2, 3, 4, 5, 6]),
]


@pytest.fixture
def tiny(shallow: Path) -> Path:
    return shallow


@pytest.fixture
def train(build: Any, tmp_path: Path) -> Any:
    """``train(name, step=None, **settings)``: weights, prompts of each generation; from a checkpoint of ``run``."""

    def train(name: str, step: int | None = None, **settings: Any) -> tuple[Weights, list[Any]]:
        seen = []

        def reward(prompts: Any, **columns: Any) -> Any:
            seen.append([prompts[0], *{*prompts}])
            return reward_parity(**columns)

        given = {"save_strategy": "steps", "save_steps": 1, "max_steps": -1, "num_train_epochs": 3} | DATA | settings
        trainer = build("gtpo", name, rewards=[reward], gtpo=FILTER, **given)
        trainer.add_callback(MetricsWriter(RunDirectory(trainer.args.output_dir)))
        if step:
            trainer.train = partial(trainer.train, str(tmp_path / "run" / f"checkpoint-{step}"))
        return trained_weights(trainer), [sorted(prompts[1:]) for prompts in seen]

    return train


def lines(folder: Path) -> list[Any]:
    """Without times."""
    return [{name: line[name] for name in NAMES if name in line} for line in metrics_of(folder)]


@pytest.mark.parametrize(("settings", "steps"), TABLE, ids=lambda value: str(value)[:60])
def test_a_resumed_run_is_the_undisturbed_one(settings: Any, steps: list[int], train: Any, tmp_path: Path) -> None:
    """Over three epochs, from a checkpoint at a boundary and from one beside it, in another directory."""
    expected, prompts = train("run", **settings)
    assert len({str(each) for each in prompts}) > 3  # the epochs have orders of their own
    assert [*map(step_of, sorted_checkpoints(tmp_path / "run"))] == steps
    for step in steps[:-1][-2:]:
        weights, later = train(f"from {step}", step, **settings)
        assert same_weights(weights, expected), step
        assert later == prompts[len(prompts) - len(later) :] and 0 < len(later) < len(prompts)
        assert lines(tmp_path / f"from {step}") == lines(tmp_path / "run")
    assert any(0 < line["filtered_fraction"] < 1 for line in lines(tmp_path / "run"))  # weights change, of some rows


def test_an_undisturbed_run_has_the_orders_of_trl(build: Any) -> None:
    """Of the seed, one after the other."""
    trainer = build("gtpo", **DATA, seed=3)
    order = trainer._get_train_sampler()
    expected = GRPOTrainer._get_train_sampler(trainer)
    for epoch in range(3):
        trainer.state.epoch = float(epoch)
        assert [*order] == [*expected]
    trainer.state.epoch = 1.99
    assert len({(*order,), (*order,)}) == 1 and len([*order]) == len(order) == 24


def test_without_a_shuffle_every_epoch_has_the_order_of_the_rows(build: Any) -> None:
    trainer = build("gtpo")
    trainer.state.epoch = 2.5
    assert [*trainer._get_train_sampler()][::12] == [*range(8)]


@pytest.mark.parametrize(("max_steps", "saved"), [(1, []), (4, [4]), (5, [4]), (6, [6])])
def test_a_run_that_ends_within_a_generation_can_go_on(
    max_steps: int, saved: list[int], train: Any, tmp_path: Path
) -> None:
    """Its newest checkpoint is that of the end of the generation before, also where none was due."""
    settings = {"num_iterations": 2, "save_steps": 500, "num_train_epochs": 1, "max_steps": max_steps}
    train("run", **settings)
    assert [*map(step_of, sorted_checkpoints(tmp_path / "run"))] == saved
    for step in saved:
        expected, _ = train("whole", **settings | {"max_steps": 10})
        found, _ = train("longer", step, **settings | {"max_steps": 10})
        assert same_weights(found, expected)


def test_nothing_is_saved_that_nobody_asked_for(train: Any, tmp_path: Path) -> None:
    train("run", num_iterations=2, save_strategy="no", num_train_epochs=1)
    assert not sorted_checkpoints(tmp_path / "run")


def test_a_checkpoint_within_a_generation_shifts_no_later_one(
    train: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier revision wrote such."""
    settings = {"num_iterations": 2, "max_steps": 6}
    with monkeypatch.context() as patched:
        patched.setattr(WholeGenerations, "on_step_end", lambda *args, **kwargs: None)
        _, prompts = train("run", **settings)
    _, later = train("other", 3, **settings)
    assert "the checkpoint of step 3 lies between two updates on one batch of completions" in caplog.text
    assert later == prompts[1:]
    assert [line["step"] for line in lines(tmp_path / "other") if "completion_length" in line] == [1, 3, 4, 5]


def test_completions_that_are_sampled_are_the_same_too(tiny: Path, build: Any, tmp_path: Path) -> None:
    """With the random numbers of the sampler, over three epochs."""

    def train(name: str, step: int | None = None) -> Weights:
        settings = {"max_completion_length": 6, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
        trainer = build("grpo", name, **DATA | settings)
        trainer._generate_single_turn = super(_Canned, trainer)._generate_single_turn
        if step:
            trainer.train = partial(trainer.train, str(tmp_path / "run" / f"checkpoint-{step}"))
        return trained_weights(trainer)

    expected = train("run")
    for step in (2, 3, 5):
        assert same_weights(train(f"from {step}", step), expected)
    assert any(torch.any(weight != 0) for weight in expected.values())
