"""What a run leaves behind: its directory, metrics.jsonl and the offline wandb run."""

import importlib.metadata
import json
import logging
import math
import os
import platform
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import TrainerControl, TrainerState
from trl import GRPOConfig

from config import DataArguments, GTPOArguments, ModelArguments, RunArguments, UsageError, parse
from faults import MANIFEST, write_atomically
from tracking import LOCK, MetricsWriter, check_run, checkpoints, git_revision, start_run, start_wandb

CLASSES = (DataArguments, ModelArguments, RunArguments, GTPOArguments, GRPOConfig)


def start(folder: Path, *argv: str) -> str | None:
    """``check_run`` and ``start_run`` as a train script calls them."""
    _, _, run, _, _, resolved = parse("gtpo", CLASSES, ["--output_dir", str(folder), *argv])
    checkpoint = check_run(resolved, run, rows=10)
    start_run(resolved, run)
    return checkpoint


def checkpoint(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    state = json.dumps({"global_step": step})
    (folder / "trainer_state.json").write_text(state)
    (folder / MANIFEST).write_text(json.dumps({"trainer_state.json": len(state)}))
    return folder


# ---- the run directory ----


def test_new_run_stores_every_setting(tmp_path: Path) -> None:
    assert start(tmp_path / "run", "--gamma", "0.25", "--seed", "11") is None
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (stored["gamma"], stored["seed"], stored["model"], stored["dataset"]) == (0.25, 11, "tiny", "arithmetic")
    assert stored["entropy_threshold"] == math.log(2)
    assert stored["adam_epsilon"] == 1e-8 and stored["top_p"] == 1.0  # values that nobody named, too
    assert len(stored) > 150 and "hub_token" not in stored
    again = parse("gtpo", CLASSES, ["--config", str(tmp_path / "run" / "config.yaml")])[-1]
    assert {key: again[key] for key in stored} == stored


def test_new_run_stores_its_environment(tmp_path: Path) -> None:
    start(tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert stored["python"] == platform.python_version()
    for package in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "wandb"):
        assert stored["packages"][package] == importlib.metadata.version(package)
    assert stored["git_revision"] == git_revision()
    assert stored["cpu_count"] == os.cpu_count() and isinstance(stored["gpus"], list) and stored["world_size"] == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "environment.json", LOCK]


def test_git_revision_is_a_commit() -> None:
    revision = git_revision()
    assert revision is None or (len(revision.removesuffix("-dirty")) == 40 and int(revision[:40], 16) >= 0)


def test_existing_run_is_refused_and_kept(tmp_path: Path) -> None:
    start(tmp_path / "run", "--seed", "1")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match="exists: --resume continues it, --overwrite replaces it") as caught:
        start(tmp_path / "run", "--seed", "2")
    assert "\n" not in str(caught.value) and str(tmp_path / "run") in str(caught.value)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 1


def test_a_run_that_failed_before_its_first_step_is_started_anew(tmp_path: Path) -> None:
    start(tmp_path / "run", "--seed", "1")
    (tmp_path / "run" / "initial_entropy.json").write_text("{}")  # of whatever model that was
    assert start(tmp_path / "run", "--seed", "2") is None
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 2
    assert not (tmp_path / "run" / "initial_entropy.json").exists()


def test_a_folder_that_is_no_run_is_not_taken_for_a_failed_one(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("of: another program\n")
    with pytest.raises(UsageError, match="mine exists: "):
        start(tmp_path / "mine")
    assert (tmp_path / "mine" / "config.yaml").read_text() == "of: another program\n"


@pytest.mark.parametrize(
    ("flag", "value"), [("model", "other/model"), ("lora_rank", "8"), ("lora_target_modules", "q_proj")]
)
def test_a_resumed_run_keeps_its_policy(flag: str, value: str, tmp_path: Path) -> None:
    start(tmp_path / "run")
    checkpoint(tmp_path / "run", 5)
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(UsageError, match=f"run was trained with --{flag} .*cannot change to .*{value}.*leave it out"):
        start(tmp_path / "run", "--resume", f"--{flag}", value)
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    assert start(tmp_path / "run", "--resume", "--max_steps", "9") == str(tmp_path / "run" / "checkpoint-5")


def test_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert start(tmp_path / "run") is None


def test_overwrite_replaces_the_run(tmp_path: Path) -> None:
    start(tmp_path / "run", "--seed", "1")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    checkpoint(tmp_path / "run", 5)
    assert start(tmp_path / "run", "--seed", "2", "--overwrite") is None
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "environment.json", LOCK]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 2


