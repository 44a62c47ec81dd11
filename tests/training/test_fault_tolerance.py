"""Fault tolerance: non-finite values, checkpoints, signals, a full disk and lost services."""

import asyncio
import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import trl
from datasets import Dataset
from filelock import FileLock
from helpers import canned
from helpers.canned import GROUP, canned_group, make_trainer, settings_of
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
from gtpo.files import replace_directory
from gtpo.grading import worker
from gtpo.grading.user_functions import checked_reward
from gtpo.prompts import to_messages
from gtpo.runs.checkpoints import MANIFEST, damage, sorted_checkpoints, write_manifest
from gtpo.runs.directory import RunDirectory
from gtpo.runs.script import run_script
from gtpo.training import fault_tolerance
from gtpo.training.callbacks import MetricsWriter
from gtpo.training.fault_tolerance import CompleteCheckpoints, StopOnNonFinite, StopOnSignal
from gtpo.training.loop import attach_callbacks, train
from gtpo.training.trainer import GRPOTrainer
from rewards import accuracy_reward

ROOT = Path(__file__).parents[2]


def tracked(method: str, tiny: Path, directory: Path, **settings: Any) -> Any:
    """A canned trainer with the callbacks of a run, and an existing run directory."""
    directory.mkdir(exist_ok=True)
    trainer = make_trainer(method, tiny, directory, save_strategy="steps", save_steps=1, **settings)
    attach_callbacks(trainer, settings_of(trainer))
    return trainer


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "adapter_model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def complete(run: Path) -> list[str]:
    return [path.name for path in sorted_checkpoints(run) if damage(path) is None]


# ---- non-finite values ----


