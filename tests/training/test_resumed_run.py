"""A resumed run trains with the rate that it says, and goes on with its checkpoints, best/ and adapter."""

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.canned import FILTER, settings_of
from helpers.files import read_json
from helpers.runs import fake_run, metrics_of
from helpers.settings import parsed
from pytest import LogCaptureFixture, MonkeyPatch
from transformers import TrainerCallback

from gtpo.errors import RunError, UsageError
from gtpo.models.load import load_policy
from gtpo.runs.directory import RunDirectory, damage, find_weights, latest_complete
from gtpo.training.loop import attach_callbacks, run

ADAM = {"optim": "adamw_torch", "lr_scheduler_type": "cosine", "learning_rate": 1e-3, "save_steps": 2}


@pytest.fixture
def tiny(shallow: Path) -> Path:
    return shallow


@pytest.fixture
def plain(build: Any, tmp_path: Path) -> Any:
    """A trainer to which ``run`` adds the callbacks."""

    def plain(name: str = "", **settings: Any) -> Any:
        fake_run(tmp_path / name, {"run_name": "a", "model": "m", "dataset": "d"})
        return build("gtpo", name, save_strategy="steps", gtpo=FILTER, **(ADAM | settings))

    return plain


@pytest.fixture
def tracked(plain: Any) -> Any:
    def tracked(**settings: Any) -> Any:
        trainer = plain(**settings)
        attach_callbacks(trainer, settings_of(trainer), RunDirectory(trainer.args.output_dir))
        return trainer

    return tracked