def test_overwrite_spares_a_directory_that_is_no_run(tmp_path: Path) -> None:
    """--output_dir ~ --overwrite would empty a home directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError):
        start(tmp_path / "home", "--overwrite")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_other_processes_are_not_refused_what_the_first_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun every process starts the run; the first may be ahead, and its directory is not a stranger's."""
    start(tmp_path / "run", "--seed", "1")
    monkeypatch.setattr("tracking.ON_MAIN_PROCESS", False)
    assert start(tmp_path / "run", "--seed", "1") is None


def test_fewer_rows_than_a_step_takes_are_refused(tmp_path: Path) -> None:
    _, _, run, _, _, resolved = parse("gtpo", CLASSES, ["--G", "6", "--prompts_per_step", "3"])
    with pytest.raises(UsageError, match="2 training rows are too few for a step of 3 prompts"):
        check_run(resolved, run, rows=2)
    check_run(resolved, run, rows=3)


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    for extra in ([], ["--overwrite"]):
        with pytest.raises(UsageError):
            start(tmp_path / "run", *extra)
    assert (tmp_path / "run").read_text() == "a file"


def test_dry_run_prints_the_settings_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        start(tmp_path / "run", "--dry_run", "--gamma", "0.25")
    assert ended.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["gamma"] == 0.25
    assert list(tmp_path.iterdir()) == []


# ---- resuming ----


def test_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-old").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_resume_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    start(tmp_path / "run")
    for step in (20, 100):
        checkpoint(tmp_path / "run", step)
    assert start(tmp_path / "run", "--resume") == str(tmp_path / "run" / "checkpoint-100")


def test_resume_of_a_named_run_takes_its_settings(tmp_path: Path) -> None:
    start(tmp_path / "run", "--gamma", "0.25")
    newest = checkpoint(tmp_path / "run", 7)
    _, _, run, gtpo, args, resolved = parse("gtpo", CLASSES, ["--resume", str(tmp_path / "run"), "--max_steps", "9"])
    assert (gtpo.gamma, args.max_steps, args.output_dir) == (0.25, 9, str(tmp_path / "run"))
    assert check_run(resolved, run, 10) == str(newest)


def test_run_started_with_overwrite_can_be_resumed(tmp_path: Path) -> None:
    start(tmp_path / "run", "--overwrite")
    newest = checkpoint(tmp_path / "run", 7)
    _, _, run, _, _, resolved = parse("gtpo", CLASSES, ["--resume", str(tmp_path / "run")])
    assert check_run(resolved, run, 10) == str(newest)


def test_config_of_a_run_repeats_it_and_harms_nothing(tmp_path: Path) -> None:
    """--overwrite and --resume are about one start: stored, they would act on every run made from the file."""
    start(tmp_path / "run", "--overwrite")
    checkpoint(tmp_path / "run", 7)
    with pytest.raises(UsageError, match="exists"):
        _, _, run, _, _, resolved = parse("gtpo", CLASSES, ["--config", str(tmp_path / "run" / "config.yaml")])
        check_run(resolved, run, 10)
    assert (tmp_path / "run" / "checkpoint-7").is_dir()

    start(tmp_path / "run", "--resume")
    again = parse("gtpo", CLASSES, ["--config", str(tmp_path / "run" / "config.yaml")])[2]
    assert again.resume is None and not again.overwrite


def test_resume_skips_a_checkpoint_that_was_cut_short(tmp_path: Path) -> None:
    """A kill or a full disk while checkpoint-9 is written: its weights are there, its state is not."""
    start(tmp_path / "run")
    whole = checkpoint(tmp_path / "run", 7)
    (checkpoint(tmp_path / "run", 9) / "trainer_state.json").rename(tmp_path / "run" / "checkpoint-9" / "adapter.bin")
    assert start(tmp_path / "run", "--resume") == str(whole)


def test_resume_without_checkpoint_is_refused(tmp_path: Path) -> None:
    start(tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="holds no checkpoint to resume"):
            start(folder, "--resume")
    assert not (tmp_path / "nowhere").exists()


