"""The run directory: what is stored, and how a run is started, resumed or replaced."""

import importlib.metadata
import math
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.files import read_json, read_settings, tables_of
from helpers.refusals import refused
from helpers.runs import checkpoint, fake_run, rows_of
from helpers.settings import parsed
from pytest import MonkeyPatch

from gtpo.runs.directory import RunDirectory, how_to_continue
from gtpo.runs.provenance import git_revision
from gtpo.runs.start import check_run, held_run, start_run

TABLES = tables_of(__file__)

NEW = ["config.yaml", "environment.json", "prompts.bin", "run.lock"]  # the files of a run that has just been started


@pytest.fixture(autouse=True)
def one_process(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def start(directory: Path, *argv: str) -> str | None:
    """``check_run`` and ``start_run`` as a train script calls them."""
    settings = parsed("--output_dir", str(directory), *argv)
    checkpoint = check_run(settings, rows=rows_of(10))
    start_run(settings)
    return checkpoint


# ---- start ----


def test_new_run_stores_every_setting(tmp_path: Path) -> None:
    assert start(tmp_path / "run", "--gamma", "0.25", "--seed", "11") is None
    stored = read_settings(tmp_path / "run" / "config.yaml")
    assert (stored["gamma"], stored["seed"], stored["model"], stored["dataset"]) == (0.25, 11, "tiny", "arithmetic")
    assert stored["entropy_threshold"] == math.log(2)
    assert stored["adam_epsilon"] == 1e-8 and stored["top_p"] == 1.0  # defaults are stored too
    assert len(stored) > 150 and "hub_token" not in stored
    reloaded = parsed("--config", str(tmp_path / "run" / "config.yaml")).to_dict()
    assert {key: reloaded[key] for key in stored} == stored


def test_new_run_stores_its_environment(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    seen = []

    def write(path: Path, content: str | Callable[[Path], None]) -> None:
        seen.append(sorted(path.parent.iterdir()))
        path.write_text(content) if isinstance(content, str) else content(path)

    monkeypatch.setattr("gtpo.runs.start.write_atomically", write)
    start(tmp_path / "run")
    assert seen[0] == [tmp_path / "run" / "run.lock"]  # a directory that has it is a run
    stored = read_json(tmp_path / "run" / "environment.json")
    assert stored["python"] == platform.python_version()
    for package in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "wandb"):
        assert stored["packages"][package] == importlib.metadata.version(package)
    assert stored["git_revision"] == git_revision()
    assert stored["cpu_count"] == os.cpu_count() and isinstance(stored["gpus"], list) and stored["world_size"] == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == NEW


def test_resume_without_a_complete_checkpoint_is_refused(tmp_path: Path) -> None:
    with refused("--resume"):
        start(tmp_path / "nowhere", "--resume")
    start(tmp_path / "run")
    (checkpoint(tmp_path / "run", 5) / "trainer_state.json").write_text("")
    with refused("--resume"):
        start(tmp_path / "run", "--resume")
    assert not (tmp_path / "nowhere").exists() and start(tmp_path / "run", "--overwrite") is None


def test_existing_run_is_refused_and_kept(tmp_path: Path) -> None:
    start(tmp_path / "run", "--seed", "1")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    for flags in ([], ["--resume"], ["--resume", "--overwrite"]):  # the second one without a checkpoint
        with refused("--resume"):
            start(tmp_path / "run", "--seed", "2", *flags)
    checkpoint(tmp_path / "run", 5)
    with refused("--overwrite"):
        start(tmp_path / "run", "--seed", "2")
    assert read_settings(tmp_path / "run" / "config.yaml")["seed"] == 1


def test_other_processes_accept_the_directory_of_the_main_process(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Under torchrun every process starts the run, and the main one may already have created the directory."""
    start(tmp_path / "run", "--seed", "1")
    monkeypatch.setenv("RANK", "1")
    assert start(tmp_path / "run", "--seed", "1") is None


# ---- killed at the start, or while another run is replaced ----


FIRST_FILES = ["run.lock", "config.yaml.tmp", "config.yaml", "prompts.bin", "environment.json.tmp", "environment.json"]
FIRST_FILES += ["wandb_id", "initial_entropy.json"]  # possibly of another model


@pytest.mark.parametrize("written", range(1, len(FIRST_FILES) + 1))
@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_a_run_killed_at_its_start_is_started_again(written: int, flags: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in FIRST_FILES[:written]:
        (run / name).write_text("{")  # truncated
    (run / "completions").mkdir()  # TRL's trainer creates it before the first step
    assert start(run, "--seed", "2", *flags) is None
    assert read_settings(run / "config.yaml")["seed"] == 2
    assert sorted(path.name for path in run.iterdir()) == NEW


def finished_run(path: Path) -> Path:
    start(path, "--max_steps", "10")
    return fake_run(path, rows=[{"step": 5}, {"step": 10}], steps=(5, 10), saved=["adapter"]).path


@pytest.mark.parametrize("operation", range(30))
def test_overwrite_killed_in_between_leaves_a_run(operation: int, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """--overwrite works after each deletion."""
    run = finished_run(tmp_path / "run")
    left = operation
    originals = {name: getattr(os, name) for name in ("unlink", "rmdir")}

    def killed_at(name: str) -> Callable[..., None]:
        def delete(*args: object, **kwargs: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            originals[name](*args, **kwargs)

        return delete

    with monkeypatch.context() as patched:
        for name in originals:
            patched.setattr(os, name, killed_at(name))
        try:
            start(run, "--overwrite")
        except KeyboardInterrupt:
            assert left < 0
    assert start(run, "--overwrite") is None
    assert sorted(path.name for path in run.iterdir()) == NEW


def test_the_best_adapter_survives_a_killed_replacement(tmp_path: Path) -> None:
    start(tmp_path / "run")
    checkpoint(tmp_path / "run", 5)
    (tmp_path / "run" / "best.old").mkdir()
    (tmp_path / "run" / "best.old" / "best.json").write_text('{"accuracy": 50, "step": 5}')
    start(tmp_path / "run", "--resume")
    assert RunDirectory(tmp_path / "run").read_best() == {"accuracy": 50.0, "step": 5}
    assert not (tmp_path / "run" / "best.old").exists()


# ---- resuming ----


@pytest.mark.parametrize("name", ["early_stopping_patience", "positive_advantage_weight"])
def test_a_removed_setting_is_ignored_at_its_default(name: str, tmp_path: Path) -> None:
    start(tmp_path / "run", "--gamma", "0.25")
    newest = checkpoint(tmp_path / "run", 7)
    config = tmp_path / "run" / "config.yaml"
    stored = config.read_text()
    default = "null" if name.startswith("early") else "1.0"
    config.write_text(f"{stored}{name}: {default}\n")
    settings = parsed("--resume", str(tmp_path / "run"), "--max_steps", "9")
    assert (settings.gtpo.gamma, settings.trainer.max_steps, settings.output_dir) == (0.25, 9, tmp_path / "run")
    assert check_run(settings, rows_of(10)) == str(newest)
    config.write_text(f"{stored}{name}: 3\n")
    for argv in (["--resume", str(tmp_path / "run")], [f"--{name}", default]):
        with refused(name):
            parsed(*argv)


def test_a_finished_run_can_continue_but_not_change(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with refused("--gamma"):
        start(run, "--resume", "--gamma", "0.3")
    assert read_settings(run / "config.yaml")["gamma"] == 0.1
    assert start(run, "--resume", "--merge", "16bit") == str(run / "checkpoint-10")
    moved = shutil.copytree(run, tmp_path / "moved")
    assert start(moved, "--resume") == str(moved / "checkpoint-10")
    assert start(moved, "--resume", "--max_steps", "20") == str(moved / "checkpoint-10")


def test_a_run_cannot_end_before_its_checkpoint(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with refused(f"--max_steps 4 is before step 10 of {run}/checkpoint-10"):
        start(run, "--resume", "--max_steps", "4")


def test_what_a_kill_left_unfinished_is_deleted(tmp_path: Path) -> None:
    start(tmp_path / "run")
    fake_run(tmp_path / "run", steps=(2, 5, 7))
    for step in (2, 7):  # killed while it was deleted, and while it was written
        (tmp_path / "run" / f"checkpoint-{step}" / "files.json").unlink()
    start(tmp_path / "run", "--resume")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-5"]


@pytest.mark.parametrize(
    ("steps", "argv", "command"),
    TABLES["the_command_after_an_interruption"],
)
def test_the_command_after_an_interruption(
    steps: list[int], argv: list[str], command: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """--resume needs a checkpoint; before the first one the same command starts the run again."""
    run = tmp_path / "a run"
    monkeypatch.setattr("gtpo.runs.start._locks", {})
    start(run)
    fake_run(run, rows=[{"step": 1}], steps=steps)
    monkeypatch.setattr("sys.argv", argv)
    assert how_to_continue(held_run()) == command.format(run=run)


@pytest.mark.parametrize("words", [["--hub_token", "hf_SECRET"], ["--hub-token=hf_SECRET"], ["--hub_token=hf_SECRET"]])
def test_no_command_shows_a_token(words: list[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("gtpo.runs.start._locks", {})
    monkeypatch.setattr("sys.argv", ["train_gtpo.py", *words, "--push_to_hub"])
    flag = words[0].partition("=")[0]
    assert how_to_continue(held_run()) == f"python train_gtpo.py {flag} YOUR_TOKEN --push_to_hub"


def test_stored_config_does_not_overwrite_or_resume(tmp_path: Path) -> None:
    """--overwrite and --resume apply to one start; if stored, they would apply to every run of the file."""
    start(tmp_path / "run", "--overwrite")
    checkpoint(tmp_path / "run", 7)
    with refused("exists"):
        check_run(parsed("--config", str(tmp_path / "run" / "config.yaml")), rows_of(10))
    assert (tmp_path / "run" / "checkpoint-7").is_dir()

    start(tmp_path / "run", "--resume")
    reloaded = parsed("--config", str(tmp_path / "run" / "config.yaml")).run
    assert reloaded.resume is None and not reloaded.overwrite


def test_a_run_in_use_is_refused_at_once(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", {"gamma": 0.1}, steps=[5]).path
    settings = parsed("--output_dir", str(run))
    settings.run.resume = "auto"
    with FileLock(run / "run.lock"), refused("in use"):
        check_run(settings, rows=rows_of(10))


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_overwrite_spares_the_directory_of_another_program(name: str, tmp_path: Path) -> None:
    """A run has both files; a directory with one of them is somebody else's."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("{}")
    for flags in ([], ["--overwrite"]):
        with refused("is not a run"):
            check_run(parsed("--output_dir", str(tmp_path / "mine"), *flags), rows=rows_of(10))


@pytest.mark.parametrize("stored", ["qwen", "Qwen/Qwen2.5-3B-Instruct"])
def test_alias_and_hub_id_are_the_same_policy(stored: str, tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", {"model": stored}, steps=[5]).path
    settings = parsed("--output_dir", str(tmp_path / "other"))
    settings.trainer.output_dir = str(run)
    settings.run.resume = "auto"
    for model in ("qwen", "Qwen/Qwen2.5-3B-Instruct"):
        settings.model.model = model
        assert check_run(settings, rows=rows_of(10)) == str(run / "checkpoint-5")
    settings.model.model = "llama"
    with refused(f"--model {stored}"):
        check_run(settings, rows=rows_of(10))


# ---- printed commands ----


def test_a_step_has_the_prompts_of_all_processes(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    settings = parsed("--output_dir", str(tmp_path / "run"), "--prompts_per_step", "4")
    check_run(settings, rows=rows_of(4))
    with refused("3 training rows"):
        check_run(settings, rows=rows_of(3))
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_run(settings, rows=rows_of(8))
    with refused("7 training rows"):
        check_run(settings, rows=rows_of(7))
