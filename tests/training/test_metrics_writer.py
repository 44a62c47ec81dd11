"""metrics.jsonl and the wandb run."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from helpers.files import read_lines
from helpers.settings import parsed
from pytest import LogCaptureFixture, MonkeyPatch
from transformers import TrainerControl, TrainerState
from trl import GRPOConfig

from gtpo.reports.wandb import start_wandb
from gtpo.runs.directory import RunDirectory
from gtpo.training.metrics_writer import MetricsWriter

ARGS = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=6, num_generations=6)
ARGS.gradient_accumulation_steps = 2


def log(writer: MetricsWriter, step: int, args: Any = ARGS, **metrics: Any) -> None:
    writer.on_log(args, TrainerState(global_step=step), TrainerControl(), logs=metrics)


def lines(writer: MetricsWriter) -> list[dict[str, Any]]:
    return read_lines(writer.run.metrics)


def resumed(directory: Path, step: int, history: Sequence[dict[str, Any]] = ()) -> MetricsWriter:
    writer = MetricsWriter(RunDirectory(directory))
    state = TrainerState(global_step=step, log_history=list(history))
    writer.on_train_begin(ARGS, state, TrainerControl())
    return writer


def test_each_log_is_written_immediately(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    writer = resumed(tmp_path, 0)
    for step in (1, 2, 3):
        log(writer, step, accuracy=10.0 * step, train_runtime=1.0)  # with include_num_input_tokens_seen in every log
        assert len(lines(writer)) == step
    log(writer, 3, train_runtime=1.0, train_loss=0.5)  # the final summary is not a step
    assert lines(writer) == [{"step": step, "accuracy": 10.0 * step, "train_runtime": 1.0} for step in (1, 2, 3)]
    monkeypatch.setenv("RANK", "1")
    writer.on_log(ARGS, TrainerState(global_step=4), TrainerControl(), logs={"a": 1.0})
    assert len(lines(writer)) == 3


@pytest.mark.parametrize(("step", "is_logged"), [(1, False), (2, False), (3, True)])
def test_the_last_step_is_logged_whatever_the_interval(step: int, is_logged: bool, tmp_path: Path) -> None:
    control = TrainerControl()
    state = TrainerState(global_step=step, max_steps=3, logging_steps=10)
    MetricsWriter(RunDirectory(tmp_path)).on_step_end(ARGS, state, control)
    assert control.should_log == is_logged


def test_tokens_per_second(tmp_path: Path) -> None:
    """30 tokens per completion x 6 completions per batch x 2 batches per step, in 0.5 s; and with three processes."""
    writer = MetricsWriter(RunDirectory(tmp_path))
    log(writer, 1, completion_length=30.0, step_time=0.5)
    log(writer, 2, completion_length=30.0)
    three = SimpleNamespace(per_device_train_batch_size=6, gradient_accumulation_steps=2, world_size=3)
    log(writer, 3, three, completion_length=30.0, step_time=0.5)
    assert [line.get("tokens_per_second") for line in lines(writer)] == [720.0, None, 2160.0]


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 2, "lo', "[" * 100_000, ""])
def test_resume_drops_steps_after_the_checkpoint(torn: str, tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.5}, {"step": 1, "eval_runtime": 2.0}, {"step": 2, "loss": 1.0}]
    text = "".join(json.dumps(row) + "\n" for row in [{"step": 1}, *rows, {"step": 3, "loss": 2.0}])
    (tmp_path / "metrics.jsonl").write_text(text + torn)
    writer = resumed(tmp_path, 2, rows)
    assert lines(writer) == rows
    log(writer, 3, loss=0.0)
    assert [line["step"] for line in lines(writer)] == [1, 1, 2, 3]


def test_lines_that_are_lost_come_back_from_the_checkpoint(tmp_path: Path) -> None:
    """Its log history has those of the steps before it, not those of the file."""
    history = [
        {"loss": 3.0, "step": 1, "completion_length": 30.0, "step_time": 0.5},
        {"eval_reward": 1.0, "eval_runtime": 2.0, "step": 1},
        {"loss": 2.0, "grad_norm": math.inf, "step": 2},
    ]
    first = {"step": 1, "loss": 3.0, "completion_length": 30.0, "step_time": 0.5, "tokens_per_second": 720.0}
    lost = [first, {"step": 1, "eval_reward": 1.0, "eval_runtime": 2.0}, {"step": 2, "loss": 2.0}]
    assert lines(resumed(tmp_path, 2, history)) == lost
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 2.5}\n{"step": 3, "loss": 1.0}\n{"loss": 0.0}\nx\n')
    assert lines(resumed(tmp_path, 2, history)) == lost


def test_metrics_contain_no_infinity(tmp_path: Path) -> None:
    writer = resumed(tmp_path, 0)
    log(writer, 1, loss=0.5, grad_norm=math.inf, mine=math.nan, kl=None)  # fp16 logs inf where it skips
    assert lines(writer) == [{"step": 1, "loss": 0.5, "kl": None}]


# wandb


class Run(SimpleNamespace):
    """Takes the place of a wandb run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, logged=[])

    def define_metric(self, *args: Any, **options: Any) -> None:
        pass

    def log(self, line: Any, step: int, commit: bool) -> None:
        self.logged.append((line, step))


