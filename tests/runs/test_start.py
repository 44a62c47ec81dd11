"""The run directory: what is stored, and how a run is started, resumed or replaced."""

import importlib.metadata
import itertools
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from helpers.files import read_json, read_settings, tables_of
from helpers.refusals import refused
from helpers.runs import checkpoint, fake_run, rows_of
from helpers.settings import parsed
from pytest import MonkeyPatch

from gtpo.runs import start as start_module
from gtpo.runs.directory import RunDirectory, how_to_continue
from gtpo.runs.provenance import git_revision
from gtpo.runs.start import check_run, held_run, start_run

TABLES = tables_of(__file__)

NEW = ["config.yaml", "environment.json", "prompts.bin", "run.lock"]  # the files of a run that has just been started


@pytest.fixture(autouse=True)
def one_process(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def start(directory: Path, *argv: str) -> str | None:
    """``check_run`` and ``start_run`` as a train script calls them."""
    settings = parsed("--output_dir", str(directory), *argv)
    checkpoint = check_run(settings, rows=rows_of(10))
    start_run(settings)
    return checkpoint


# ---- start ----


def test_new_run_stores_settings_and_environment(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    run = tmp_path / "outputs" / "run"  # a fresh clone has no outputs/
    with monkeypatch.context() as patched:
        patched.setattr("gtpo.runs.start.write_atomically", lambda path, content: None)
        start(run)
        assert files_of(run) == ["run.lock"]  # a directory that has the lock is a run
    assert start(run, "--gamma", "0.25", "--seed", "11") is None
    assert files_of(run) == NEW
    stored = read_settings(run / "config.yaml")
    assert (stored["gamma"], stored["seed"], stored["model"], stored["dataset"]) == (0.25, 11, "tiny", "arithmetic")
    assert stored["adam_epsilon"] == 1e-8 and len(stored) > 150  # defaults are stored too
    environment = read_json(run / "environment.json")
    packages = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "wandb")
    versions = {name: importlib.metadata.version(name) for name in packages}
    assert versions.items() <= environment.pop("packages").items()
    assert isinstance(environment["gpus"], list) and environment["world_size"] == 1
    expected = {"python": platform.python_version(), "git_revision": git_revision(), "cpu_count": os.cpu_count()}
    assert environment | expected == environment


def test_existing_run_is_refused_and_kept(run: Path, tmp_path: Path) -> None:
    start(run, "--seed", "1")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (checkpoint(run, 5) / "trainer_state.json").write_text("")  # damaged
    for flags in ([], ["--resume"], ["--resume", "--overwrite"]):
        with refused("--resume"):
            start(run, "--seed", "2", *flags)
    assert read_settings(run / "config.yaml")["seed"] == 1
    with refused("--resume"):
        start(tmp_path / "nowhere", "--resume")
    assert not (tmp_path / "nowhere").exists()


def test_other_processes_accept_the_directory_of_the_main_process(run: Path, monkeypatch: MonkeyPatch) -> None:
    """Under torchrun every process starts the run, and the main one may already have created the directory."""
    start(run)
    (run / "metrics.jsonl").touch()
    monkeypatch.setattr("gtpo.runs.start.is_main_process", lambda: False)
    assert start(run) is None


# ---- killed at the start, or while another run is replaced ----


FIRST_FILES = ["run.lock", "config.yaml.tmp", "config.yaml", "prompts.bin", "environment.json.tmp", "environment.json"]
FIRST_FILES += ["wandb_id", "initial_entropy.json"]  # possibly of another model


@pytest.mark.parametrize("written", range(1, len(FIRST_FILES) + 1))
def test_a_run_killed_at_its_start_is_started_again(written: int, run: Path) -> None:
    (run / "completions").mkdir(parents=True)  # TRL's trainer creates it before the first step
    for name in FIRST_FILES[:written]:
        (run / name).write_text("{")  # truncated
    assert start(run, "--seed", "2") is None
    assert read_settings(run / "config.yaml")["seed"] == 2 and files_of(run) == NEW


@pytest.fixture
def finished(run: Path) -> Path:
    start(run, "--max_steps", "10")
    return fake_run(run, rows=[{"step": 5}, {"step": 10}], steps=(5, 10), saved=["adapter"]).path


@pytest.mark.parametrize("operation", range(30))
def test_overwrite_killed_in_between_leaves_a_run(operation: int, finished: Path, monkeypatch: MonkeyPatch) -> None:
    """--overwrite works after each deletion."""
    deletions = itertools.count()

    def killed(original: Callable[..., None]) -> Callable[..., None]:
        def delete(*args: Any, **kwargs: Any) -> None:
            if next(deletions) >= operation:
                raise KeyboardInterrupt
            original(*args, **kwargs)

        return delete

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, killed(getattr(os, name)))
        start(finished, "--overwrite")
    assert start(finished, "--overwrite") is None
    assert files_of(finished) == NEW


