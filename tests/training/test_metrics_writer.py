"""metrics.jsonl and the wandb run."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from helpers.files import read_lines
from helpers.settings import parsed
from pytest import LogCaptureFixture, MonkeyPatch
from transformers import TrainerControl, TrainerState

from gtpo.reports.wandb import start_wandb
from gtpo.runs.directory import RunDirectory
from gtpo.training.metrics_writer import MetricsWriter

ARGS = SimpleNamespace(per_device_train_batch_size=6, gradient_accumulation_steps=2, world_size=3)


def log(writer: MetricsWriter, step: int, **metrics: Any) -> None:
    writer.on_log(ARGS, TrainerState(global_step=step), None, logs=metrics)


@pytest.fixture
def writer(tmp_path: Path) -> MetricsWriter:
    return MetricsWriter(RunDirectory(tmp_path))


def lines(writer: MetricsWriter) -> list[Any]:
    return read_lines(writer.run.metrics)


def test_each_log_is_written_immediately(writer: MetricsWriter, monkeypatch: MonkeyPatch) -> None:
    for step in (1, 2, 3):
        log(writer, step, accuracy=10.0 * step, train_runtime=1.0)  # with include_num_input_tokens_seen in every log
        assert lines(writer)[-1] == {"step": step, "accuracy": 10.0 * step, "train_runtime": 1.0}
    log(writer, 3, train_runtime=1.0, train_loss=0.5)  # the final summary is not a step
    monkeypatch.setenv("RANK", "1")
    log(writer, 4, accuracy=1.0)
    assert len(lines(writer)) == 3


def test_the_last_step_is_logged_whatever_the_interval(writer: MetricsWriter) -> None:
    for step, is_logged in ((1, False), (2, False), (3, True)):
        control = TrainerControl()
        writer.on_step_end(None, TrainerState(global_step=step, max_steps=3, logging_steps=10), control)
        assert control.should_log is is_logged


@pytest.mark.parametrize("found", [None, '{"step": 2, "loss": 2.5}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo'])
def test_a_resumed_run_has_the_lines_of_its_checkpoint(found: str | None, writer: MetricsWriter) -> None:
    """Without NaN and infinity, which are no JSON: fp16 logs them where it skips a step.

    In 0.5 s 30 tokens per completion x 6 completions per batch x 2 batches per step x 3 processes.
    """
    if found:
        writer.run.metrics.write_text(found)
    history = [
        {"loss": 3.0, "step": 1, "completion_length": 30.0, "step_time": 0.5},
        {"eval_reward": 1.0, "eval_runtime": 2.0, "step": 1},
        {"loss": 2.0, "grad_norm": math.inf, "mine": math.nan, "completion_length": 9.0, "step": 2},
    ]
    first = {"step": 1, "loss": 3.0, "completion_length": 30.0, "step_time": 0.5, "tokens_per_second": 2160.0}
    second = {"step": 2, "loss": 2.0, "completion_length": 9.0}
    expected = [first, {"step": 1, "eval_reward": 1.0, "eval_runtime": 2.0}, second]
    writer.on_train_begin(ARGS, TrainerState(global_step=2, log_history=history), None)
    assert lines(writer) == expected
    log(writer, 3, loss=0.0)
    assert lines(writer) == [*expected, {"step": 3, "loss": 0.0}]


# wandb


@pytest.fixture
def init(monkeypatch: MonkeyPatch) -> Mock:
    """Takes the place of ``wandb.init``."""
    monkeypatch.setattr("wandb.init", init := Mock())
    return init


def start(directory: Path, *argv: str) -> None:
    directory.mkdir(exist_ok=True)
    start_wandb(parsed("--output_dir", str(directory), "--seed", "1", *argv), RunDirectory(directory))


def test_wandb_gets_the_lines_of_metrics_jsonl(writer: MetricsWriter) -> None:
    """Not within one step: TRL logs tables and times in between. A resumed run repeats steps, which wandb ignores."""
    writer.wandb_run = Mock()
    for step in (1, 2, 2):
        log(writer, step, accuracy=100 / 3, step_time=0.5, completion_length=float(step))
    log(writer, 2, eval_accuracy=1.0, eval_runtime=1.0)
    calls = writer.wandb_run.log.call_args_list
    assert [call.args[0] for call in calls] == lines(writer)
    assert [call.kwargs["step"] for call in calls] == [1_000_000, 2_000_000, 2_000_000, 2_500_000]


def test_a_wandb_error_does_not_stop_the_run(
    writer: MetricsWriter, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    writer.wandb_run = Mock(**{"log.side_effect": ConnectionResetError("Connection lost")})
    monkeypatch.setattr(ARGS, "report_to", ["wandb", "tensorboard"], raising=False)
    for step in (1, 2, 3):
        log(writer, step, accuracy=1.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3]
    assert caplog.text.count("Connection lost") == 1 and ARGS.report_to == ["tensorboard"]


def test_without_a_login_wandb_is_offline(
    init: Mock, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """One line says how to sync, and there is no prompt."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.login", lambda prompt: False)
    run = tmp_path / "a-run-s1"
    for _ in range(2):
        start(run, "--gamma", "0.25")
    assert f"wandb sync {run / 'wandb'}" in caplog.text
    first, second = (SimpleNamespace(**call.kwargs) for call in init.call_args_list)
    assert first.id == second.id == (run / "wandb_id").read_text() and first.resume == "allow"
    assert (first.mode, first.name, first.group, first.config["gamma"]) == ("offline", "a-run-s1", "a-run", 0.25)
    assert first.settings.finish_timeout == 60  # an unreachable server does not block the exit
    assert not first.settings.finish_timeout_raises
    assert not first.settings.use_dot_wandb and first.settings.x_disable_meta
    assert (first.project, first.tags) == ("gtpo", ["GTPO", "tiny", "arithmetic", "seed 1"])
    assert (first.dir, first.config["method"]) == (str(run), "GTPO")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    start(run, "--seed", "7")
    other = init.call_args.kwargs
    assert other["project"] == "mine" and other["tags"][-1] == "seed 7"


def test_a_timeout_of_wandb_logs_the_run_offline(
    init: Mock, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    init.side_effect = [wandb.errors.CommError("run initialization has timed out"), Mock()]
    start(tmp_path)
    online, offline = (call.kwargs for call in init.call_args_list)
    assert (online["mode"], offline["mode"]) == ("online", "offline")
    assert online["id"] != offline["id"] == (tmp_path / "wandb_id").read_text()  # wandb may still hold the first id
    assert "wandb sync" in caplog.text