def test_resume_of_an_unknown_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        start(tmp_path / "run", "--resume", str(tmp_path / "nowhere"))


def test_resume_and_overwrite_together_are_refused(tmp_path: Path) -> None:
    start(tmp_path / "run")
    checkpoint(tmp_path / "run", 7)
    with pytest.raises(UsageError, match="give one of them"):
        start(tmp_path / "run", "--resume", "--overwrite")
    assert (tmp_path / "run" / "checkpoint-7").is_dir()


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")  # cannot be encoded: fails while writing
    assert path.read_text() == "old"


# ---- metrics.jsonl ----

ARGS = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=6, num_generations=6)
ARGS.gradient_accumulation_steps = 2


def log(writer: MetricsWriter, step: int, **metrics: Any) -> None:
    writer.on_log(ARGS, TrainerState(global_step=step), TrainerControl(), logs=metrics)


def lines(writer: MetricsWriter) -> list[dict[str, Any]]:
    return [json.loads(line) for line in writer.path.read_text().splitlines()]


def test_a_line_per_log_written_as_it_happens(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.on_train_begin(ARGS, TrainerState(global_step=0), TrainerControl())
    for step in (1, 2, 3):
        log(writer, step, accuracy=10.0 * step, entropy=0.5)
        assert len(lines(writer)) == step  # nothing waits for the end
    log(writer, 3, train_runtime=1.0, train_loss=0.5)  # the summary of the end is no step
    assert lines(writer) == [{"step": step, "accuracy": 10.0 * step, "entropy": 0.5} for step in (1, 2, 3)]


def test_tokens_per_second(tmp_path: Path) -> None:
    """30 tokens a completion x 6 a batch x 2 batches a step, in 0.5 s."""
    writer = MetricsWriter(tmp_path)
    log(writer, 1, completion_length=30.0, step_time=0.5)
    log(writer, 2, completion_length=30.0)
    assert lines(writer)[0]["tokens_per_second"] == 720.0
    assert "tokens_per_second" not in lines(writer)[1]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.on_log(ARGS, TrainerState(global_step=1, is_world_process_zero=False), TrainerControl(), logs={"a": 1.0})
    assert not writer.path.exists()


def test_resume_drops_the_steps_after_the_checkpoint_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "loss": -step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo'
    )
    writer = MetricsWriter(tmp_path)
    writer.on_train_begin(ARGS, TrainerState(global_step=3), TrainerControl())
    assert lines(writer) == [{"step": step, "loss": -step} for step in (1, 2, 3)]
    log(writer, 4, loss=0.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3, 4]


def test_half_a_line_at_the_checkpoint_itself_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    writer = MetricsWriter(tmp_path)
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


SETTINGS = {"run_name": "a-run-s1", "model": "tiny", "dataset": "arithmetic", "seed": 1, "gamma": 0.25}


def test_wandb_groups_are_runs_that_differ_in_their_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel grouped by them shows mean and spread over seeds: runs of an ablation must not be averaged together."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    ignored = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr("wandb.init", lambda **settings: SimpleNamespace(define_metric=ignored, **settings))

    def group(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return str(start_wandb(tmp_path / name, SETTINGS, "GTPO").group)

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
        run = start_wandb(folder, SETTINGS, "GTPO")
    assert f"wandb sync {folder / 'wandb'}" in caplog.text
    assert run.id == (folder / "wandb_id").read_text()
    assert run.settings._offline and run.name == "a-run-s1" and run.config["gamma"] == 0.25
    writer = MetricsWriter(folder, run)
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
        writer = MetricsWriter(folder, start_wandb(folder, SETTINGS, "GTPO"))
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

    writer = MetricsWriter(tmp_path, SimpleNamespace(log=die))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log(writer, step, accuracy=1.0)
    assert [line["step"] for line in lines(writer)] == [1, 2, 3]
    assert caplog.text.count("Connection lost; the run goes on without it") == 1


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
        start_wandb(tmp_path, SETTINGS, "GTPO")
    assert modes == ["online", "offline"]
    assert identities[0] != identities[1] == (tmp_path / "wandb_id").read_text()  # wandb still holds the first
    assert "timed out, so this run is kept offline; `wandb sync" in caplog.text