# ---- resuming ----


def test_a_resumed_run_deletes_or_restores_what_a_kill_left(run: Path) -> None:
    start(run)
    fake_run(run, steps=(2, 5, 7))
    for step in (2, 7):  # killed while it was deleted, and while it was written
        (run / f"checkpoint-{step}" / "files.json").unlink()
    (run / "best.old").mkdir()  # killed while it was replaced
    (run / "best.old" / "best.json").write_text('{"accuracy": 50, "step": 5}')
    start(run, "--resume")
    assert RunDirectory(run).read_best() == {"accuracy": 50.0, "step": 5}
    assert files_of(run) == sorted([*NEW, "best", "checkpoint-5"])


@pytest.mark.parametrize(
    ("name", "default"), [("early_stopping_patience", "null"), ("positive_advantage_weight", "1.0")]
)
def test_a_removed_setting_is_ignored_at_its_default(name: str, default: str, run: Path) -> None:
    start(run, "--gamma", "0.25")
    newest = checkpoint(run, 7)
    config = run / "config.yaml"
    stored = config.read_text()
    config.write_text(f"{stored}{name}: {default}\n")
    assert start(run, "--resume", "--max_steps", "9") == str(newest)
    assert read_settings(config)["gamma"] == 0.25
    config.write_text(f"{stored}{name}: 3\n")
    with refused(name):
        start(run, "--resume")


def test_a_finished_run_can_continue_but_not_change(finished: Path, tmp_path: Path) -> None:
    with refused("--gamma"):
        start(finished, "--resume", "--gamma", "0.3")
    assert read_settings(finished / "config.yaml")["gamma"] == 0.1
    with refused("is finished, and --max_steps 4 .* would have no effect"):
        start(finished, "--resume", "--max_steps", "4")
    assert start(finished, "--resume", "--merge", "16bit") == str(finished / "checkpoint-10")
    moved = shutil.copytree(finished, tmp_path / "moved")
    for flags in ([], ["--max_steps", "20"]):
        assert start(moved, "--resume", *flags) == str(moved / "checkpoint-10")


