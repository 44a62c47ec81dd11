"""metrics.jsonl and the wandb run."""

import json
import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState
from trl import GRPOConfig

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, PromptArguments, RunArguments
from gtpo.cli.parse import parse
from gtpo.reports.wandb import start_wandb
from gtpo.runs.directory import RunDirectory
from gtpo.training.callbacks import BestAdapter, MetricsWriter

CLASSES = (DataArguments, PromptArguments, ModelArguments, RunArguments, GTPOArguments, GRPOConfig)

# ---- metrics.jsonl ----

ARGS = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=6, num_generations=6)
ARGS.gradient_accumulation_steps = 2


def log(writer: MetricsWriter, step: int, **metrics: Any) -> None:
    writer.on_log(ARGS, TrainerState(global_step=step), TrainerControl(), logs=metrics)


def lines(writer: MetricsWriter) -> list[dict[str, Any]]:
    return [json.loads(line) for line in writer.run.metrics.read_text().splitlines()]


def test_a_wandb_error_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(line: Any, **options: Any) -> None:
        raise ConnectionResetError("Connection lost")

    writer = MetricsWriter(RunDirectory(tmp_path), SimpleNamespace(log=fail))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log(writer, step, accuracy=1.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3]
    assert caplog.text.count("Connection lost; training continues without it") == 1


def test_each_log_is_written_immediately(tmp_path: Path) -> None:
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_train_begin(ARGS, TrainerState(global_step=0), TrainerControl())
    for step in (1, 2, 3):
        log(writer, step, accuracy=10.0 * step, entropy=0.5)
        assert len(lines(writer)) == step  # written at once, not at the end
    log(writer, 3, train_runtime=1.0, train_loss=0.5)  # the final summary is not a step
    assert lines(writer) == [{"step": step, "accuracy": 10.0 * step, "entropy": 0.5} for step in (1, 2, 3)]


def test_a_step_with_a_train_runtime_is_logged(tmp_path: Path) -> None:
    """With include_num_input_tokens_seen Transformers puts train_runtime into every log."""
    writer = MetricsWriter(RunDirectory(tmp_path))
    log(writer, 1, accuracy=10.0, train_runtime=1.0)
    log(writer, 1, train_loss=0.5, train_runtime=1.0)
    assert lines(writer) == [{"step": 1, "accuracy": 10.0, "train_runtime": 1.0}]


def test_tokens_per_second(tmp_path: Path) -> None:
    """30 tokens per completion x 6 completions per batch x 2 batches per step, in 0.5 s."""
    writer = MetricsWriter(RunDirectory(tmp_path))
    log(writer, 1, completion_length=30.0, step_time=0.5)
    log(writer, 2, completion_length=30.0)
    assert lines(writer)[0]["tokens_per_second"] == 720.0
    assert "tokens_per_second" not in lines(writer)[1]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_log(ARGS, TrainerState(global_step=1, is_world_process_zero=False), TrainerControl(), logs={"a": 1.0})
    assert not writer.run.metrics.exists()


def test_resume_drops_steps_after_the_checkpoint_and_a_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "loss": -step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo'
    )
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_train_begin(ARGS, TrainerState(global_step=3), TrainerControl())
    assert lines(writer) == [{"step": step, "loss": -step} for step in (1, 2, 3)]
    log(writer, 4, loss=0.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3, 4]


def test_a_damaged_line_is_removed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st\xff\n{"step": 2}\n{"step": 3, "lo')
    writer = MetricsWriter(RunDirectory(tmp_path))
    with caplog.at_level(logging.WARNING):
        writer.on_train_begin(ARGS, TrainerState(global_step=2), TrainerControl())
    assert [line["step"] for line in lines(writer)] == [1, 2]
    assert caplog.messages == [f"{writer.run.metrics}: removed line 2, not a JSON object with a step"]


def test_a_partial_line_of_the_checkpoint_step_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_train_begin(ARGS, TrainerState(global_step=2), TrainerControl())
    log(writer, 3, loss=0.0)
    assert [line["step"] for line in lines(writer)] == [1, 3]


def test_a_step_that_is_in_the_file_twice_is_kept_once(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.5}, {"step": 1, "loss": 0.25}, {"step": 1, "eval_runtime": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "[" * 100_000)
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_train_begin(ARGS, TrainerState(global_step=1), TrainerControl())
    assert lines(writer) == rows[1:]


# ---- wandb ----


def wandb_records(content: bytes) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format (blocks of 32 KiB) around protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    offset, part = 7, b""  # after ":W&B" and the version
    while offset + 7 <= len(content):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[offset : offset + 7])
        part += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield Record.FromString(part)
            part = b""


