"""The progress bar: what it shows, and its width."""

import io
from types import SimpleNamespace

import pytest
from tqdm import tqdm
from transformers import TrainerControl, TrainerState

from gtpo.runs.progress import ProgressBar

Logs = dict[str, float | None]


def bar_after(logs: tuple[Logs, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    """The last state of the bar in a terminal of 80 columns, at step 999 of 1000 after 2 hours."""
    screen = io.StringIO()
    monkeypatch.setattr(
        "transformers.trainer_callback.tqdm",
        lambda total, **options: tqdm(total=total, ncols=80, file=screen, ascii=True),
    )
    bar, state = ProgressBar("GTPO"), TrainerState(global_step=999, max_steps=1000)
    bar.on_train_begin(SimpleNamespace(), state, TrainerControl())
    assert bar.training_bar is not None
    bar.training_bar.start_t -= 7200
    bar.on_step_end(SimpleNamespace(), state, TrainerControl())
    for one in logs:
        bar.on_log(SimpleNamespace(), state, TrainerControl(), logs=one)
    bar.training_bar.refresh()
    return screen.getvalue().split("\r")[-1].rstrip()


STEP: Logs = {"loss": 0.5, "reward": 12.0, "accuracy": 100.0, "formatting": 100.0, "entropy": 12.3456}
HELD_OUT: Logs = {"eval_loss": 0.5, "eval_reward": 3.0, "eval_accuracy": 100.0, "eval_runtime": 3.0}


@pytest.mark.parametrize(
    ("logs", "end"),
    [
        ((STEP,), ", acc 100%, H 12.35, format 100%]"),
        (({"reward": 1.234, "entropy": None},), ", reward 1.23]"),
        (({"loss": 0.12345, "entropy": 0.5},), ", H 0.50, loss 0.123]"),
        (({"train_loss": 0.5, "train_runtime": 3.0},), "<00:07]"),  # the last call
        ((STEP, HELD_OUT, STEP), ", acc 100%, held out 100%, H 12.35]"),
        ((STEP, HELD_OUT), ", acc 100%, held out 100%, H 12.35]"),
        (({"loss": 0.5}, {"eval_loss": 0.25}), ", loss 0.500, held out 0.250]"),
        (({}, HELD_OUT), "<00:07, held out 100%]"),  # --eval_on_start: the accuracy alone
    ],
)
def test_the_bar_shows_the_latest_metrics_in_80_columns(
    logs: tuple[Logs, ...], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = bar_after(logs, monkeypatch)
    assert len(line) <= 80 and "| 999/1000 [2:00:0" in line and line.endswith(end)
