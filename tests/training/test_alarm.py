"""examples/collapse_alarm.py: when it rings, by hand, and in a training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from datasets import Dataset
from helpers.files import tables_of
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.collapse_alarm import CollapseAlarm

TABLES = tables_of(__file__)


def feed(alarm: CollapseAlarm, accuracies: Any, norms: str = "", every: int = 1, first: int = 0) -> Any:
    """The control that the alarm leaves after lines of a log, one each ``every`` steps after the first ones."""
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=first, is_world_process_zero=True)
    scores = repeated(accuracies) if isinstance(accuracies, str) else accuracies
    for score, norm in zip(scores, repeated(norms or f"{len(scores)} x 0.3"), strict=True):
        state.global_step += every
        logs = {"grad_norm": norm} if score is None else {"grad_norm": norm, alarm.metric: score}
        alarm.on_log(None, state, control, logs=logs)
    return control


def repeated(text: str) -> list[Any]:
    """``30 x 60, 2 x 40``: thirty values of 60, then two of 40."""
    return [float(part.split()[2]) for part in text.split(", ") for _ in range(int(part.split()[0]))]


FALL = "30 x 60, 30 x 40"  # the mean of 25 steps is 9.6 points down after twelve steps at 40


@pytest.mark.parametrize(("accuracies", "norms", "rings"), TABLES["rings"])
def test_the_alarm_rings(accuracies: str, norms: str, rings: int | None) -> None:
    alarm = CollapseAlarm()
    control = feed(alarm, accuracies, norms)
    assert alarm.rang_at == rings
    assert control.should_save is (rings is not None) and not control.should_training_stop


def test_the_whole_run_is_watched_on_request() -> None:
    alarm = CollapseAlarm(first_steps=None)
    feed(alarm, "90 x 60, 30 x 40")
    assert alarm.rang_at == 102


def test_it_can_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    assert feed(CollapseAlarm(stop=True), FALL).should_training_stop
    assert caplog.messages[0].startswith("step 42: accuracy is 10 points below its best and the gradient norm is 0.30")
    assert "and training ends" in caplog.text and len(caplog.messages) == 1


def test_a_plain_reward_and_lines_of_several_steps() -> None:
    """Rewards of 0 to 1, a line for five steps: five lines are a window."""
    alarm = CollapseAlarm(metric="rewards/right/mean", maximum=1.0)
    feed(alarm, "8 x 0.6, 8 x 0.4", every=5)
    assert alarm.rang_at == 55  # three lines of five at 40 %: 12 points


def test_a_metric_that_nobody_logs_is_named() -> None:
    logs = {"rewards/accuracy_reward/mean": 1.0, "grad_norm": 1.0}
    with pytest.raises(ValueError, match="no metric 'acc' is logged; rewards here: rewards/accuracy_reward/mean"):
        CollapseAlarm(metric="acc").on_log(None, SimpleNamespace(global_step=1), None, logs=logs)


def test_a_step_on_reused_completions_is_not_watched() -> None:
    """It logs no reward: with ``num_iterations`` 2 every second step."""
    accuracies = repeated(FALL)
    accuracies[1::2] = [None] * 30
    alarm = CollapseAlarm()
    feed(alarm, accuracies)
    assert alarm.rang_at == 41  # six of the 13 lines in 25 steps are 20 points lower


def test_a_resumed_run_remembers() -> None:
    history = [{"step": step, "accuracy": 60.0, "grad_norm": 0.3} for step in range(1, 31)]
    alarm = CollapseAlarm()
    alarm.on_train_begin(None, SimpleNamespace(log_history=history), None)
    feed(alarm, "30 x 40", first=30)
    assert alarm.rang_at == 42


def test_it_ends_a_training_with_a_checkpoint(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half of the answers of steps 1 to 3 are right, none of later ones."""
    trainer: Any = None

    def right(completions: list[str], **columns: Any) -> list[float]:
        return [float(row % 2 and trainer.state.global_step < 3) for row in range(len(completions))]

    args = trl.GRPOConfig(
        **{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True},
        **{"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "max_steps": 6},
        **{"logging_steps": 1, "save_strategy": "no"},
    )
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tiny),
        right,
        args,
        Dataset.from_dict({"prompt": ["A question"] * 2}),
        processing_class=AutoTokenizer.from_pretrained(tiny),
        peft_config=LoraConfig(target_modules=["q_proj"]),
    )
    alarm = CollapseAlarm("rewards/right/mean", maximum=1.0, window=2, drop=20.0, grad_norm=1e-9, stop=True)
    trainer.add_callback(alarm)
    trainer.train()
    assert alarm.rang_at == trainer.state.global_step == 4  # the mean of two steps is 25 points below 50
    assert caplog.messages[-1].startswith("step 4: rewards/right/mean is 25 points below its best")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
