"""The best adapter: which step is selected, and that the saved adapter is that step's."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.canned import trained_weights
from helpers.files import read_json, tables_of, write_json
from helpers.runs import fake_run
from helpers.weights import adapter_of
from peft import PeftModel
from pytest import MonkeyPatch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState

from gtpo.arguments import ModelArguments
from gtpo.models.load import build_policy
from gtpo.runs.directory import RunDirectory
from gtpo.training import best_adapter
from gtpo.training.best_adapter import BestAdapter

TABLES = tables_of(__file__)


class FakeTraining:
    """Feeds accuracies to the callback, one per step; the adapter's weights equal the step number."""

    def __init__(self, trainer: Any, max_steps: int, metric: str | None = None) -> None:
        self.model = trainer.model
        self.callback = BestAdapter(RunDirectory(trainer.args.output_dir), trainer.processing_class, metric)
        self.state = TrainerState(max_steps=max_steps)

    def step(self, accuracy: float) -> None:
        self.state.global_step += 1
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "lora_B" in name:
                    weight.fill_(self.state.global_step)
        self.call("on_log", logs={"accuracy": accuracy})

    def call(self, event: str, **kwargs: Any) -> None:
        args = SimpleNamespace(greater_is_better=not str(self.callback.held_out_metric).endswith("loss"))
        getattr(self.callback, event)(args, self.state, TrainerControl(), model=self.model, **kwargs)


@pytest.fixture
def fake_training(build: Any) -> Any:
    return functools.partial(FakeTraining, build("grpo"))


def stored_step(directory: Path) -> float:
    weights = adapter_of(directory / "best")
    values = {weight.unique().item() for name, weight in weights.items() if "lora_B" in name}
    assert len(values) == 1
    return values.pop()


