"""The best adapter: which step is selected, and that the saved adapter is that step's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.files import read_json, tables_of, write_json
from helpers.runs import fake_run
from helpers.weights import adapter_of, same_weights
from pytest import MonkeyPatch
from transformers import AutoTokenizer, TrainerControl, TrainerState

from gtpo.arguments import ModelArguments
from gtpo.models.load import build_policy
from gtpo.models.source import model_source
from gtpo.runs.directory import RunDirectory
from gtpo.training import best_adapter
from gtpo.training.best_adapter import BestAdapter

TABLES = tables_of(__file__)


class FakeTraining:
    """Feeds accuracies to the callback, one per step; the adapter's weights equal the step number."""

    def __init__(self, build: Any, max_steps: int, metric: Any = None) -> None:
        trainer = build("grpo")
        self.model = trainer.model
        self.callback = BestAdapter(RunDirectory(trainer.args.output_dir), trainer.processing_class, metric)
        self.state = TrainerState(max_steps=max_steps)

    def step(self, accuracy: float) -> None:
        """One in which the reward falls; the accuracy selects before it."""
        self.state.global_step += 1
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "lora_B" in name:
                    weight.fill_(self.state.global_step)
        self.call("on_log", logs={"accuracy": accuracy, "reward": -self.state.global_step})

    def call(self, event: str, **kwargs: Any) -> None:
        args = SimpleNamespace(greater_is_better=not str(self.callback.held_out_metric).endswith("loss"))
        getattr(self.callback, event)(args, self.state, TrainerControl(), model=self.model, **kwargs)


def stored_best(directory: Path) -> Any:
    """``best.json``, whose step is that of the weights beside it."""
    best = read_json(directory / "best" / "best.json")
    steps = [w.unique().tolist() for name, w in adapter_of(directory / "best").items() if "lora_B" in name]
    assert steps and all(step == [best["step"]] for step in steps)
    return best


def test_the_best_step_outlives_worse_ones(build: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(best_adapter, "BEST_WINDOW", 2)
    run = FakeTraining(build, max_steps=100)
    for accuracy in (100, 10, 40, 50, 20):  # means over 2 steps, from step 2: 55, 25, 45, 35
        run.step(accuracy)
    assert not (tmp_path / "best").exists()  # nothing is written before a checkpoint
    run.call("on_save")
    assert stored_best(tmp_path) == {"accuracy": 55.0, "step": 2}
    run.step(95)  # mean 57.5: a new best
    run.call("on_train_end")
    assert stored_best(tmp_path) == {"accuracy": 57.5, "step": 6}


@pytest.mark.parametrize(("max_steps", "accuracies", "best"), TABLES["a_short_run_averages_an_eighth_of_its_steps"])
def test_a_short_run_averages_an_eighth_of_its_steps(max_steps: int, accuracies: Any, best: Any, build: Any) -> None:
    run = FakeTraining(build, max_steps)
    for accuracy in accuracies:
        run.step(accuracy)
    assert run.callback.best == best


@pytest.mark.parametrize(("metric", "values", "best"), TABLES["held_out_rows_select_without_smoothing"])
def test_held_out_rows_select_without_smoothing(
    metric: str, values: Any, best: int, build: Any, tmp_path: Path
) -> None:
    run = FakeTraining(build, max_steps=1000, metric=metric)
    name = f"eval_{metric.removeprefix('eval_')}"
    for step, value in enumerate(values, 1):
        run.step(100.0 - step)  # of training: does not count
        run.call("on_evaluate", metrics={name: value, "eval_reward": 1.0})
    run.call("on_save")
    assert stored_best(tmp_path) == {name: values[best - 1], "step": best}


# Stored name and step, the metric of held-out rows -> whether a run that is resumed at step 2 keeps it
STORED = [
    ("accuracy", 2, None, True),
    ("accuracy", 5, None, False),  # it is measured again
    ("eval_accuracy", 2, "accuracy", True),
    ("accuracy", 2, "accuracy", False),  # of training, by a run without held-out rows
]


@pytest.mark.parametrize(("name", "step", "metric", "is_kept"), STORED)
def test_a_resumed_run_keeps_its_best(name: str, step: int, metric: Any, is_kept: bool, tmp_path: Path) -> None:
    best = {name: 30.0, "step": step}
    run = fake_run(tmp_path, saved=["best"])
    write_json(run.best / "best.json", best)
    callback = BestAdapter(run, None, metric)
    callback.on_train_begin(None, TrainerState(global_step=2), None)
    assert callback.best == (best if is_kept else {})


def test_the_saved_adapter_is_that_of_a_checkpoint(tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """PEFT would ask the Hub, at each save, whether the embedding of a base there has another size."""
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_: pytest.fail("asked the Hub"))
    policy, tokenizer = build_policy(model_source(tiny), ModelArguments(lora_rank=4), "transformers", 0)
    policy.peft_config["default"].base_model_name_or_path = "owner/name"
    callback = BestAdapter(RunDirectory(tmp_path), tokenizer)
    state = SimpleNamespace(max_steps=1, global_step=1)
    callback.on_log(None, state, None, logs={"accuracy": 1.0}, model=policy)
    callback.on_save(None, state, None, model=policy)
    policy.save_pretrained(tmp_path / "checkpoint-1")  # as Transformers' Trainer does
    best, of_checkpoint = (adapter_of(tmp_path / name) for name in ("best", "checkpoint-1"))
    assert len(best) == sum(weight.requires_grad for weight in policy.parameters())
    assert same_weights(best, of_checkpoint)
    assert (tmp_path / "best" / "adapter_config.json").is_file()
    assert AutoTokenizer.from_pretrained(tmp_path / "best").chat_template