class Poison(TrainerCallback):
    """Sets a weight to NaN after step ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            next(weight for name, weight in model.named_parameters() if "lora_B" in name).data.fill_(float("nan"))


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_non_finite_loss_stops_the_run_and_saves_the_batch(method: str, tiny: Path, tmp_path: Path) -> None:
    trainer = tracked(method, tiny, tmp_path / "run", max_steps=5)
    trainer.add_callback(Poison(2))
    with pytest.raises(
        RunError,
        match=r"is not finite in step 3.*not-finite-step-3.*the last checkpoint with `.*--resume .*run",
    ):
        trainer.train()
    saved = tmp_path / "run" / "not-finite-step-3"
    batch = load_file(saved / "batch-0.safetensors")
    (texts,) = json.loads((saved / "completions-0.json").read_text())
    assert batch["0.completion_ids"].shape == batch["0.logps"].shape and len(texts) == GROUP
    assert batch["0.logps"].isnan().any()
    rows = zip(batch["0.completion_ids"], batch["0.completion_mask"], strict=True)
    ids = {tuple(row[mask.bool()].tolist()) for row, mask in rows}
    assert ids == {tuple(row) for row in canned_group(2)}
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
    ]


def test_a_non_finite_gradient_is_not_applied(tiny: Path, tmp_path: Path) -> None:
    trainer = tracked("gtpo", tiny, tmp_path / "run", max_steps=5, max_grad_norm=1.0)
    name, weight = next((n, w) for n, w in trainer.model.named_parameters() if "lora_B" in n)
    weight.register_hook(lambda gradient: gradient * float("inf") if trainer.state.global_step == 1 else gradient)
    with pytest.raises(RunError, match=r"the gradient \(.*lora_B.*\) is not finite in step 2"):
        trainer.train()
    assert weight.isfinite().all()
    assert torch.equal(weight.detach(), weights(tmp_path / "run" / "checkpoint-1")[name.replace(".default", "")])
    assert (tmp_path / "run" / "not-finite-step-2" / "batch-0.safetensors").is_file()


def test_with_fp16_the_loss_scaler_handles_non_finite_gradients(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path)
    weight = next(w for n, w in trainer.model.named_parameters() if "lora_B" in n)
    weight.grad = torch.full_like(weight, float("inf"))
    options = {"state": trainer.state, "control": trainer.control, "model": trainer.model}
    trainer.args.fp16 = True
    StopOnNonFinite(trainer).on_pre_optimizer_step(trainer.args, **options)
    trainer.args.fp16 = False
    with pytest.raises(RunError, match="the gradient"):
        StopOnNonFinite(trainer).on_pre_optimizer_step(trainer.args, **options)


def strictly(text: str) -> Any:
    """JSON without NaN and Infinity, which it does not have."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def assert_nothing_saved(run: Path) -> None:
    assert not list(run.glob("checkpoint-*")) and not (run / "best").exists() and not (run / "adapter").exists()


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_weights_that_an_update_makes_non_finite_are_not_saved(method: str, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked(method, tiny, run, max_steps=2, learning_rate=float("inf"))
    message = (
        r"the updated weight \(.*lora.*\) is not finite in step 1: .*not-finite-step-1\. Start again with --overwrite"
    )
    with pytest.raises(RunError, match=message):
        trainer.train()
    assert_nothing_saved(run)
    assert load_file(run / "not-finite-step-1" / "batch-0.safetensors")["0.completion_ids"].shape[0] == GROUP


def test_sft_does_not_save_weights_that_are_not_finite(tiny: Path, tmp_path: Path) -> None:
    settings = {"learning_rate": float("inf"), "lr_scheduler_type": "constant", "optim": "sgd", "save_steps": 1}
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny),
        args=SFTConfig(output_dir=str(tmp_path), max_steps=2, bf16=False, use_cpu=True, report_to="none", **settings),
        processing_class=AutoTokenizer.from_pretrained(tiny),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8, "completion": ["b"] * 8}),
    )
    trainer.add_callback(StopOnNonFinite(trainer))
    with pytest.raises(RunError, match=r"the updated weight \(.*\) is not finite in step 1: the run stops"):
        trainer.train()
    assert_nothing_saved(tmp_path)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (float("inf"), "the reward mine = inf"),
        (float("-inf"), "the reward mine = -inf"),
        (float("nan"), "the reward mine = nan"),
        (1e30, r"the advantage for a reward of 1e\+30"),  # its square overflows: A = 0 for the whole group
    ],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_non_finite_reward_stops_the_run(
    value: float, what: str, is_async: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float | None]:
        return [value if trainer_state.global_step == 1 and row == 3 else float(row % 3) for row in range(GROUP)]

    async def mine_async(**columns: Any) -> list[float | None]:
        return mine(**columns)

    run = tmp_path / "run"
    trainer = tracked("gtpo", tiny, run, max_steps=3)
    trainer.reward_funcs, trainer.reward_func_names = [mine_async if is_async else mine], ["mine"]
    if is_async:
        trainer.async_loop = asyncio.new_event_loop()
        threading.Thread(target=trainer.async_loop.run_forever, daemon=True).start()
    with pytest.raises(
        RunError, match=f"^{what} is not finite in step 2: .*not-finite-step-2.*--resume .*reward function"
    ):
        trainer.train()
    assert complete(run) == ["checkpoint-1"]
    rows = json.loads((run / "not-finite-step-2" / "rows-0.json").read_text())
    assert len(rows) == GROUP and rows[0].keys() == {"prompt", "completion", "mine"}
    assert [float(row["mine"]) for row in rows] == pytest.approx(
        [value if row == 3 else float(row % 3) for row in range(GROUP)], nan_ok=True
    )
    assert [strictly(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1]


def test_a_reward_model_that_returns_nan_stops_the_run(tiny: Path, tmp_path: Path) -> None:
    class Scores(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **inputs: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.full((len(input_ids), 1), float("nan")))

    trainer = make_trainer("gtpo", tiny, tmp_path)
    trainer.reward_funcs, trainer.reward_processing_classes = [Scores()], [trainer.processing_class]
    with pytest.raises(RunError, match="the reward reward_parity = nan is not finite in step 1"):
        trainer.train()


def test_a_reward_of_none_leaves_its_completion_out(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path)
    rewards = [None if row == 3 else float(row % 3) for row in range(GROUP)]
    trainer.reward_funcs = [checked_reward(lambda **columns: rewards)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)
    assert batch["advantages"][3] == 0 and (batch["advantages"] != 0).sum() > GROUP // 2


def test_a_batch_without_a_reward_stops_the_run(tiny: Path, tmp_path: Path) -> None:
    """A second reward for the same rows is enough; TRL alone trains on with rewards of 0."""
    trainer = make_trainer("gtpo", tiny, tmp_path)
    none = checked_reward(lambda **columns: [None] * GROUP)
    trainer.reward_funcs, trainer.reward_func_names = [none], ["mine"]
    with pytest.raises(RunError, match=f"^mine returned None for all {GROUP} completions of step 1, so none has a rew"):
        trainer.train()
    trainer.reward_funcs, trainer.reward_func_names = (
        [none, checked_reward(lambda **columns: [1.0] * GROUP)],
        ["a", "b"],
    )
    trainer.reward_weights, trainer.reward_processing_classes = torch.ones(2), [None, None]
    trainer.model.train()
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)
    assert (batch["advantages"] == 0).all()


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_generation_from_nan_probabilities_stops_the_run(method: str, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = tracked(method, tiny, run, max_steps=2)
    trainer.__class__ = canned.TRAINERS[method].__mro__[2]  # generates itself
    next(w for name, w in trainer.model.named_parameters() if "lora_B" in name).data.fill_(1e38)
    message = r"^the probability of a sampled token is not finite in step 1: .*not-finite-step-1"
    with pytest.raises(RunError, match=message):
        trainer.train()
    assert_nothing_saved(run)
    assert "Question" in strictly((run / "not-finite-step-1" / "rows-0.json").read_text())[0]["prompt"]


@pytest.mark.parametrize(
    "outcome",
    [
        RuntimeError("CUDA error: device-side assert triggered"),  # torch.multinomial on a GPU
        ([[300, 2], [301]], [[None, None], [-0.5]]),  # vLLM, as TRL passes its NaN on
    ],
    ids=["cuda", "vllm"],
)
def test_nan_probabilities_on_a_gpu_and_in_vllm(
    outcome: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", Mock(side_effect=[outcome]))
    trainer = make_trainer("gtpo", tiny, tmp_path)
    monkeypatch.setattr(trainer, "_generates_with_transformers", lambda: False)
    with pytest.raises(RunError, match="the probability of a sampled token is not finite in step 1"):
        GRPOTrainer._generate_single_turn(trainer, [[300], [301]], None, {}, 2)


@pytest.mark.parametrize(
    "outcome", [RuntimeError("out of memory"), ([[300, 2], [301]], [[None, -0.1], [-0.5]]), ([[300], [2]], None)]
)
def test_other_generations_pass(outcome: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", Mock(side_effect=[outcome]))
    trainer = make_trainer("gtpo", tiny, tmp_path)
    monkeypatch.setattr(trainer, "_generates_with_transformers", lambda: False)
    if isinstance(outcome, Exception):
        with pytest.raises(RuntimeError, match=r"^out of memory$"):
            GRPOTrainer._generate_single_turn(trainer, [[300], [301]], None, {}, 2)
    else:
        assert GRPOTrainer._generate_single_turn(trainer, [[300], [301]], None, {}, 2) == outcome


def test_metrics_contain_no_infinity(tmp_path: Path) -> None:
    writer, state = MetricsWriter(RunDirectory(tmp_path)), TrainerState(global_step=1)
    logs = {"loss": 0.5, "grad_norm": float("inf"), "mine": float("nan"), "kl": None}  # fp16 logs inf where it skips
    writer.on_log(None, state, None, logs=logs)
    assert strictly((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5, "kl": None}


# ---- checkpoints ----


def test_a_checkpoint_is_valid_only_if_every_file_is_complete(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tracked("gtpo", tiny, run, max_steps=3).train()
    assert complete(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    weights_file = run / "checkpoint-3" / "adapter_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1])
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    assert complete(run) == ["checkpoint-1"]
    for text in ("", "[]", '{"a'):  # killed during the write
        (run / "checkpoint-1" / MANIFEST).write_text(text)
        assert complete(run) == []
    (run / "checkpoint-1" / MANIFEST).unlink()
    assert complete(run) == []
    assert not list(run.rglob("training_args.bin"))  # a pickle


def test_a_damaged_state_with_a_fitting_manifest_is_not_loaded(tiny: Path, tmp_path: Path) -> None:
    trainer = tracked("gtpo", tiny, tmp_path / "run", max_steps=1)
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    trainer.args.max_steps = 2
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        whole = (checkpoint / name).read_bytes()
        for content in (b"", whole[:-9], pickle.dumps(print)):  # no code is run
            (checkpoint / name).write_bytes(content)
            write_manifest(checkpoint)
            with pytest.raises(
                UsageError, match=rf"checkpoint-1/{name} is damaged or not from a trainer: do not tr"
            ) as e:
                train(trainer, str(checkpoint))
            assert "weights_only" not in str(e.value)
        (checkpoint / name).write_bytes(whole)


def test_a_checkpoint_needs_the_reference_adapter_too(tiny: Path, tmp_path: Path) -> None:
    tracked("grpo", tiny, tmp_path / "run", max_steps=1, beta=0.04).train()
    assert complete(tmp_path / "run") == ["checkpoint-1"]
    assert not (tmp_path / "run" / "best" / "ref").exists()  # best/ is the policy alone
    (tmp_path / "run" / "checkpoint-1" / "ref" / "adapter_model.safetensors").write_bytes(b"")
    assert complete(tmp_path / "run") == []


def test_save_total_limit_keeps_the_newest_steps_whatever_the_file_times(tiny: Path, tmp_path: Path) -> None:
    """Checkpoints dated ahead, as by a copy or a clock that was set back, are still the older ones."""
    run = tmp_path / "run"
    trainer = tracked("gtpo", tiny, run, max_steps=4, save_total_limit=2)

    class DateAhead(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ahead = time.time() + 3600 * (10 - state.global_step)
            os.utime(run / f"checkpoint-{state.global_step}", (ahead, ahead))

    trainer.add_callback(DateAhead())
    trainer.train()
    assert complete(run) == ["checkpoint-3", "checkpoint-4"] == [path.name for path in sorted_checkpoints(run)]
    assert trainer.args.save_total_limit == 2  # as in config.yaml and the model card


def test_one_kept_checkpoint_is_deleted_after_the_next_one_is_whole(tiny: Path, tmp_path: Path) -> None:
    run, seen = tmp_path / "run", []
    trainer = tracked("gtpo", tiny, run, max_steps=2, save_total_limit=1)

    class BeforeTheManifest(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(complete(run))

    trainer.callback_handler.callbacks.insert(0, BeforeTheManifest())
    trainer.train()
    assert seen == [[], ["checkpoint-1"]] and complete(run) == ["checkpoint-2"]


def test_a_finished_run_deletes_what_a_kill_left_over_the_limit(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tracked("gtpo", tiny, run, max_steps=2, save_total_limit=1).train()
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-1")  # complete: the kill came before its deletion
    train(tracked("gtpo", tiny, run, max_steps=2, save_total_limit=1), str(run / "checkpoint-2"))
    assert complete(run) == ["checkpoint-2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("grpo", {"beta": 0.04}),  # the reference policy is an adapter too
        ("grpo", {"optim": "adamw_torch", "lr_scheduler_type": "cosine"}),
    ],
    ids=["kl", "adam-and-schedule"],
)
def test_a_run_resumed_at_any_step_ends_with_the_same_weights(
    method: str, settings: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    uninterrupted, restarted = tmp_path / "uninterrupted", tmp_path / "restarted"
    for directory in (uninterrupted, restarted):
        tracked(method, tiny, directory, max_steps=6, **settings).train()
    for step in (1, 2, 3, 4, 5):
        resumed = tracked(method, tiny, restarted, max_steps=6, **settings)
        resumed.train(resume_from_checkpoint=str(restarted / f"checkpoint-{step}"))
        assert same(weights(restarted / "checkpoint-6"), weights(uninterrupted / "checkpoint-6")), step
    lines = [
        [
            {k: v for k, v in json.loads(line).items() if k not in ("step_time", "tokens_per_second")}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (uninterrupted, restarted)
    ]
    assert len(lines[0]) == 6 and lines[0] == lines[1]


def test_a_directory_is_replaced_atomically(tmp_path: Path) -> None:
    for name, text in (("best", "old"), ("best.tmp", "new"), ("best.old", "older, left by a kill")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    replace_directory(tmp_path / "best.tmp", tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (tmp_path / "best" / "file").read_text() == "new"


# ---- signals to a running script ----


class RunningScript:
    """A train script in a separate process, past its second step."""

    def __init__(self, tiny: Path, directory: Path, steps: int = 400) -> None:
        self.directory = directory
        argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--initial_entropy"]
        argv += ["0.5", "--max_completion_length", "8", "--max_steps", str(steps), "--output_dir", directory]
        self.process = subprocess.Popen(
            [sys.executable, "train_gtpo.py", *argv],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )
        while self.steps() < 2:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def steps(self) -> int:
        metrics = self.directory / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def stop(self, *numbers: signal.Signals) -> tuple[int, str]:
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.3)
        _, stderr = self.process.communicate(timeout=120)
        return self.process.returncode, stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR2, 140)],
)
def test_a_signal_saves_a_checkpoint_of_the_last_step(
    number: signal.Signals, code: int, tiny: Path, tmp_path: Path
) -> None:
    run = RunningScript(tiny, tmp_path / "run")
    returncode, stderr = run.stop(number)
    assert returncode == code and "Traceback" not in stderr
    steps = run.steps()
    assert complete(run.directory) == [f"checkpoint-{steps}"]
    assert f"stopped after step {steps}; continue with: python train_gtpo.py --resume {run.directory}" in stderr
    assert not (run.directory / "adapter").exists()
    resume = [sys.executable, "train_gtpo.py", "--resume", run.directory, "--max_steps", str(steps + 2)]
    subprocess.run(resume, cwd=ROOT, check=True, capture_output=True)
    lines = [json.loads(line)["step"] for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, steps + 3)) and (run.directory / "adapter").is_dir()


@pytest.mark.slow
def test_a_run_in_use_is_locked_and_a_killed_run_is_not(tiny: Path, tmp_path: Path) -> None:
    run = RunningScript(tiny, tmp_path / "run")
    for flag in ("--resume", "--overwrite"):
        argv = [sys.executable, "train_gtpo.py", "--model", tiny, "--output_dir", run.directory, flag]
        argv += ["--dataset", "arithmetic"]
        second = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        assert second.returncode == 2 and f"{run.directory} is in use by another process" in second.stderr
    run.process.kill()
    run.process.communicate()
    with FileLock(run.directory / "run.lock", timeout=0):  # the OS releases the lock when the process dies
        pass


# ---- exit codes and messages ----


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("bad input"), 2, "bad input"),
        (RunError("it stopped"), 1, "it stopped"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk is full"),
        (RuntimeError("Error while serializing: I/O error: No space left on device"), 1, "the disk is full"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), 1, "the disk is full"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 14656 vs 14548"),
            1,
            "the disk is full",
        ),
        (OSError(errno.EFBIG, "File too large"), 1, "larger than the disk or `ulimit -f` allows"),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), 1, "`ulimit -f`"),
    ],
)
def test_a_script_exits_with_a_one_line_error(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_script(main)
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# ---- full disk ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``small_disk("2m")`` mounts a file system of that size; later calls resize it."""
    directory = tmp_path / "disk"
    directory.mkdir()

    def mount(size: str) -> Path:
        options = f"remount,size={size}" if directory.is_mount() else f"size={size}"
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], capture_output=True)
        if mounted.returncode:
            pytest.skip("mounting a small file system needs root")
        return directory

    yield mount
    subprocess.run(["umount", directory], capture_output=True)


@pytest.mark.slow
def test_a_run_stopped_by_a_full_disk_can_be_resumed(tiny: Path, small_disk: Callable[[str], Path]) -> None:
    run = small_disk("1200k") / "run"  # room for two checkpoints of half a megabyte, not for three
    argv = [sys.executable, "train_gtpo.py", "--model", tiny, "--dataset", "arithmetic", "--G", "4", "--lora_rank", "4"]
    argv += ["--prompts_per_step", "1", "--initial_entropy", "0.5", "--max_completion_length", "8", "--save_steps", "1"]
    argv += ["--max_steps", "5", "--output_dir", run]
    full = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr[-2000:]
    message, _, command = full.stderr.splitlines()[-1].partition("; free some space, then: python ")
    assert message.startswith("train_gtpo.py: the disk is full (") and command == f"train_gtpo.py --resume {run}"
    kept = complete(run)
    assert kept and kept == [f"checkpoint-{step}" for step in range(1, len(kept) + 1)]
    small_disk("64m")
    subprocess.run([sys.executable, "train_gtpo.py", "--resume", run], cwd=ROOT, check=True, capture_output=True)
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5] and (run / "adapter" / "adapter_model.safetensors").is_file()