def start(directory: Path, *argv: str) -> Any:
    directory.mkdir(exist_ok=True)
    return start_wandb(parsed("--output_dir", str(directory), "--seed", "1", *argv))


def test_wandb_gets_the_lines_of_metrics_jsonl(tmp_path: Path) -> None:
    """Not within one step: TRL logs tables and times in between. A resumed run repeats steps, which wandb ignores."""
    run = Run()
    writer = MetricsWriter(RunDirectory(tmp_path), run)
    for step in (1, 2, 2):
        log(writer, step, accuracy=100 / 3, step_time=0.5, completion_length=float(step))
    log(writer, 2, eval_accuracy=1.0, eval_runtime=1.0)
    assert [line for line, _ in run.logged] == lines(writer)
    assert [step for _, step in run.logged] == [1_000_000, 2_000_000, 2_000_000, 2_500_000]


def test_a_wandb_error_does_not_stop_the_run(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    def fail(line: Any, **options: Any) -> None:
        raise ConnectionResetError("Connection lost")

    args = SimpleNamespace(report_to=["wandb", "tensorboard"])
    writer = MetricsWriter(RunDirectory(tmp_path), SimpleNamespace(log=fail))
    for step in (1, 2, 3):
        log(writer, step, args, accuracy=1.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3]
    assert caplog.text.count("Connection lost") == 1 and args.report_to == ["tensorboard"]


def test_without_a_login_wandb_is_offline(tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture) -> None:
    """One line says how to sync, and there is no prompt."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.login", lambda prompt: False)
    monkeypatch.setattr("wandb.init", lambda **options: Run(**options))
    first, second = (start(tmp_path / "a-run-s1", "--gamma", "0.25") for _ in range(2))
    assert f"wandb sync {tmp_path / 'a-run-s1' / 'wandb'}" in caplog.text
    assert first.id == second.id == (tmp_path / "a-run-s1" / "wandb_id").read_text() and first.resume == "allow"
    assert (first.mode, first.name, first.group, first.config["gamma"]) == ("offline", "a-run-s1", "a-run", 0.25)
    assert first.settings.finish_timeout == 60  # an unreachable server does not block the exit
    assert not first.settings.finish_timeout_raises
    assert not first.settings.use_dot_wandb and first.settings.x_disable_meta


def test_a_timeout_of_wandb_logs_the_run_offline(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    tried = []

    def init(**options: Any) -> Any:
        tried.append((options["mode"], options["id"]))
        if options["mode"] != "offline":
            raise wandb.errors.CommError("run initialization has timed out")
        return Run(**options)

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.init", init)
    start(tmp_path)
    (online, first), (offline, second) = tried
    assert (online, offline) == ("online", "offline")
    assert first != second == (tmp_path / "wandb_id").read_text()  # wandb may still hold the first id
    assert "wandb sync" in caplog.text
