"""CollapseAlarm: when it rings, by hand and on the stored runs that its docstring quotes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.files import tables_of
from helpers.scripts import ROOT

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


def test_a_step_on_completions_of_an_earlier_one_is_not_watched() -> None:
    """It logs no reward: with ``num_iterations`` 2 every second step."""
    alarm = CollapseAlarm()
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    for step in range(1, 61):
        logs = {"grad_norm": 0.3}
        if step % 2:
            logs["accuracy"] = 60.0 if step <= 30 else 40.0
        alarm.on_log(None, SimpleNamespace(global_step=step), control, logs=logs)
    assert alarm.rang_at == 41  # six of the 13 lines in 25 steps are 20 points lower


def runs() -> list[pd.DataFrame]:
    """The stored runs of 600 steps or more, a table each."""
    found = []
    for name in ("collapse", "headroom", "gentle"):
        table = pd.read_parquet(ROOT / "results" / name / "metrics.parquet")
        for (_, seed), run in table.groupby(["run", "seed"]):
            if run.step.max() >= 600:
                found.append(run.sort_values("step").assign(seed=seed))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("first_steps", "hits", "false_alarms", "lead"), [(100, 25, 13, 79.0), (None, 27, 92, 78.0)])
def test_the_rates_of_the_docstring(first_steps: int | None, hits: int, false_alarms: int, lead: float) -> None:
    lost_with = []
    kept_with = []
    leads = []
    for run in runs():
        if run.seed.iloc[0] % 2:
            continue
        trailing = run.accuracy.rolling(50).mean()
        highest = trailing.cummax()
        alarm = CollapseAlarm(first_steps=first_steps)
        feed(alarm, run.accuracy, run.grad_norm)
        if trailing.max() - run.accuracy.tail(len(run) // 4).mean() < 20:
            kept_with.append(alarm.rang_at is not None)
            continue
        lost_with.append(alarm.rang_at is not None)
        if alarm.rang_at is not None:
            leads.append(run.step[(highest - trailing) >= 20].min() - alarm.rang_at)
    assert (len(lost_with), len(kept_with)) == (27, 154)
    assert (sum(lost_with), sum(kept_with)) == (hits, false_alarms)
    assert np.median(leads) == lead


@pytest.mark.slow
def test_the_false_alarms_of_runs_that_nobody_had_seen() -> None:
    rang = []
    for path in sorted(ROOT.glob("results/missing_tags/missing-*/metrics.parquet")):
        for (name, _), run in pd.read_parquet(path).groupby(["run", "seed"]):
            alarm = CollapseAlarm()
            feed(alarm, run.accuracy, run.grad_norm)
            rang.append((name.startswith("dr_grpo"), alarm.rang_at is not None))
    assert (rang.count((True, True)), rang.count((True, False))) == (20, 60)
    assert (rang.count((False, True)), rang.count((False, False))) == (0, 240)


@pytest.mark.slow
def test_the_filter_hides_a_loss_from_the_alarm() -> None:
    table = pd.read_parquet(ROOT / "results" / "entropy_parts" / "wrong-mode" / "metrics.parquet")
    rang = []
    leads = []
    for (name, _), run in table.groupby(["run", "seed"]):
        trailing = run.accuracy.rolling(50).mean()
        assert trailing.max() - run.accuracy.tail(len(run) // 4).mean() >= 20, "not lost"
        alarm = CollapseAlarm()
        feed(alarm, run.accuracy, run.grad_norm)
        rang.append((name.startswith(("gtpo", "correction_filter")), alarm.rang_at is not None))
        if alarm.rang_at is not None:
            leads.append(run.step[trailing.cummax() - trailing >= 20].min() - alarm.rang_at)
    assert (rang.count((False, True)), rang.count((False, False))) == (39, 1)
    assert (rang.count((True, True)), rang.count((True, False))) == (1, 39)
    assert np.median(leads) == 20


def test_a_resumed_run_remembers() -> None:
    history = [{"step": step + 1, "accuracy": 60.0, "grad_norm": 0.3} for step in range(30)]
    alarm = CollapseAlarm()
    alarm.on_train_begin(None, SimpleNamespace(log_history=history), None)
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    for step in range(31, 60):
        logs = {"accuracy": 40.0, "grad_norm": 0.3}
        alarm.on_log(None, SimpleNamespace(global_step=step), control, logs=logs)
    assert alarm.rang_at == 42