@pytest.mark.parametrize(("steps", "argv", "command"), TABLES["the_command_after_an_interruption"])
def test_the_command_after_an_interruption(
    steps: list[int], argv: list[str], command: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """--resume needs a checkpoint; before the first one the same command starts the run again."""
    run = tmp_path / "a run"
    start(run)
    fake_run(run, rows=[{"step": 1}], steps=steps)
    monkeypatch.setattr("sys.argv", argv)
    assert how_to_continue(held_run()) == command.format(run=run)


@pytest.mark.parametrize("words", [["--hub_token", "hf_SECRET"], ["--hub-token=hf_SECRET"]])
def test_no_command_shows_a_token(words: list[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train_gtpo.py", *words, "--push_to_hub"])
    flag = words[0].partition("=")[0]
    assert how_to_continue(None) == f"python train_gtpo.py {flag} YOUR_TOKEN --push_to_hub"


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_a_stored_config_does_not_overwrite_or_resume(flag: str, run: Path) -> None:
    """They apply to one start; if stored, they would apply to every run of the file."""
    start(run)
    checkpoint(run, 7)
    start(run, flag)
    reloaded = parsed("--config", str(run / "config.yaml")).run
    assert reloaded.resume is None and not reloaded.overwrite


def test_a_run_in_use_is_refused_at_once(run: Path) -> None:
    fake_run(run, {"gamma": 0.1}, steps=[5])
    with FileLock(run / "run.lock"), refused("in use"):
        check_run(parsed("--output_dir", str(run)), rows=rows_of(10))


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_overwrite_spares_the_directory_of_another_program(name: str, run: Path) -> None:
    """A run has both files; a directory with one of them is somebody else's."""
    run.mkdir()
    (run / name).write_text("{}")
    for flags in ([], ["--overwrite"]):
        with refused("is not a run"):
            start(run, *flags)


def test_alias_and_hub_id_are_the_same_policy(run: Path) -> None:
    fake_run(run, {"model": "qwen"}, steps=[5])
    settings = parsed("--output_dir", str(run))
    settings.run.resume = "auto"
    settings.model.model = "Qwen/Qwen2.5-3B-Instruct"
    assert check_run(settings, rows=rows_of(10))
    settings.model.model = "llama"
    with refused("--model llama .before: qwen."):
        check_run(settings, rows=rows_of(10))


def plan(run: Path, *argv: str, rows: Any = None) -> str | None:
    return check_run(parsed("--dry_run", "--output_dir", str(run), *argv), rows_of(10) if rows is None else rows)


def test_a_plan_makes_the_checks_of_a_run_and_takes_no_lock(run: Path, tmp_path: Path) -> None:
    """Too few rows, a directory that exists, changed settings, a reporter; the run may be training."""
    assert plan(run) is None and not run.exists()
    with refused("10 training rows are too few for a step of 11 prompts"):
        plan(run, "--prompts_per_step", "11")
    with refused("--report_to wandbb"):
        plan(run, "--report_to", "wandbb")
    start(run)
    checkpoint(run, 5)
    with refused("run exists: --resume continues"):
        plan(run)
    with refused("cannot be resumed with --lora_rank 5"):
        plan(run, "--resume", "--lora_rank", "5")
    with refused("cannot be resumed with changed rows"):
        plan(run, "--resume", rows=rows_of(11))
    for held in start_module._locks.values():  # another process trains it
        held.release(force=True)
    start_module._locks.clear()
    with FileLock(run / "run.lock"):
        assert plan(run, "--resume") == str(run / "checkpoint-5")
        with refused("in use by another process"):
            check_run(parsed("--resume", str(run)), rows_of(10))


def test_rows_that_a_plan_has_not_asked_the_hub_for_count_as_those_of_the_run(run: Path) -> None:
    """Of a dataset whose number of rows is known, and of one whose is not."""
    start(run)
    checkpoint(run, 5)
    for unread in ([{"prompt": "", "answer": ""}] * 10, []):
        assert plan(run, "--resume", rows=unread) == str(run / "checkpoint-5")
    with refused("0 training rows"):
        check_run(parsed("--resume", str(run)), [])


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_plan_needs_no_package_of_a_reporter(is_installed: bool, run: Path, monkeypatch: MonkeyPatch) -> None:
    names = ["tensorboard"] * is_installed
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", lambda: names)
    plan(run, "--report_to", "tensorboard")
    with nullcontext() if is_installed else refused("--report_to tensorboard: its package is not installed"):
        check_run(parsed("--output_dir", str(run), "--report_to", "tensorboard"), rows_of(10))


def test_a_step_has_the_prompts_of_all_processes(run: Path, monkeypatch: MonkeyPatch) -> None:
    settings = parsed("--output_dir", str(run), "--prompts_per_step", "4")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_run(settings, rows_of(8))
    with refused("7 training rows"):
        check_run(settings, rows_of(7))
