"""CollapseAlarm: when it rings, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.files import tables_of

from gtpo import CollapseAlarm

TABLES = tables_of(__file__)


def feed(alarm: CollapseAlarm, accuracies: Any, norms: Any, every: int = 1, metric: str = "accuracy") -> Any:
    """The control that the alarm leaves after lines of a log, one each ``every`` steps."""
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=0)
    for accuracy, norm in zip(accuracies, norms, strict=True):
        state.global_step += every
        logs = {metric: float(accuracy), "grad_norm": float(norm)}
        alarm.on_log(None, state, control, logs=logs)
    return control


def repeated(text: str) -> list[float]:
    """``30 x 60, 2 x 40``: thirty values of 60, then two of 40."""
    return [float(part.split()[2]) for part in text.split(", ") for _ in range(int(part.split()[0]))]


FALL = repeated("30 x 60, 30 x 40")  # the mean of 25 steps is 9.6 points down after twelve steps at 40
HIGH = repeated("60 x 0.3")


@pytest.mark.parametrize(("accuracies", "norms", "rings"), TABLES["rings"])
def test_the_alarm_rings(accuracies: str, norms: str, rings: int | None) -> None:
    alarm = CollapseAlarm()
    control = feed(alarm, repeated(accuracies), repeated(norms))
    assert alarm.rang_at == rings
    assert control.should_save is (rings is not None) and not control.should_training_stop


def test_the_whole_run_is_watched_on_request() -> None:
    alarm = CollapseAlarm(first_steps=None)
    feed(alarm, repeated("90 x 60, 30 x 40"), repeated("120 x 0.3"))
    assert alarm.rang_at == 102


def test_it_can_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    assert feed(CollapseAlarm(stop=True), FALL, HIGH).should_training_stop
    (record,) = caplog.records
    assert record.getMessage().startswith("step 42: accuracy is 10 points below its best and the gradient norm is 0.30")
    assert "and training ends" in record.getMessage()


def test_a_plain_reward_and_lines_of_several_steps() -> None:
    """Rewards of 0 to 1, a line for five steps: five lines are a window."""
    alarm = CollapseAlarm(metric="rewards/right/mean", maximum=1.0)
    feed(alarm, repeated("8 x 0.6, 8 x 0.4"), repeated("16 x 0.3"), every=5, metric="rewards/right/mean")
    assert alarm.rang_at == 55  # three lines of five at 40 %: 12 points


def test_a_metric_that_nobody_logs_is_named() -> None:
    with pytest.raises(ValueError, match="no metric 'acc' is logged; rewards here: rewards/accuracy_reward/mean"):
        feed(CollapseAlarm(metric="acc"), [1.0], [1.0], metric="rewards/accuracy_reward/mean")


def test_a_step_on_reused_completions_is_not_watched() -> None:
    """It logs no reward: with ``num_iterations`` 2 every second step."""
    alarm = CollapseAlarm()
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    for step in range(1, 61):
        logs = {"grad_norm": 0.3}
        if step % 2:
            logs["accuracy"] = 60.0 if step <= 30 else 40.0
        alarm.on_log(None, SimpleNamespace(global_step=step), control, logs=logs)
    assert alarm.rang_at == 41  # six of the 13 lines in 25 steps are 20 points lower


def test_a_resumed_run_remembers() -> None:
    history = [{"step": step + 1, "accuracy": 60.0, "grad_norm": 0.3} for step in range(30)]
    alarm = CollapseAlarm()
    alarm.on_train_begin(None, SimpleNamespace(log_history=history), None)
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    for step in range(31, 60):
        logs = {"accuracy": 40.0, "grad_norm": 0.3}
        alarm.on_log(None, SimpleNamespace(global_step=step), control, logs=logs)
    assert alarm.rang_at == 42
