"""The progress bar: what it shows, and its width."""

import io
from types import SimpleNamespace

import pytest
from tqdm import tqdm
from transformers import TrainerControl, TrainerState

from gtpo.runs.progress import ProgressBar

Logs = dict[str, float | None]


def bar_after(logs: Logs, monkeypatch: pytest.MonkeyPatch, columns: int = 80, later: tuple[Logs, ...] = ()) -> str:
    """The last state of the bar in a terminal of some columns, at step 999 of 1000 after 2 hours."""
    screen = io.StringIO()
    monkeypatch.setattr(
        "transformers.trainer_callback.tqdm",
        lambda total, **options: tqdm(total=total, ncols=columns, file=screen, ascii=True),
    )
    bar, state = ProgressBar("GTPO"), TrainerState(global_step=999, max_steps=1000)
    bar.on_train_begin(SimpleNamespace(), state, TrainerControl())
    assert bar.training_bar is not None
    bar.training_bar.start_t -= 7200
    bar.on_step_end(SimpleNamespace(), state, TrainerControl())
    for one in (logs, *later):
        bar.on_log(SimpleNamespace(), state, TrainerControl(), logs=one)
    bar.training_bar.refresh()
    return screen.getvalue().split("\r")[-1].rstrip()


def test_it_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = {"loss": 0.5, "reward": 12.0, "accuracy": 100.0, "formatting": 100.0, "entropy": 12.3456}
    line = bar_after(logs, monkeypatch)
    assert len(line) <= 80 and "###9| 999/1000 [2:00:0" in line
    assert line.endswith(", acc 100%, H 12.35, format 100%]")


def test_other_rewards_and_supervised_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bar_after({"reward": 1.234, "entropy": None}, monkeypatch).endswith(", reward 1.23]")
    assert bar_after({"loss": 0.12345, "entropy": 0.5}, monkeypatch).endswith(", H 0.50, loss 0.123]")


def test_the_final_summary_leaves_the_bar_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bar_after({"train_loss": 0.5, "train_runtime": 3.0}, monkeypatch).endswith("<00:07]")


def test_held_out_rows_stay_beside_the_metrics_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Logs = {"loss": 0.5, "reward": 12.0, "accuracy": 100.0, "formatting": 100.0, "entropy": 12.3456}
    held_out: Logs = {"eval_loss": 0.5, "eval_reward": 3.0, "eval_accuracy": 100.0, "eval_runtime": 3.0}
    line = bar_after(step, monkeypatch, later=(held_out, step))
    assert len(line) <= 80 and line.endswith(", acc 100%, held out 100%, H 12.35]")
    assert bar_after(step, monkeypatch, later=(held_out,)).endswith(", acc 100%, held out 100%, H 12.35]")
    assert bar_after({"loss": 0.5}, monkeypatch, later=({"eval_loss": 0.25},)).endswith(", loss 0.500, held out 0.250]")
    start = bar_after({}, monkeypatch, later=(held_out,))  # --eval_on_start: the accuracy alone
    assert start.endswith(", held out 100%]") and start.count("held out") == 1


@pytest.mark.parametrize(
    ("steps", "start", "told"), [(100, 0, [10, 20, 30]), (100, 20, [30]), (25, 0, [3, 5, 8]), (19, 0, [])]
)
def test_a_line_stays_after_each_tenth(
    steps: int, start: int, told: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of runs of 20 steps and more; a resumed run begins with the next tenth."""
    monkeypatch.setattr(
        "transformers.trainer_callback.tqdm", lambda total, **options: tqdm(total=total, file=io.StringIO())
    )
    bar, state = ProgressBar("GTPO"), TrainerState(global_step=start, max_steps=steps)
    bar.on_train_begin(SimpleNamespace(), state, TrainerControl())
    for step in range(start + 1, 3 * steps // 10 + 2):
        state.global_step = step
        bar.on_log(SimpleNamespace(), state, TrainerControl(), logs={"accuracy": float(step), "entropy": 0.5})
    lines = [f"step {step} of {steps}: acc {step}%, H 0.50" for step in told]
    assert capsys.readouterr().err.splitlines() == lines
