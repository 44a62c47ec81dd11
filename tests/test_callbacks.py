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

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, RunArguments
from gtpo.callbacks import MetricsWriter, start_wandb
from gtpo.cli import parse
from gtpo.runs import RunDirectory

CLASSES = (DataArguments, ModelArguments, RunArguments, GTPOArguments, GRPOConfig)

# ---- metrics.jsonl ----

ARGS = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=6, num_generations=6)
ARGS.gradient_accumulation_steps = 2


def log(writer: MetricsWriter, step: int, **metrics: Any) -> None:
    writer.on_log(ARGS, TrainerState(global_step=step), TrainerControl(), logs=metrics)


def lines(writer: MetricsWriter) -> list[dict[str, Any]]:
    return [json.loads(line) for line in writer.path.read_text().splitlines()]


def test_a_line_per_log_written_as_it_happens(tmp_path: Path) -> None:
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_train_begin(ARGS, TrainerState(global_step=0), TrainerControl())
    for step in (1, 2, 3):
        log(writer, step, accuracy=10.0 * step, entropy=0.5)
        assert len(lines(writer)) == step  # nothing waits for the end
    log(writer, 3, train_runtime=1.0, train_loss=0.5)  # the summary of the end is no step
    assert lines(writer) == [{"step": step, "accuracy": 10.0 * step, "entropy": 0.5} for step in (1, 2, 3)]


def test_tokens_per_second(tmp_path: Path) -> None:
    """30 tokens a completion x 6 a batch x 2 batches a step, in 0.5 s."""
    writer = MetricsWriter(RunDirectory(tmp_path))
    log(writer, 1, completion_length=30.0, step_time=0.5)
    log(writer, 2, completion_length=30.0)
    assert lines(writer)[0]["tokens_per_second"] == 720.0
    assert "tokens_per_second" not in lines(writer)[1]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_log(ARGS, TrainerState(global_step=1, is_world_process_zero=False), TrainerControl(), logs={"a": 1.0})
    assert not writer.path.exists()


def test_resume_drops_the_steps_after_the_checkpoint_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "loss": -step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo'
    )
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_train_begin(ARGS, TrainerState(global_step=3), TrainerControl())
    assert lines(writer) == [{"step": step, "loss": -step} for step in (1, 2, 3)]
    log(writer, 4, loss=0.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3, 4]


def test_half_a_line_at_the_checkpoint_itself_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    writer = MetricsWriter(RunDirectory(tmp_path))
    writer.on_train_begin(ARGS, TrainerState(global_step=2), TrainerControl())
    log(writer, 3, loss=0.0)
    assert [line["step"] for line in lines(writer)] == [1, 3]


# ---- wandb ----


def wandb_records(content: bytes) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format (blocks of 32 KiB) around protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, part = 7, b""  # after ":W&B" and the version
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(part)
            part = b""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The logged steps of a finished offline run."""
    file = next(folder.glob("offline-run-*/*.wandb"))
    for _ in range(300):  # wandb's service writes the end of the file after finish() has returned
        records = list(wandb_records(file.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            break
        time.sleep(0.1)
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in rows]


def wandb_run(folder: Path) -> Any:
    """``start_wandb`` for a run in a directory."""
    return start_wandb(parse("gtpo", CLASSES, ["--output_dir", str(folder), "--seed", "1", "--gamma", "0.25"]))


def test_wandb_groups_are_runs_that_differ_in_their_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel grouped by them shows mean and spread over seeds: runs of an ablation must not be averaged together."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    ignored = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr("wandb.init", lambda **settings: SimpleNamespace(define_metric=ignored, **settings))

    def group(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return str(wandb_run(tmp_path / name).group)

    assert group("gtpo-llama-gsm8k-g12-s1") == group("gtpo-llama-gsm8k-g12-s2") == group("gtpo-llama-gsm8k-g12-seed17")
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
    """Without a login and without WANDB_MODE: offline with one line that says how to sync, and no question."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("wandb.login", lambda prompt: False)  # another test may have logged in, for the whole process
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a-run-s1"
    folder.mkdir()
    with caplog.at_level(logging.WARNING):
        run = wandb_run(folder)
    assert f"wandb sync {folder / 'wandb'}" in caplog.text
    assert run.id == (folder / "wandb_id").read_text()
    assert run.settings._offline and run.name == "a-run-s1" and run.config["gamma"] == 0.25
    writer = MetricsWriter(RunDirectory(folder), run)
    for step in (1, 2, 5):
        run.log({"profiling/a": 1.0})  # as TRL does, which moves wandb's own step on
        log(writer, step, accuracy=100 / 3, step_time=0.5, completion_length=float(step), **{"rewards/x/mean": 2.5})
        run.log({"profiling/b": 1.0})
    writer.on_train_end(ARGS, TrainerState(global_step=5), TrainerControl())

    history = [row for row in wandb_history(folder / "wandb") if "accuracy" in row]
    assert [row["step"] for row in history] == [1, 2, 5]
    for row, line in zip(history, lines(writer), strict=True):
        assert {key: value for key, value in row.items() if not key.startswith("_")} == line
        assert row["tokens_per_second"] == 24 * row["completion_length"]


def test_a_resumed_run_is_the_same_run_of_wandb_and_logs_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    folder.mkdir()
    identities, logged = set(), []
    for steps in ((1, 2, 3), (3, 4)):  # killed after step 3, resumed from checkpoint-2
        asked: dict[str, Any] = {}
        run = SimpleNamespace(
            define_metric=lambda *a, **k: None, log=lambda line, step, commit: logged.append((line["step"], step))
        )
        monkeypatch.setattr("wandb.init", lambda asked=asked, run=run, **options: asked.update(options) or run)
        writer = MetricsWriter(RunDirectory(folder), wandb_run(folder))
        for step in steps:
            log(writer, step, accuracy=1.0)
        identities.add((asked["id"], asked["resume"]))
        assert asked["settings"].finish_timeout == 60  # a server that is gone does not hold up the end
    assert len(identities) == 1
    # wandb leaves out what is logged at a count that it has passed: the second 3000.
    assert logged == [(1, 1000), (2, 2000), (3, 3000), (3, 3000), (4, 4000)]


def test_a_wandb_that_dies_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def die(line: Any, **options: Any) -> None:
        raise ConnectionResetError("Connection lost")

    writer = MetricsWriter(RunDirectory(tmp_path), SimpleNamespace(log=die))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log(writer, step, accuracy=1.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3]
    assert caplog.text.count("Connection lost; training continues without it") == 1


def test_without_an_answer_from_wandb_the_run_is_kept_offline(
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
    assert identities[0] != identities[1] == (tmp_path / "wandb_id").read_text()  # wandb still holds the first
    assert "timed out, so this run is logged offline; `wandb sync" in caplog.text
