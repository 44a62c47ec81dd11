"""Faults: what stops a run, what is kept of it, and that what goes on is the same run."""

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from canned import GROUP, canned_group, make_trainer
from filelock import FileLock
from safetensors.torch import load_file
from transformers import TrainerCallback

import config
import tracking
from config import RunError, UsageError
from faults import MANIFEST, is_whole, replace_folder
from tracking import checkpoints, track

ROOT = Path(__file__).parent.parent


def tracked(method: str, tiny: Path, folder: Path, **settings: Any) -> Any:
    """A canned trainer with the callbacks of a run, and a directory as start_run makes it."""
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(method, tiny, folder, save_strategy="steps", save_steps=1, **settings)
    track(trainer, {"output_dir": str(folder)}, title="test")
    return trainer


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "adapter_model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# ---- numbers that are not finite ----


class Poison(TrainerCallback):
    """Makes a weight infinite once ``step`` steps are done, as a step too far would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            next(weight for name, weight in model.named_parameters() if "lora_B" in name).data.fill_(float("nan"))


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_batch(method: str, tiny: Path, tmp_path: Path) -> None:
    trainer = tracked(method, tiny, tmp_path / "run", max_steps=5)
    trainer.add_callback(Poison(2))
    with pytest.raises(RunError, match=r"of step 3 is not finite.*not-finite-step-3.*--resume .*run goes on"):
        trainer.train()
    kept = tmp_path / "run" / "not-finite-step-3"
    batch = load_file(kept / "batch-0.safetensors")
    (texts,) = json.loads((kept / "completions-0.json").read_text())
    assert batch["0.completion_ids"].shape == batch["0.logps"].shape and len(texts) == GROUP
    assert batch["0.logps"].isnan().any()
    rows = zip(batch["0.completion_ids"], batch["0.completion_mask"], strict=True)
    ids = {tuple(row[mask.bool()].tolist()) for row, mask in rows}
    assert ids == {tuple(row) for row in canned_group(2)}
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
    ]


def test_a_gradient_that_is_not_finite_is_not_learned_from(tiny: Path, tmp_path: Path) -> None:
    trainer = tracked("gtpo", tiny, tmp_path / "run", max_steps=5, max_grad_norm=1.0)
    name, weight = next((n, w) for n, w in trainer.model.named_parameters() if "lora_B" in n)
    weight.register_hook(lambda gradient: gradient * float("inf") if trainer.state.global_step == 1 else gradient)
    with pytest.raises(RunError, match="the gradient of step 2 is not finite"):
        trainer.train()
    assert weight.isfinite().all()
    assert torch.equal(weight.detach(), weights(tmp_path / "run" / "checkpoint-1")[name.replace(".default", "")])
    assert (tmp_path / "run" / "not-finite-step-2" / "batch-0.safetensors").is_file()


def test_with_fp16_the_loss_scale_looks_for_itself(tiny: Path, tmp_path: Path) -> None:
    trainer = tracked("gtpo", tiny, tmp_path / "run", max_steps=1)
    trainer.args.fp16 = True
    weight = next(w for n, w in trainer.model.named_parameters() if "lora_B" in n)
    weight.register_hook(lambda gradient: gradient * float("inf"))
    trainer.train()


# ---- checkpoints ----


def test_a_checkpoint_counts_when_every_file_is_there_in_full(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tracked("gtpo", tiny, run, max_steps=3).train()
    assert [path.name for path in checkpoints(run)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    weights_file = run / "checkpoint-3" / "adapter_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1])
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    assert [path.name for path in checkpoints(run)] == ["checkpoint-1"]
    for text in ("", "[]", '{"a'):  # killed while it was written
        (run / "checkpoint-1" / MANIFEST).write_text(text)
        assert not is_whole(run / "checkpoint-1")
    (run / "checkpoint-1" / MANIFEST).unlink()
    assert checkpoints(run) == []


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("gtpo", {"num_iterations": 2}),  # a checkpoint between two steps on the same completions
        ("gtpo", {"num_iterations": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}),
        ("gtpo", {"steps_per_generation": 2, "per_device_train_batch_size": 6}),
        ("grpo", {"beta": 0.04}),  # its reference is an adapter too
        ("grpo", {"optim": "adamw_torch", "lr_scheduler_type": "cosine"}),
    ],
    ids=["two-iterations", "three-in-micro-batches", "two-steps-per-generation", "kl", "adam-and-schedule"],
)
def test_a_run_resumed_at_any_step_is_the_same_run(
    method: str, settings: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        tracked(method, tiny, folder, max_steps=6, **settings).train()
    for step in (1, 2, 3, 4, 5):
        resumed = tracked(method, tiny, cut, max_steps=6, **settings)
        resumed.train(resume_from_checkpoint=str(cut / f"checkpoint-{step}"))
        assert same(weights(cut / "checkpoint-6"), weights(whole / "checkpoint-6")), step
    lines = [
        [
            {k: v for k, v in json.loads(line).items() if k not in ("step_time", "tokens_per_second")}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (whole, cut)
    ]
    assert len(lines[0]) == 6 and lines[0] == lines[1]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    for name, text in (("best", "old"), ("best.tmp", "new"), ("best.old", "older, left by a kill")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    replace_folder(tmp_path / "best.tmp", tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (tmp_path / "best" / "file").read_text() == "new"


# ---- signals, of a script as a user runs it ----


class Started:
    """A train script in a process of its own, past its second step."""

    def __init__(self, tiny: Path, folder: Path, steps: int = 400) -> None:
        self.folder = folder
        argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--initial_entropy"]
        argv += ["0.5", "--max_completion_length", "8", "--max_steps", str(steps), "--output_dir", folder]
        self.process = subprocess.Popen(
            [sys.executable, "train_gtpo.py", *argv],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while self.steps() < 2:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def end(self, *numbers: signal.Signals) -> tuple[int, str]:
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.3)
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_checkpoint_of_the_last_step(
    number: signal.Signals, code: int, tiny: Path, tmp_path: Path
) -> None:
    run = Started(tiny, tmp_path / "run")
    ended, said = run.end(number)
    assert ended == code and "Traceback" not in said
    steps = run.steps()
    assert [path.name for path in checkpoints(run.folder)] == [f"checkpoint-{steps}"]
    assert f"stopped after step {steps}: --resume {run.folder} goes on" in said
    assert not (run.folder / "adapter").exists()
    again = [sys.executable, "train_gtpo.py", "--resume", run.folder, "--max_steps", str(steps + 2)]
    subprocess.run(again, cwd=ROOT, check=True, capture_output=True)
    lines = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, steps + 3)) and (run.folder / "adapter").is_dir()


def test_a_run_in_use_is_refused_and_a_killed_one_is_free(tiny: Path, tmp_path: Path) -> None:
    run = Started(tiny, tmp_path / "run")
    for flag in ("--resume", "--overwrite"):
        argv = [sys.executable, "train_gtpo.py", "--model", tiny, "--output_dir", run.folder, flag]
        argv += ["--dataset", "arithmetic"]
        second = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        assert second.returncode == 2 and f"{run.folder} is in use by another process" in second.stderr
    run.process.kill()
    run.process.communicate()
    with FileLock(run.folder / tracking.LOCK, timeout=0):  # the system frees it, whatever end the process took
        pass


# ---- how a script ends ----


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("bad input"), 2, "bad input"),
        (RunError("it stopped"), 1, "it stopped"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk is full"),
        (RuntimeError("PytorchStreamWriter failed: No space left on device (os error 28)"), 1, "the disk is full"),
    ],
)
def test_a_script_ends_with_one_sentence(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        config.run_script(main)
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_another_fault_keeps_its_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        config.run_script(main)