def test_a_resumed_run_saves_as_its_settings_say(tracked: Any, tmp_path: Path) -> None:
    """Transformers would keep the steps of the checkpoint."""
    tracked(max_steps=2).train()
    trainer = tracked(max_steps=9, save_steps=3, save_total_limit=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-9"}


# ---- the final weights of a run that is resumed with more steps ----


def weights_of(directory: Path) -> bytes:
    return (directory / "adapter" / "adapter_model.safetensors").read_bytes()


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.fixture
def until(plain: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> Any:
    """``until(name, max_steps)``: train a run from its newest checkpoint, if there is one, to its end."""
    monkeypatch.setattr("gtpo.training.loop.write_report", lambda path: None)  # it takes longer than the steps

    def until(name: str, max_steps: int, *callbacks: TrainerCallback) -> None:
        trainer = plain(name, max_steps=max_steps, learning_rate=0.01, lr_scheduler_type="constant", seed=1)
        for callback in callbacks:
            trainer.add_callback(callback)
        checkpoint = latest_complete(tmp_path / name)
        run(trainer, settings_of(trainer), str(checkpoint) if checkpoint else None)

    return until


class Killed(BaseException):
    """What a kill leaves is what was written before it."""


@pytest.mark.parametrize(("event", "newest"), [("on_step_end", 2), ("on_train_end", 6)])
def test_a_resumed_run_that_dies_has_no_final_weights(event: str, newest: int, until: Any, tmp_path: Path) -> None:
    until("whole", 2)
    until("whole", 6)
    until("cut", 2)
    cut = RunDirectory(tmp_path / "cut")
    first = weights_of(cut.path)
    kill = TrainerCallback()
    setattr(kill, event, Mock(side_effect=Killed))
    with pytest.raises(Killed):
        until("cut", 6, kill)
    (earlier,) = cut.earlier_weights()
    assert not cut.is_finished and earlier == cut.path / "adapter-step-2"
    assert (earlier / "adapter_model.safetensors").read_bytes() == first
    with pytest.raises(UsageError, match=f"not finished .*adapter-step-2 .*--checkpoint {newest}`"):
        find_weights(cut.path)
    until("cut", 6)
    assert cut.is_finished and weights_of(cut.path) == weights_of(tmp_path / "whole") != first
    assert files_of(cut.path) == files_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("operation", range(0, 44, int(os.environ.get("GTPO_EVERY", 5))))  # all: GTPO_EVERY=1
def test_a_resumed_run_killed_at_a_file_operation(
    operation: int, until: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Final weights are those of the newest step, or there are none."""
    until("run", 2)
    path = tmp_path / "run"
    first = weights_of(path)
    operations = itertools.count()

    def killed_at(original: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            if next(operations) >= operation:
                raise Killed
            return original(*args, **kwargs)

        return change

    with monkeypatch.context() as patched, suppress(Killed):
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
            patched.setattr(os, name, killed_at(getattr(os, name)))
        until("run", 4)
    if RunDirectory(path).is_finished:
        is_first = weights_of(path) == first
        assert is_first == (not (path / "checkpoint-4" / "files.json").exists() and not (path / "adapter.old").exists())
    until("run", 4)
    assert weights_of(path) != first
    assert not [name for name in files_of(path) if name.endswith((".tmp", ".old")) or "-step-" in name]


def test_a_finished_run_that_is_resumed_is_saved_again(until: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Its weights and metrics are as before, also if it is killed before they are saved."""
    path = tmp_path / "run"
    until("run", 2)
    weights = weights_of(path)
    logged = metrics_of(path)
    (path / "metrics.jsonl").unlink()
    (path / "adapter" / "adapter_model.safetensors").unlink()
    until("run", 2)
    assert weights_of(path) == weights and metrics_of(path) == logged and len(logged) == 2
    monkeypatch.setattr("gtpo.training.loop.save_adapter", lambda *_: None)  # killed before it
    until("run", 2)
    assert RunDirectory(path).is_finished and weights_of(path) == weights


# ---- best/ ----


def best_of(directory: Path) -> Any:
    return read_json(directory / "best" / "best.json")


def test_best_of_a_resumed_run_is_of_all_steps(tracked: Any, tmp_path: Path) -> None:
    """The window of the mean reaches back over the resume: 2 of 16 steps."""
    settings = {"max_steps": 16, "save_steps": 1}
    tracked(**settings).train()
    logged = [line["reward"] for line in metrics_of(tmp_path)]
    means = [(a + b) / 2 for a, b in itertools.pairwise(logged)]
    step = means.index(max(means)) + 2  # the first full window ends at step 2
    best = {"accuracy": max(means), "step": step}
    assert best_of(tmp_path) == best
    shutil.rmtree(tmp_path / "best")
    tracked(**settings).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step - 1}"))
    assert best_of(tmp_path) == best


def test_the_window_of_best_counts_steps_not_lines(tracked: Any, tmp_path: Path) -> None:
    """One of 15 steps is less than the five of a line, which is their mean."""
    tracked(max_steps=15, logging_steps=5, save_steps=15).train()
    logged = {line["step"]: line["reward"] for line in metrics_of(tmp_path)}
    assert list(logged) == [5, 10, 15]
    step = max(logged, key=logged.__getitem__)
    assert best_of(tmp_path) == {"accuracy": logged[step], "step": step}


@pytest.mark.parametrize("fails", [False, True])
def test_a_line_over_a_resume_is_that_of_the_undisturbed_run(fails: bool, plain: Any, tmp_path: Path) -> None:
    """A checkpoint two steps after a line: loss, metrics and best/ are means of all five steps.

    Also one that was written when the reward of the next step failed: its completions have been counted by then.
    """
    failing = tmp_path / "failing"

    def train_to(name: str, checkpoint: str | None = None, save_steps: int = 7) -> None:
        trainer = plain(name, max_steps=15, logging_steps=5, save_steps=save_steps, rewards=[reward])
        attach_callbacks(trainer, settings_of(trainer), RunDirectory(trainer.args.output_dir))
        trainer.train(resume_from_checkpoint=checkpoint)

    def reward(completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
        if failing.exists() and trainer_state.global_step == 7:
            raise KeyError("weird row")
        return [float(len(text) % 7) for text in completions]

    train_to("whole")
    if fails:
        failing.touch()
        fake_run(tmp_path / "cut")
        (tmp_path / "cut" / "run.lock").touch()  # a script's
        with pytest.raises(RunError, match="weird row"):
            train_to("cut", save_steps=15)
        failing.unlink()
    else:
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    checkpoint = tmp_path / "cut" / "checkpoint-7"
    assert read_json(checkpoint / "unlogged.json")["since"] == 5 and damage(checkpoint) is None
    train_to("cut", str(checkpoint))
    whole, cut = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "cut")
    names = {name for name in whole[1] if "time" not in name and "per_second" not in name}
    assert [line["step"] for line in cut] == [5, 10, 15] and "loss" in names
    for line, expected in zip(cut, whole, strict=True):
        assert {name: line[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-6)
    assert best_of(tmp_path / "cut") == best_of(tmp_path / "whole")
    assert not (tmp_path / "whole" / "checkpoint-15" / "unlogged.json").exists()


def test_a_damaged_best_is_not_kept(tracked: Any, tmp_path: Path, caplog: LogCaptureFixture) -> None:
    tracked(max_steps=4).train()
    best = tmp_path / "best"
    assert damage(best) is None
    (best / "adapter_model.safetensors").write_bytes(b"")
    tracked(max_steps=6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert f"{best} is damaged (adapter_model.safetensors" in caplog.text
    assert damage(best) is None and best_of(tmp_path)["step"] > 4


def test_the_process_group_of_vllm_ends_at_exit(plain: Any, monkeypatch: MonkeyPatch) -> None:
    """Not with the run: a notebook trains again. NCCL would warn of a group that is left, after a run's last words."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    at_exit: list[Any] = []
    loaded = SimpleNamespace(), SimpleNamespace(init_kwargs={})
    with monkeypatch.context() as patched:
        patched.setattr("atexit.register", at_exit.append)
        patched.setattr("gtpo.models.load.build_policy", lambda *_, **__: loaded)
        load_policy(parsed("--model", "tiny"), "unsloth")
    trainer = plain(max_steps=2)
    run(trainer, settings_of(trainer), None)
    assert torch.distributed.is_initialized()
    (handler,) = at_exit
    handler()
    assert not torch.distributed.is_initialized()