def test_the_best_step_outlives_worse_ones(fake_training: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(best_adapter, "BEST_WINDOW", 2)
    run = fake_training(max_steps=100)
    for accuracy in (100, 10, 40, 50, 20):  # means over 2 steps, from step 2: 55, 25, 45, 35
        run.step(accuracy)
    assert not (tmp_path / "best").exists()  # nothing is written before a checkpoint
    run.call("on_save")
    assert read_json(tmp_path / "best" / "best.json") == {"accuracy": 55.0, "step": 2}
    assert stored_step(tmp_path) == 2
    run.step(95)  # mean 57.5: a new best
    run.call("on_train_end")
    assert read_json(tmp_path / "best" / "best.json") == {"accuracy": 57.5, "step": 6}
    assert stored_step(tmp_path) == 6


def test_a_held_out_loss_of_nan_is_not_best(fake_training: Any) -> None:
    run = fake_training(max_steps=8, metric="eval_loss")
    for loss in (float("nan"), 0.5, float("nan"), 0.7):
        run.step(0)
        run.call("on_evaluate", metrics={"eval_loss": loss})
    assert run.callback.best == {"eval_loss": 0.5, "step": 2}


def test_a_best_adapter_after_the_checkpoint_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    for step, known in ((2, {"accuracy": 30.0, "step": 2}), (5, {})):
        write_json(tmp_path / "best" / "best.json", {"accuracy": 30.0, "step": step})
        callback = BestAdapter(RunDirectory(tmp_path), tokenizer=None)
        callback.on_train_begin(None, TrainerState(global_step=2), TrainerControl())
        assert callback.best == known


@pytest.mark.parametrize(
    ("max_steps", "accuracies", "best"),
    TABLES["a_short_run_averages_an_eighth_of_its_steps"],
)
def test_a_short_run_averages_an_eighth_of_its_steps(
    max_steps: int, accuracies: tuple[int, ...], best: dict[str, float], fake_training: Any, tmp_path: Path
) -> None:
    run = fake_training(max_steps)
    for accuracy in accuracies:
        run.step(accuracy)
    run.call("on_train_end")
    assert read_json(tmp_path / "best" / "best.json") == best and stored_step(tmp_path) == best["step"]


def test_a_resumed_run_restores_its_window_and_best_step(
    fake_training: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(best_adapter, "BEST_WINDOW", 2)
    rows = [{"step": 1, "accuracy": 10.0}, {"step": 2, "accuracy": 50.0}]
    write_json(fake_run(tmp_path, rows=rows, saved=["best"]).best / "best.json", {"accuracy": 30.0, "step": 2})
    run = fake_training(max_steps=100)
    run.state.global_step = 2
    run.call("on_train_begin")
    run.step(5)  # mean of 50 and 5: no new best
    assert run.callback.weights is None
    run.step(60)  # mean 32.5
    assert run.callback.best == {"accuracy": 32.5, "step": 4}


def test_the_saved_adapter_loads_in_peft(build: Any, tiny: Path, tmp_path: Path) -> None:
    trainer = build("grpo", max_steps=1)
    callback = BestAdapter(RunDirectory(tmp_path), trainer.processing_class)
    trainer.add_callback(callback)
    trained = trained_weights(trainer)
    run = SimpleNamespace(max_steps=1, global_step=1)
    callback.on_log(None, run, None, logs={"accuracy": 1.0}, model=trainer.model)
    callback.on_save(None, run, None, model=trainer.model)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "best", is_trainable=True)
    for name, weight in loaded.named_parameters():
        if weight.requires_grad:
            assert torch.equal(weight, trained[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "best").chat_template


def test_the_accuracy_selects_before_the_reward(fake_training: Any) -> None:
    run = fake_training(max_steps=1)
    for accuracy, reward in ((50.0, 3.0), (40.0, 20.0)):
        run.state.global_step += 1
        run.callback.recent.clear()
        run.call("on_log", logs={"accuracy": accuracy, "reward": reward})
    assert run.callback.best == {"accuracy": 50.0, "step": 1}


def test_saving_asks_the_hub_nothing(tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """PEFT would look up whether the embedding of a base on the Hub has another size, at each save."""
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_: pytest.fail("asked the Hub"))
    policy, tokenizer = build_policy(ModelArguments(model=str(tiny), lora_rank=4), "transformers", 0)
    policy.peft_config["default"].base_model_name_or_path = "owner/name"
    callback = BestAdapter(RunDirectory(tmp_path), tokenizer)
    state = SimpleNamespace(max_steps=1, global_step=1)
    callback.on_log(None, state, None, logs={"accuracy": 1.0}, model=policy)
    callback.on_save(None, state, None, model=policy)
    policy.save_pretrained(tmp_path / "checkpoint-1")  # as Transformers' Trainer does
    saved = [adapter_of(tmp_path / name) for name in ("best", "checkpoint-1")]
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert len(saved[0]) == len(trained) and saved[0].keys() == saved[1].keys()


# ---- held-out rows ----


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    TABLES["held_out_rows_select_without_smoothing"],
)
def test_held_out_rows_select_without_smoothing(
    metric: str, values: tuple[float, ...], best: int, fake_training: Any, tmp_path: Path
) -> None:
    run = fake_training(max_steps=1000, metric=metric)
    name = f"eval_{metric.removeprefix('eval_')}"
    for step, value in enumerate(values, 1):
        run.step(100.0 - step)  # of training: does not count
        run.call("on_evaluate", metrics={name: value, "eval_reward": 1.0})
    run.call("on_save")
    assert read_json(tmp_path / "best" / "best.json") == {name: values[best - 1], "step": best}
    assert stored_step(tmp_path) == best


@pytest.mark.parametrize(("stored", "value", "is_new"), [("eval_accuracy", 45.0, False), ("accuracy", 45.0, True)])
def test_a_resumed_run_keeps_its_best_evaluation(
    stored: str, value: float, is_new: bool, fake_training: Any, tmp_path: Path
) -> None:
    """Not the accuracy of training that a run without held-out rows has stored."""
    (tmp_path / "best").mkdir()
    write_json(tmp_path / "best" / "best.json", {stored: 50.0, "step": 2})
    run = fake_training(max_steps=10, metric="eval_accuracy")
    run.state.global_step = 2
    run.call("on_train_begin")
    run.step(100.0)
    run.call("on_evaluate", metrics={"eval_accuracy": value})
    assert (run.callback.weights is not None) == is_new
    assert run.callback.best == ({"eval_accuracy": 45.0, "step": 3} if is_new else {"eval_accuracy": 50.0, "step": 2})
