"""Fault tolerance: non-finite values, checkpoints, signals, exit codes, edge cases of groups."""

import asyncio
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from helpers import canned
from helpers.canned import GROUP, batch_of, canned_group, settings_of
from helpers.files import read_json
from helpers.runs import fake_run
from helpers.scripts import ROOT, RunScript
from helpers.weights import adapter_of, same_weights
from pytest import MonkeyPatch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from gtpo.errors import RunError, UsageError
from gtpo.grading.user_functions import checked_reward
from gtpo.runs.directory import damage, sorted_checkpoints, write_manifest
from gtpo.runs.script import run_script
from gtpo.training import faults
from gtpo.training.faults import CompleteCheckpoints, StopOnNonFinite, StopOnSignal
from gtpo.training.loop import attach_callbacks, train


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


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, which has no NaN and Infinity: JSON has neither."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- non-finite values ----


class Poison(TrainerCallback):
    """Sets a weight to NaN after step ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            next(weight for name, weight in model.named_parameters() if "lora_B" in name).data.fill_(float("nan"))


def of_a_script(run: Path) -> None:
    """A run that has stored its settings: messages name flags of the script."""
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("num_generations: 4\n")


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_non_finite_loss_stops_and_saves_the_batch(method: str, tracked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked(method, max_steps=5)
    of_a_script(run)
    trainer.add_callback(Poison(2))
    with pytest.raises(RunError, match=f"step 3.*{run}/not-finite-step-3.*--resume {run}"):
        trainer.train()
    batch = load_file(run / "not-finite-step-3" / "batch-0.safetensors")
    (texts,) = read_json(run / "not-finite-step-3" / "completions-0.json")
    modes = {path.stat().st_mode for path in (run / "not-finite-step-3").iterdir()}
    assert len(modes) == 1  # safetensors writes for the owner alone
    assert batch["0.logps"].isnan().any() and len(texts) == GROUP
    rows = zip(batch["0.completion_ids"], batch["0.completion_mask"], strict=True)
    assert {tuple(row[mask.bool()].tolist()) for row, mask in rows} == {tuple(row) for row in canned_group(2)}
    assert [line["step"] for line in logged(run)] == [1, 2]


def test_a_non_finite_gradient_is_not_applied(tracked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked("gtpo", max_steps=5, max_grad_norm=1.0)
    name, weight = next((n, w) for n, w in trainer.model.named_parameters() if "lora_B" in n)
    weight.register_hook(lambda gradient: gradient * float("inf") if trainer.state.global_step == 1 else gradient)
    with pytest.raises(RunError, match=r"gradient.*lora_B.*step 2"):
        trainer.train()
    assert torch.equal(weight.detach(), adapter_of(run / "checkpoint-1")[name.replace(".default", "")])
    assert (run / "not-finite-step-2" / "batch-0.safetensors").is_file()


def test_with_fp16_the_loss_scaler_handles_non_finite_gradients(build: Any) -> None:
    trainer = build("gtpo")
    weight = next(w for n, w in trainer.model.named_parameters() if "lora_B" in n)
    weight.grad = torch.full_like(weight, float("inf"))
    options = {"state": trainer.state, "control": trainer.control, "model": trainer.model}
    trainer.args.fp16 = True
    StopOnNonFinite(trainer).on_pre_optimizer_step(trainer.args, **options)
    trainer.args.fp16 = False
    with pytest.raises(RunError):
        StopOnNonFinite(trainer).on_pre_optimizer_step(trainer.args, **options)


def assert_nothing_saved(run: Path) -> None:
    assert not list(run.glob("checkpoint-*")) and not (run / "best").exists() and not (run / "adapter").exists()


def test_non_finite_weights_after_an_update_are_not_saved(tracked: Any, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"learning_rate": float("inf"), "max_steps": 2}
    with pytest.raises(RunError, match=r"weight.*lora.*step 1.*start again"):
        tracked("gtpo", **settings).train()
    assert_nothing_saved(run)
    assert load_file(run / "not-finite-step-1" / "batch-0.safetensors")["0.completion_ids"].shape[0] == GROUP
    settings |= {"lr_scheduler_type": "constant", "optim": "sgd", "save_steps": 1, "report_to": "none"}
    sft = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny),
        args=SFTConfig(output_dir=str(tmp_path / "sft"), bf16=False, use_cpu=True, **settings),
        processing_class=AutoTokenizer.from_pretrained(tiny),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8, "completion": ["b"] * 8}),
    )
    sft.add_callback(StopOnNonFinite(sft))
    with pytest.raises(RunError, match="step 1"):
        sft.train()
    assert_nothing_saved(tmp_path / "sft")


@pytest.mark.parametrize(
    ("value", "is_async", "what"),
    [
        (float("inf"), False, "mine = inf"),
        (float("-inf"), True, "mine = -inf"),
        (float("nan"), False, "mine = nan"),
        (1e30, False, r"1e\+30"),  # its square overflows: A = 0 for the whole group
    ],
)
def test_a_non_finite_reward_loses_no_step(
    value: float, is_async: bool, what: str, tracked: Any, tmp_path: Path
) -> None:
    def mine(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float | None]:
        return [value if trainer_state.global_step == 1 and row == 3 else float(row % 3) for row in range(GROUP)]

    async def mine_async(**columns: Any) -> list[float | None]:
        return mine(**columns)

    run = tmp_path / "run"
    trainer = tracked("gtpo", max_steps=3, save_steps=9)
    trainer.reward_funcs = [mine_async if is_async else mine]
    trainer.reward_func_names = ["mine"]
    if is_async:
        trainer.async_loop = asyncio.new_event_loop()
        threading.Thread(target=trainer.async_loop.run_forever, daemon=True).start()
    with pytest.raises(RunError, match=f"{what} is not finite in step 2"):
        trainer.train()
    assert complete(run) == ["checkpoint-1"] and [line["step"] for line in logged(run)] == [1]
    rows = read_json(run / "not-finite-step-2" / "rows-0.json")
    assert len(rows) == GROUP and rows[0].keys() == {"prompt", "completion", "mine"}
    assert float(rows[3]["mine"]) == pytest.approx(value, nan_ok=True) and rows[2]["mine"] == 2.0


def test_none_is_no_reward_and_a_batch_needs_one(build: Any) -> None:
    """TRL alone trains on with rewards of 0."""
    trainer = build("gtpo")
    trainer.model.train()
    none, some, ones = (
        checked_reward(lambda values=values, **columns: values)
        for values in ([None] * GROUP, [None if row == 3 else float(row % 3) for row in range(GROUP)], [1.0] * GROUP)
    )

    def advantages(*functions: Any) -> torch.Tensor:
        trainer.reward_funcs = list(functions)
        trainer.reward_func_names = ["mine", "other"][: len(functions)]
        trainer.reward_weights = torch.ones(len(functions))
        trainer.reward_processing_classes = [None] * len(functions)
        return batch_of(trainer)["advantages"]

    found = advantages(some)
    assert found[3] == 0 and (found != 0).sum() > GROUP // 2
    assert (advantages(none, ones) == 0).all()
    with pytest.raises(RunError, match="mine"):
        advantages(none)


def test_a_generation_from_nan_probabilities_stops_the_run(tracked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked("gtpo", max_steps=2)
    trainer.__class__ = canned.TRAINERS["gtpo"].__mro__[2]  # generates itself
    next(w for name, w in trainer.model.named_parameters() if "lora_B" in name).data.fill_(1e38)
    with pytest.raises(RunError, match="not-finite-step-1"):
        trainer.train()
    assert_nothing_saved(run)
    assert "Question" in read_json(run / "not-finite-step-1" / "rows-0.json")[0]["prompt"]


def test_too_little_memory_names_the_batch_size(tracked: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = tracked("gtpo", max_steps=2)
    forward = trainer._logps_and_entropy

    def late(*args: Any) -> Any:
        if trainer.state.global_step:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args)

    monkeypatch.setattr(trainer, "_logps_and_entropy", late)
    message = (
        rf"in step 2: lower --per_device_train_batch_size \(now {GROUP}\) and raise --gradient_accumulation_steps "
        r"\(now 1\) by the same factor, then start again"
    )
    with pytest.raises(RunError, match=message) as raised:
        train(trainer, None)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_non_finite_gradient_elsewhere_stops_this_process(tracked: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = tracked("gtpo")
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    monkeypatch.setattr(faults, "any_process", lambda here, device: True)
    with pytest.raises(RunError, match="gradient"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


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


def test_a_checkpoint_needs_the_reference_adapter_too(tracked: Any, tmp_path: Path) -> None:
    tracked("grpo", max_steps=1, beta=0.04).train()
    assert complete(tmp_path / "run") == ["checkpoint-1"]
    assert not (tmp_path / "run" / "best" / "ref").exists()  # best/ is the policy alone
    (tmp_path / "run" / "checkpoint-1" / "ref" / "adapter_model.safetensors").write_bytes(b"")
    assert complete(tmp_path / "run") == []


def test_a_resumed_run_ends_with_equal_weights_and_metrics(tracked: Any, tmp_path: Path) -> None:
    """The reference policy is an adapter too; the optimizer and the schedule have states."""
    settings = {"max_steps": 4, "beta": 0.04, "optim": "adamw_torch", "lr_scheduler_type": "cosine"}
    uninterrupted = tmp_path / "uninterrupted"
    restarted = tmp_path / "restarted"
    for run in (uninterrupted, restarted):
        tracked("grpo", run.name, **settings).train()
    tracked("grpo", restarted.name, **settings).train(resume_from_checkpoint=str(restarted / "checkpoint-2"))
    assert same_weights(adapter_of(restarted / "checkpoint-4"), adapter_of(uninterrupted / "checkpoint-4"))
    times = {"step_time", "tokens_per_second"}
    lines = [
        [{name: line[name] for name in line.keys() - times} for line in logged(run)]
        for run in (uninterrupted, restarted)
    ]
    assert len(lines[0]) == 4 and lines[0] == lines[1]


def test_the_counts_of_a_resumed_run_continue(tmp_path: Path) -> None:
    trainer = SimpleNamespace()
    rows = [{"num_tokens": 200.0}, {"num_tokens": 408.0}, {"train_loss": 0.5}]
    state = TrainerState(global_step=2, log_history=rows)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    CompleteCheckpoints(trainer).on_train_begin(args, state, TrainerControl())
    assert trainer._total_train_tokens == 408


# ---- signals ----


class RunningScript:
    """A train script in a separate process, past its second step."""

    def __init__(self, tiny: Path, directory: Path) -> None:
        self.directory = directory
        argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--initial_entropy"]
        argv += ["0.5", "--max_completion_length", "8", "--max_steps", "400", "--output_dir", directory]
        self.process = subprocess.Popen([sys.executable, "train_gtpo.py", *argv], cwd=ROOT, stderr=subprocess.PIPE)
        while self.steps() < 2:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def steps(self) -> int:
        metrics = self.directory / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR2, 140)])
def test_a_signal_saves_a_checkpoint_of_the_last_step(
    number: signal.Signals, code: int, tiny: Path, tmp_path: Path, run_script: RunScript
) -> None:
    run = RunningScript(tiny, tmp_path / "run")
    run.process.send_signal(number)
    stderr = run.process.communicate(timeout=120)[1].decode()
    steps = run.steps()
    assert run.process.returncode == code and "Traceback" not in stderr
    assert f"python train_gtpo.py --resume {run.directory}" in stderr
    assert complete(run.directory) == [f"checkpoint-{steps}"] and not (run.directory / "adapter").exists()
    run_script(tmp_path, "train_gtpo.py", "--resume", str(run.directory), "--max_steps", str(steps + 2))
    assert [line["step"] for line in logged(run.directory)] == list(range(1, steps + 3))
    assert (run.directory / "adapter").is_dir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_last_step_stops_nothing(number: int, code: int, tmp_path: Path) -> None:
    callback = StopOnSignal()
    callback.received = number
    args = SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path))
    control = TrainerControl()
    callback.on_step_end(args, TrainerState(), control)
    assert control.should_save and control.should_training_stop
    with pytest.raises(SystemExit) as ended:
        callback.on_train_end(args, TrainerState(global_step=4, max_steps=5), control)
    assert ended.value.code == code
    callback.on_train_end(args, TrainerState(global_step=5, max_steps=5), control)


@pytest.mark.parametrize("fails", [True, False])
def test_signals_have_their_handlers_again_after_training(fails: bool, tracked: Any) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    trainer = tracked("gtpo", max_steps=2)
    during: list[Any] = []

    class Note(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            during.extend(signal.getsignal(number) for number in numbers)

    trainer.add_callback(Note())
    if fails:
        trainer.add_callback(Poison(1))
    with pytest.raises(RunError) if fails else nullcontext():
        train(trainer, None)
    assert before == [signal.getsignal(number) for number in numbers]
    assert len(during) == 8 and before[1] not in during


@pytest.fixture
def handled() -> Iterator[Any]:
    """``handled(ignored=())``: a callback in training; the signals are ignored, or have the handlers of a script."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    callback = StopOnSignal()

    def begin(ignored: Sequence[int] = ()) -> StopOnSignal:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.default_int_handler)
        callback.on_train_begin(SimpleNamespace(), TrainerState(), TrainerControl())
        return callback

    yield begin
    for number, handler in before.items():
        signal.signal(number, handler)


# Slurm sends SIGUSR2 to every process of a step, after SIGTERM on preemption, and a job sends it to its run again.
@pytest.mark.parametrize(
    ("numbers", "exits"),
    [
        ([signal.SIGINT], False),
        ([signal.SIGHUP], False),
        ([signal.SIGINT, signal.SIGINT], True),
        ([signal.SIGUSR2, signal.SIGUSR2, signal.SIGUSR2], False),
        ([signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR2], False),
        ([signal.SIGUSR2, signal.SIGTERM], False),  # the first of its kind
        ([signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM], True),
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
    callback = handled(ignored=[signal.SIGHUP])
    signal.raise_signal(signal.SIGHUP)
    assert callback.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


# ---- exit codes ----


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("bad input"), 2, "bad input"),
        (RunError("it stopped"), 1, "it stopped"),
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