# ---- lost services ----


class WandbServer(BaseHTTPRequestHandler):
    """The part of wandb's API that an online run uses."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        request_body = json.loads(body) if self.path == "/graphql" else {}
        files = request_body.get("variables", {}).get("files") or []
        upload = f"http://127.0.0.1:{self.server.server_port}/upload"  # type: ignore[attr-defined]
        project = {"id": "p", "name": "gtpo", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": "run", "displayName": "run", "config": "{}", "historyLineCount": 0}
        data = {
            "viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
            "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0"}, "features": []},
            "upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True},
            "createRunFiles": {"runID": "b", "files": [{"name": name, "uploadUrl": upload} for name in files]},
        }
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST


@pytest.mark.slow
def test_losing_the_wandb_server_does_not_stop_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb.teardown()  # an earlier test of this process may have read other settings from the environment
    server = ThreadingHTTPServer(("127.0.0.1", 0), WandbServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    finish_timeouts = []

    def short_timeout(finish_timeout: float, **settings: Any) -> Any:
        finish_timeouts.append(finish_timeout)
        return Settings(finish_timeout=3, **settings)

    Settings = wandb.Settings
    monkeypatch.setattr(wandb, "Settings", short_timeout)

    class StopServer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                server.shutdown()
                server.server_close()

    trainer = make_trainer("gtpo", tiny, tmp_path, max_steps=6, report_to="wandb")
    trainer.add_callback(StopServer())
    attach_callbacks(trainer, settings_of(trainer))
    assert not wandb.run.offline
    trainer.train()
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5, 6] and finish_timeouts == [60]
    assert wandb.run is None  # wandb gave up


def test_a_killed_reward_worker_is_replaced(tiny: Path, tmp_path: Path) -> None:
    rewarded = []

    def graded(completions: Any, **kwargs: Any) -> list[float]:
        step = trainer.state.global_step
        texts = [f"<answer>{i}x + {step}x^2</answer>" for i in range(GROUP)]  # all new to the grader
        scores = accuracy_reward(texts, answer=[f"x({i} + {step if i % 3 else 99}x)" for i in range(GROUP)])
        rewarded.append(scores)
        process = worker.shared_worker.process
        assert process is not None
        process.kill()
        process.wait()
        return scores

    trainer = make_trainer("gtpo", tiny, tmp_path, max_steps=4)
    trainer.reward_funcs = [graded]
    timeouts_before = worker.timeouts()
    trainer.train()
    assert rewarded == [[10.0 if i % 3 else 0.0 for i in range(GROUP)]] * 4
    assert worker.timeouts() == timeouts_before


# ---- edge cases of groups ----


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gtpo", "grpo"])
@pytest.mark.parametrize(
    "group",
    [
        [[2]] * GROUP,  # EOS is the first token
        [[300]] * GROUP,  # one token, truncated
        [[2], [300, 2]] * (GROUP // 2),
        [[300 + row] * 32 for row in range(GROUP)],  # all reach max_completion_length and are truncated
    ],
    ids=["eos-first", "one-token", "one-or-two", "truncated"],
)
def test_training_on_short_and_truncated_completions(
    method: str, group: list[list[int]], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canned, "canned_group", lambda step, size=GROUP: group)
    trainer = make_trainer(method, tiny, tmp_path, {"entropy_filter": "off"}, max_steps=2)
    trainer.reward_funcs = [lambda completions, **kwargs: [float(row % 3) for row in range(len(completions))]]
    after = canned.trained_weights(trainer)
    assert all(weight.isfinite().all() for weight in after.values())
    log = trainer.state.log_history[0]
    lengths = [len(ids) for ids in group]
    assert log["completion_length"] == sum(lengths) / GROUP
    assert log["completions/clipped_ratio"] == sum(ids[-1] != 2 for ids in group) / GROUP
    assert log["grad_norm"] > 0 or group[0] == group[1]  # the same token with both signs: zero gradient


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_group_of_equal_rewards_trains_only_the_entropy_term(method: str, tiny: Path, tmp_path: Path) -> None:
    def train(gtpo: dict[str, Any]) -> bool:
        trainer = make_trainer(method, tiny, tmp_path, gtpo, max_steps=1)
        trainer.reward_funcs = [lambda completions, **kwargs: [5.0] * len(completions)]
        before = {n: w.detach().clone() for n, w in trainer.model.named_parameters() if w.requires_grad}
        after = canned.trained_weights(trainer)
        assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1
        assert trainer.state.log_history[0]["conflict_tokens"] == 0
        return same(before, after)

    assert train({"gamma": 0.0})
    assert train({"gamma": 0.1}) is (method == "grpo")


@pytest.mark.slow
def test_training_on_prompts_and_completions_that_fill_the_context(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = [
        sys.executable,
        "train_gtpo.py",
        "--model",
        tiny,
        "--dataset",
        tmp_path / "long.jsonl",
        "--reward",
        "format",
    ]
    argv += ["--G", "2", "--prompts_per_step", "1", "--initial_entropy", "0.5", "--max_steps", "1", "--output_dir", run]
    argv += ["--max_prompt_length", "4088", "--max_completion_length", "8", "--max_seq_length", "4096"]
    tokenizer = AutoTokenizer.from_pretrained(tiny)

    def tokens(length: int) -> int:
        return len(
            tokenizer.apply_chat_template(to_messages("q" * length), add_generation_prompt=True, return_dict=False)
        )

    longest = next(size for size in range(4096, 0, -1) if tokens(size) <= 4088)
    rows = [{"prompt": "q" * (longest + more)} for more in (0, 1)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "1 of 2 prompts dropped: over 4088 tokens" in ended.stderr
    (line,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["completion_length"] <= 8 and line["num_tokens"] > 2 * 4088


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_last_step_does_not_stop_a_finished_run(number: int, code: int, tmp_path: Path) -> None:
    callback = StopOnSignal()
    callback.received = number
    args = SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        callback.on_train_end(args, TrainerState(global_step=4, max_steps=5), TrainerControl())
    assert ended.value.code == code
    callback.on_train_end(args, TrainerState(global_step=5, max_steps=5), TrainerControl())


def test_the_token_count_of_a_resumed_run_continues(tmp_path: Path) -> None:
    trainer = SimpleNamespace()
    rows = [{"num_tokens": 200.0}, {"num_tokens": 408.0}, {"train_loss": 0.5}]
    state = TrainerState(global_step=2, log_history=rows)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    CompleteCheckpoints(trainer).on_train_begin(args, state, TrainerControl())
    assert trainer._total_train_tokens == 408


@pytest.mark.parametrize("ignored", [True, False])
def test_sighup_stays_ignored_under_nohup(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    callback = StopOnSignal()
    try:
        callback.on_train_begin(SimpleNamespace(), TrainerState(), TrainerControl())
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is ignored
        if not ignored:
            signal.raise_signal(signal.SIGHUP)
            assert callback.received == signal.SIGHUP
        callback.restore()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_gradient_that_is_not_finite_on_another_process_stops_this_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tracked("gtpo", tiny, tmp_path / "run")
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    monkeypatch.setattr(fault_tolerance, "any_process", lambda here, device: True)
    with pytest.raises(RunError, match=r"the gradient.* is not finite"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


@pytest.mark.parametrize("fails", [True, False])
def test_signals_have_their_handlers_again_after_training(fails: bool, tiny: Path, tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    trainer = tracked("gtpo", tiny, tmp_path / "run", max_steps=2)
    during: list[Any] = []

    class Note(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            during.append(signal.getsignal(signal.SIGTERM))

    trainer.add_callback(Note())
    if fails:
        trainer.add_callback(Poison(1))
    with pytest.raises(RunError) if fails else nullcontext():
        train(trainer, None)
    assert before == [signal.getsignal(number) for number in numbers]
    assert len(during) == 2 and before[1] not in during


def test_a_second_signal_is_not_caught() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    callback = StopOnSignal()
    try:
        callback.on_train_begin(SimpleNamespace(), TrainerState(), TrainerControl())
        signal.raise_signal(signal.SIGINT)  # noted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        callback.restore()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("numbers", [(signal.SIGUSR2,) * 3, (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR2)])
def test_the_signal_of_slurm_never_exits_immediately(numbers: tuple[signal.Signals, ...]) -> None:
    """Slurm sends it to every process of a step, after SIGTERM on preemption, and a job sends it to its run again."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    callback = StopOnSignal()
    try:
        callback.on_train_begin(SimpleNamespace(), TrainerState(), TrainerControl())
        for number in numbers:
            signal.raise_signal(number)
        assert callback.received == numbers[0]
        given_back = signal.getsignal(signal.SIGTERM) == before[0]
        assert given_back is (signal.SIGTERM in numbers)  # the next SIGTERM after SIGUSR2 is the first of its kind
    finally:
        callback.restore()
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