def wandb_file(directory: Path) -> list[Any]:
    """The records of the one finished offline run below a directory."""
    [file] = directory.glob("offline-run-*/*.wandb")
    for _ in range(300):  # wandb's service writes the end of the file after finish() has returned
        records = list(wandb_records(file.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def wandb_history(directory: Path) -> list[dict[str, Any]]:
    """The logged steps of a finished offline run."""
    rows = [record.history.item for record in wandb_file(directory) if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in rows]


def wandb_run(directory: Path) -> Any:
    """``start_wandb`` for a run in a directory."""
    return start_wandb(parse("gtpo", CLASSES, ["--output_dir", str(directory), "--seed", "1", "--gamma", "0.25"]))


def test_wandb_groups_runs_that_differ_only_in_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb panels show the mean and spread of a group, so runs of an ablation must be in different groups."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    ignored = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr("wandb.init", lambda **settings: SimpleNamespace(define_metric=ignored, **settings))

    def group(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return str(wandb_run(tmp_path / name).group)

    assert group("gtpo-llama-gsm8k-g12-s1") == group("gtpo-llama-gsm8k-g12-s2") == group("gtpo-llama-gsm8k-g12-s17")
    names = [
        "gtpo-llama-gsm8k-g12",
        "gtpo-llama-gsm8k-g8",
        "gtpo-llama-math-gamma0.01-s1",
        "gtpo-llama-math-gamma0.1-s1",
    ]
    assert len({group(name) for name in names}) == len(names)


def test_offline_wandb_has_the_values_of_metrics_jsonl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a login and WANDB_MODE the run is offline; one line says how to sync, and there is no prompt."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("wandb.login", lambda prompt: False)  # another test may have logged this process in
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "a-run-s1"
    directory.mkdir()
    (directory / ".wandb").symlink_to(tmp_path)  # a stranger's run: wandb would write there
    with caplog.at_level(logging.WARNING):
        run = wandb_run(directory)
    assert f"wandb sync {directory / 'wandb'}" in caplog.text
    assert run.id == (directory / "wandb_id").read_text()
    assert run.settings._offline and run.name == "a-run-s1" and run.config["gamma"] == 0.25
    writer = MetricsWriter(RunDirectory(directory), run)
    for step in (1, 2, 5):
        run.log({"profiling/a": 1.0})  # TRL does this; it advances wandb's step counter
        log(writer, step, accuracy=100 / 3, step_time=0.5, completion_length=float(step), **{"rewards/x/mean": 2.5})
        run.log({"profiling/b": 1.0})
    writer.on_train_end(ARGS, TrainerState(global_step=5), TrainerControl())

    history = [row for row in wandb_history(directory / "wandb") if "accuracy" in row]
    assert [row["step"] for row in history] == [1, 2, 5]
    for row, line in zip(history, lines(writer), strict=True):
        assert {key: value for key, value in row.items() if not key.startswith("_")} == line
        assert row["tokens_per_second"] == 24 * row["completion_length"]


def test_a_resumed_run_continues_its_wandb_run_without_duplicate_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    directory = tmp_path / "run"
    directory.mkdir()
    identities, logged = set(), []
    for steps in ((1, 2, 3), (3, 4)):  # killed after step 3, resumed from checkpoint-2
        init_options: dict[str, Any] = {}
        run = SimpleNamespace(
            define_metric=lambda *a, **k: None, log=lambda line, step, commit: logged.append((line["step"], step))
        )
        monkeypatch.setattr(
            "wandb.init", lambda init_options=init_options, run=run, **options: init_options.update(options) or run
        )
        writer = MetricsWriter(RunDirectory(directory), wandb_run(directory))
        for step in steps:
            log(writer, step, accuracy=1.0)
        identities.add((init_options["id"], init_options["resume"]))
        assert init_options["settings"].finish_timeout == 60  # an unreachable server does not block the exit
    assert len(identities) == 1
    # wandb ignores a log at a step that it has passed: the second one of step 3.
    assert logged == [(step, step * 1_000_000) for step in (1, 2, 3, 3, 4)]


def test_if_wandb_init_times_out_the_run_is_logged_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    modes, identities = [], []

    def init(mode: str | None, **options: Any) -> Any:
        modes.append(mode)
        identities.append(options["id"])
        if mode != "offline":
            raise wandb.errors.CommError("run initialization has timed out")
        return SimpleNamespace(define_metric=lambda *args, **kwargs: None)

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.init", init)
    with caplog.at_level(logging.WARNING):
        wandb_run(tmp_path)
    assert modes == ["online", "offline"]
    assert identities[0] != identities[1] == (tmp_path / "wandb_id").read_text()  # wandb may still hold the first id
    assert "timed out, so this run is logged offline; `wandb sync" in caplog.text


def test_a_best_adapter_of_a_later_step_than_the_checkpoint_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    for step, known in ((2, {"accuracy": 30.0, "step": 2}), (5, {"accuracy": -1.0, "step": 0})):
        (tmp_path / "best" / "best.json").write_text(json.dumps({"accuracy": 30.0, "step": step}))
        callback = BestAdapter(RunDirectory(tmp_path), tokenizer=None)
        callback.on_train_begin(None, TrainerState(global_step=2), TrainerControl())
        assert callback.best == known


def test_tokens_per_second_counts_every_process(tmp_path: Path) -> None:
    """30 tokens per completion x 6 per batch x 2 batches x 3 processes, in 0.5 s."""
    writer = MetricsWriter(RunDirectory(tmp_path))
    args = SimpleNamespace(per_device_train_batch_size=6, gradient_accumulation_steps=2, world_size=3)
    logs = {"completion_length": 30.0, "step_time": 0.5}
    writer.on_log(args, TrainerState(global_step=1), TrainerControl(), logs=logs)
    assert json.loads(writer.run.metrics.read_text())["tokens_per_second"] == 2160.0
