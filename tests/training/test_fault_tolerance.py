"""Fault tolerance: non-finite values, checkpoints, signals, exit codes, edge cases of groups."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import inf, nan
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR2
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.canned import GROUP, canned_group, settings_of
from helpers.files import read_json
from helpers.reference import unpad
from helpers.runs import fake_run, metrics_of
from helpers.scripts import ROOT, RunScript
from helpers.weights import adapter_of, same_weights
from pytest import MonkeyPatch
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import WandbCallback

from gtpo.errors import RunError
from gtpo.runs.directory import RunDirectory, damage, sorted_checkpoints, write_manifest
from gtpo.runs.script import run_script
from gtpo.training import faults, loop
from gtpo.training.faults import CompleteCheckpoints, StopOnNonFinite, StopOnSignal
from gtpo.training.loop import attach_callbacks, train
from gtpo.training.trainer import GTPOTrainer


@pytest.fixture
def tracked(build: Any, tmp_path: Path) -> Any:
    """``tracked(method, name="run", **settings)``: a canned trainer with the callbacks of a run and its directory."""

    def tracked(method: str, name: str = "run", **settings: Any) -> Any:
        run = fake_run(tmp_path / name)
        trainer = build(method, name, save_strategy="steps", **{"save_steps": 1} | settings)
        attach_callbacks(trainer, settings_of(trainer), run)
        return trainer

    return tracked


def complete(run: Path) -> list[str]:
    return [path.name for path in sorted_checkpoints(run) if damage(path) is None]


def weight_of(trainer: Any) -> tuple[str, torch.nn.Parameter]:
    """One of the adapter, with its name."""
    return next((name, weight) for name, weight in trainer.model.named_parameters() if "lora_B" in name)


# ---- non-finite values ----


def test_a_non_finite_loss_stops_and_saves_the_batch(tracked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked("gtpo", max_steps=5)
    (run / "config.yaml").write_text("num_generations: 4\n")  # of a script: the message names its flags
    forward = trainer._logps_and_entropy

    def late(*args: Any) -> Any:
        logps, entropy = forward(*args)
        return logps * (1.0 if trainer.state.global_step < 2 else nan), entropy

    trainer._logps_and_entropy = late
    with pytest.raises(RunError, match=f"step 3.*{run}/not-finite-step-3.*lower --learning_rate.*--resume {run}"):
        trainer.train()
    saved = run / "not-finite-step-3"
    batch = load_file(saved / "batch-0.safetensors")
    (texts,) = read_json(saved / "completions-0.json")
    assert batch["0.logps"].isnan().any() and len(texts) == GROUP
    assert sorted(unpad(batch["0.completion_ids"], batch["0.completion_mask"])) == sorted(canned_group(2))
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1  # safetensors writes for the owner alone
    assert [line["step"] for line in metrics_of(run)] == [1, 2]


def test_a_non_finite_gradient_is_not_applied(tracked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked("gtpo", max_steps=5, max_grad_norm=1.0)
    name, weight = weight_of(trainer)
    weight.register_hook(lambda gradient: gradient * inf if trainer.state.global_step == 1 else gradient)
    with pytest.raises(RunError, match=r"gradient.*lora_B.*step 2"):
        trainer.train()
    assert torch.equal(weight.detach(), adapter_of(run / "checkpoint-1")[name.replace(".default", "")])
    assert (run / "not-finite-step-2" / "batch-0.safetensors").is_file()


def test_with_fp16_the_loss_scaler_handles_non_finite_gradients(build: Any) -> None:
    trainer = build("gtpo")
    _, weight = weight_of(trainer)
    weight.grad = torch.full_like(weight, inf)
    trainer.args.fp16 = True
    StopOnNonFinite(trainer).on_pre_optimizer_step(trainer.args, trainer.state, trainer.control, trainer.model)


def test_a_non_finite_gradient_elsewhere_stops_this_process(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("gtpo")
    monkeypatch.setattr(faults, "any_process", lambda here, device: True)
    with pytest.raises(RunError, match="on another process"):
        StopOnNonFinite(trainer).on_pre_optimizer_step(trainer.args, trainer.state, trainer.control, trainer.model)


def test_non_finite_weights_after_an_update_are_not_saved(tracked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked("gtpo", learning_rate=inf, max_steps=2)
    with pytest.raises(RunError, match=r"weight.*lora.*step 1.*lower learning_rate, max_grad_norm or.*start again"):
        trainer.train()
    assert not list(run.glob("checkpoint-*")) and not (run / "best").exists() and not (run / "adapter").exists()
    assert len(load_file(run / "not-finite-step-1" / "batch-0.safetensors")["0.completion_ids"]) == GROUP
    sft = SimpleNamespace(args=trainer.args, state=trainer.state)  # its batches are not kept
    with pytest.raises(RunError, match="step 1: the run stops, no checkpoint contains it"):
        StopOnNonFinite(sft).on_optimizer_step(trainer.args, trainer.state, trainer.control, trainer.model)


@pytest.mark.parametrize(
    ("value", "is_async", "what"),
    [
        (inf, False, "mine = inf"),
        (-inf, True, "mine_async = -inf"),
        (nan, False, "mine = nan"),
        (1e30, False, r"1e\+30"),  # its square overflows: A = 0 for the whole group
    ],
)
def test_a_non_finite_reward_loses_no_step(
    value: float, is_async: bool, what: str, tracked: Any, tmp_path: Path
) -> None:
    def mine(trainer_state: Any, **columns: Any) -> list[float]:
        return [value if trainer_state.global_step == 1 and row == 3 else float(row % 3) for row in range(GROUP)]

    async def mine_async(**columns: Any) -> list[float]:
        return mine(**columns)

    run, reward = tmp_path / "run", mine_async if is_async else mine
    trainer = tracked("gtpo", max_steps=3, save_steps=9, rewards=[reward])
    (run / "run.lock").touch()  # a script's: another program has its own checkpoints
    with pytest.raises(RunError, match=f"{what} is not finite in step 2"):
        trainer.train()
    assert complete(run) == ["checkpoint-1"] and [line["step"] for line in metrics_of(run)] == [1]
    rows = read_json(run / "not-finite-step-2" / "rows-0.json")
    assert len(rows) == GROUP and [*rows[3]] == ["prompt", "completion", reward.__name__]
    assert [float(row[reward.__name__]) for row in rows[2:4]] == pytest.approx([2.0, value], nan_ok=True)


def test_another_program_has_its_own_checkpoints(build: Any) -> None:
    trainer = build("gtpo", "run")
    trainer.state.global_step = 1
    trainer._save_checkpoint = Mock()
    assert faults.save_finished_step(trainer) == "start again, or from a checkpoint"
    assert not trainer._save_checkpoint.called


def test_a_generation_from_nan_probabilities_stops_the_run(tracked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked("gtpo", max_steps=2)
    trainer.__class__ = GTPOTrainer  # generates itself
    weight_of(trainer)[1].data.fill_(1e38)
    with pytest.raises(RunError, match="not-finite-step-1"):
        trainer.train()
    assert "Question" in read_json(run / "not-finite-step-1" / "rows-0.json")[0]["prompt"]


def test_too_little_memory_names_the_batch_size(tracked: Any) -> None:
    trainer = tracked("gtpo")
    trainer._logps_and_entropy = Mock(side_effect=torch.OutOfMemoryError)
    message = (
        rf"in step 1: lower --per_device_train_batch_size \(now {GROUP}\) and raise --gradient_accumulation_steps "
        r"\(now 1\) by the same factor, then start again"
    )
    with pytest.raises(RunError, match=message) as raised:
        train(trainer, None)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


# ---- checkpoints ----


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_no_code_of_a_checkpoint_is_executed(name: str, tracked: Any, here: Path) -> None:
    trainer = tracked("gtpo", max_steps=1)
    trainer.train()
    trainer.args.max_steps = 2
    checkpoint = here / "run" / "checkpoint-1"
    (checkpoint / name).write_bytes(pickle.dumps(Hostile()))
    write_manifest(checkpoint)
    with pytest.raises(pickle.UnpicklingError):
        train(trainer, str(checkpoint))
    assert not (here / "executed").exists() and trainer.state.global_step < 2


def test_a_resumed_run_ends_with_equal_weights_and_metrics(tracked: Any, tmp_path: Path) -> None:
    """The reference policy is an adapter too; the optimizer and the schedule have states."""
    settings = {"max_steps": 4, "beta": 0.04, "optim": "adamw_torch", "lr_scheduler_type": "cosine"}
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    for run in (whole, restarted):
        tracked("grpo", run.name, **settings).train()
    assert not (whole / "best" / "ref").exists()  # the policy alone
    (restarted / "checkpoint-3" / "ref" / "adapter_model.safetensors").write_bytes(b"")
    assert complete(restarted) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    tracked("grpo", restarted.name, **settings).train(resume_from_checkpoint=str(restarted / "checkpoint-2"))
    assert same_weights(adapter_of(restarted / "checkpoint-4"), adapter_of(whole / "checkpoint-4"))
    for line, again in zip(metrics_of(whole), metrics_of(restarted), strict=True):
        assert line | {name: again[name] for name in ("step_time", "tokens_per_second")} == again


def test_the_counts_of_a_resumed_run_continue(tmp_path: Path) -> None:
    trainer = SimpleNamespace()
    rows = [{"num_tokens": 200.0}, {"num_tokens": 408.0}, {"train_loss": 0.5}]
    state = TrainerState(global_step=2, log_history=rows)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    CompleteCheckpoints(trainer, RunDirectory(tmp_path)).on_train_begin(args, state, TrainerControl())
    assert trainer._total_train_tokens == 408


def test_one_process_sets_weights_aside_and_deletes_checkpoints(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The limit is ours between start and end of the training; of a run that begins nothing is set aside."""
    run = fake_run(tmp_path, {"model": "x"}, steps=[2, 4], saved=["adapter"])
    (run.checkpoint(6)).mkdir()
    for name in ("adapter_model.safetensors", "training_args.bin"):
        (run.checkpoint(6) / name).write_text("")
    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "save_total_limit": 2, "save_steps": 2}
    args = TrainingArguments(output_dir=str(tmp_path), **settings)
    callback = CompleteCheckpoints(SimpleNamespace(), run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, step in (("1", 4), ("0", 0), ("0", 4)):
        assert run.is_finished and args.save_total_limit == 2
        monkeypatch.setenv("RANK", rank)
        state = TrainerState(global_step=step, max_steps=9)
        callback.on_train_begin(args, state, TrainerControl())
        assert args.save_total_limit is None and callback.limit == 2
        callback.on_train_end(args, state, TrainerControl())
    assert [path.name for path in run.earlier_weights()] == ["adapter-step-4"] and not run.adapter.exists()
    assert state.save_steps == 2  # not those of the checkpoint
    for rank, kept in (("1", ["checkpoint-2", "checkpoint-4"]), ("0", ["checkpoint-4", "checkpoint-6"])):
        monkeypatch.setenv("RANK", rank)
        callback.on_save(args, TrainerState(global_step=6), TrainerControl())
        assert complete(tmp_path) == kept
    assert not (run.checkpoint(6) / "training_args.bin").exists()


def test_what_a_run_adds_to_a_trainer_in_which_order(build: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """What writes into a checkpoint before its manifest; what ends the process last."""
    monkeypatch.setattr("gtpo.training.loop.start_wandb", lambda settings, run: "a wandb run")
    added = ["RunMessages", "MetricsWriter", "BestAdapter", "UnloggedMetrics", "CompleteCheckpoints"]
    added += ["StopOnNonFinite", "StopOnSignal"]
    for rank, reporters, held_out, wandb in (
        ("0", ["wandb"], 2, "a wandb run"),
        ("0", ["tensorboard"], 0, None),
        ("1", ["wandb"], 2, None),
    ):
        trainer = build("grpo", held_out=held_out, metric_for_best_model="eval_reward")
        trainer.args.report_to = reporters
        trainer.add_callback(WandbCallback)
        monkeypatch.setenv("RANK", rank)
        attach_callbacks(trainer, settings_of(trainer), fake_run(tmp_path))
        callbacks = {type(each).__name__: each for each in trainer.callback_handler.callbacks}
        assert [name for name in callbacks if name in added] == added and "WandbCallback" not in callbacks
        assert callbacks["MetricsWriter"].wandb_run == wandb
        assert callbacks["BestAdapter"].held_out_metric == ("eval_reward" if held_out else None)
        monkeypatch.delenv("RANK")


@pytest.mark.parametrize(("rank", "ends"), [("0", ["report", "summary"]), ("1", [])])
def test_a_run_is_saved_before_its_report_which_may_fail(
    rank: str, ends: list[str], tmp_path: Path, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One process writes the report and says how the run ended, also where the report cannot be written."""
    done: list[str] = []
    for name in ("attach_callbacks", "train", "training_begins", "save_adapter"):
        monkeypatch.setattr(loop, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(loop, "write_report", lambda path: done.append("report") or 1 / 0)
    monkeypatch.setattr(loop, "log_summary", lambda settings, run: done.append("summary"))
    monkeypatch.setenv("RANK", rank)
    loop.run(SimpleNamespace(), SimpleNamespace(output_dir=str(tmp_path)), None)
    assert done == ["attach_callbacks", "train", "training_begins", "save_adapter", *ends]
    said = ["ZeroDivisionError: division by zero; the run is complete"]
    assert caplog.messages == (said if ends else [])


# ---- signals ----


class RunningScript:
    """A train script in a separate process, past its second step."""

    def __init__(self, tiny: Path, directory: Path) -> None:
        self.directory = directory
        argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--initial_entropy"]
        argv += ["0.5", "--limit", "100", "--max_completion_length", "8", "--max_steps", "400"]
        argv += ["--output_dir", directory]
        self.process = subprocess.Popen([sys.executable, "train_gtpo.py", *argv], cwd=ROOT, stderr=subprocess.PIPE)
        while self.steps() < 2:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def steps(self) -> int:
        metrics = self.directory / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.slow
def test_a_signal_saves_a_checkpoint_of_the_last_step(tiny: Path, tmp_path: Path, run_script: RunScript) -> None:
    run = RunningScript(tiny, tmp_path / "run")
    run.process.send_signal(SIGUSR2)
    stderr = run.process.communicate(timeout=120)[1].decode()
    steps = run.steps()
    assert run.process.returncode == 140 and "Traceback" not in stderr
    assert f"python train_gtpo.py --resume {run.directory}" in stderr
    assert complete(run.directory) == [f"checkpoint-{steps}"] and not (run.directory / "adapter").exists()
    run_script(tmp_path, "train_gtpo.py", "--resume", str(run.directory), "--max_steps", str(steps + 2))
    assert [line["step"] for line in metrics_of(run.directory)] == list(range(1, steps + 3))
    assert (run.directory / "adapter").is_dir()


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path) -> None:
    callback, control = StopOnSignal(SimpleNamespace(), RunDirectory(tmp_path)), TrainerControl()
    callback.received = SIGINT
    args = SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path))
    callback.on_step_end(args, TrainerState(), control)
    assert control.should_save and control.should_training_stop
    with pytest.raises(SystemExit, match="130"):
        callback.on_train_end(args, TrainerState(global_step=4, max_steps=5), control)
    callback.on_train_end(args, TrainerState(global_step=5, max_steps=5), control)


@pytest.mark.parametrize(("received", "code"), [(None, 143), (SIGUSR2, 140)])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_signal_of_another_process_stops_this_one_too(
    received: int | None, code: int, rank: str, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: Any
) -> None:
    """Between two updates on one generation it waits; the first process says how to continue."""
    monkeypatch.setattr(faults, "any_process", lambda here, device: True)
    monkeypatch.setenv("RANK", rank)
    trainer = SimpleNamespace(generation_is_used_up=False)
    callback, control = StopOnSignal(trainer, RunDirectory(tmp_path)), TrainerControl()
    callback.received = received
    args = SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path))
    callback.on_step_end(args, TrainerState(), control)
    assert not control.should_save and not control.should_training_stop
    trainer.generation_is_used_up = True
    callback.on_step_end(args, TrainerState(), control)
    assert control.should_save and control.should_training_stop
    with pytest.raises(SystemExit) as ended:
        callback.on_train_end(args, TrainerState(global_step=4, max_steps=5), control)
    assert ended.value.code == code
    assert [message.partition(";")[0] for message in caplog.messages] == ["stopped after step 4"] * (rank == "0")


NUMBERS = (SIGINT, SIGTERM, SIGHUP, SIGUSR2)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.mark.parametrize("fails", [True, False])
def test_signals_have_their_handlers_again_after_training(fails: bool, tracked: Any) -> None:
    before, during = handlers(), []

    def reward(completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
        during.extend(handlers())
        return [nan if fails and trainer_state.global_step else 1.0] * len(completions)

    trainer = tracked("gtpo", max_steps=2, rewards=[reward])
    with pytest.raises(RunError) if fails else nullcontext():
        train(trainer, None)
    assert handlers() == before
    assert len(during) == 8 and before[1] not in during


@pytest.fixture
def handled() -> Iterator[Any]:
    """``handled(ignored=())``: a callback in training; the signals are ignored, or have the handlers of a script."""
    before = handlers()
    callback = StopOnSignal(SimpleNamespace(), RunDirectory("run"))

    def begin(ignored: Sequence[int] = ()) -> StopOnSignal:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.default_int_handler)
        callback.on_train_begin(SimpleNamespace(), TrainerState(), TrainerControl())
        return callback

    yield begin
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


# Slurm sends SIGUSR2 to every process of a step, after SIGTERM on preemption, and a job sends it to its run again.
@pytest.mark.parametrize(
    ("numbers", "exits"),
    [
        ([SIGHUP], False),
        ([SIGINT, SIGINT], True),
        ([SIGUSR2, SIGUSR2, SIGUSR2], False),
        ([SIGUSR2, SIGTERM], False),  # the first of its kind
        ([SIGTERM, SIGUSR2, SIGTERM], True),
    ],
)
def test_a_second_signal_exits_but_that_of_slurm(numbers: list[int], exits: bool, handled: Any) -> None:
    callback = handled()
    *earlier, last = numbers
    for number in earlier:
        signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt) if exits else nullcontext():
        signal.raise_signal(last)
    assert callback.received == numbers[0]


def test_sighup_stays_ignored_under_nohup(handled: Any) -> None:
    callback = handled(ignored=[SIGHUP])
    signal.raise_signal(SIGHUP)
    assert callback.received is None and signal.getsignal(SIGHUP) is signal.SIG_IGN


# ---- exit codes ----


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "disk"),
        (RuntimeError("Error while serializing: I/O error: No space left on device"), 1, "disk"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), 1, "disk"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 14656 vs 14548"), 1, "disk"),
    ],
)
def test_a_script_exits_with_a_one_line_error(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_script(Mock(side_effect=error))
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
