"""A run that is killed and resumed ends with bit-identical weights.

    GTPO_KILLS=10 GTPO_STEPS=60 python -m pytest tests/scripts/test_resume.py    # 10 kills at random points of 60 steps

SIGKILL cannot be caught. It comes at any point: during a step, while a checkpoint is saved, while a line is written.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import metrics_of
from helpers.scripts import ROOT, RunScript
from helpers.weights import adapter_of, same_weights

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("GTPO_KILLS", 2))
STEPS = int(os.environ.get("GTPO_STEPS", 12))
HELD_OUT = ["--eval_rows", "3", "--eval_steps", "3"]  # at other steps than the checkpoints, and at the same
RUNS = {
    "gtpo": ["train_gtpo.py", "--G", "4", "--prompts_per_step", "1", "--max_completion_length", "12", *HELD_OUT],
    "sft": ["train_sft.py", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", *HELD_OUT],
}
TIMES = {"step_time", "tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in metrics_of(run)]


def lines_written(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize("method", RUNS)
def test_a_killed_run_resumes_to_the_same_result(
    method: str, tiny: Path, tmp_path: Path, run_script: RunScript
) -> None:
    generator = random.Random(method)
    argv = [*RUNS[method], "--model", str(tiny), "--dataset", "arithmetic", "--max_steps", str(STEPS)]
    argv += ["--limit", "100", "--save_steps", "2", "--output_dir"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    run_script(tmp_path, *argv, str(uninterrupted))

    resume: list[str] = []
    for kill in range(1, KILLS + 1):
        command = [sys.executable, *argv, str(killed), *resume]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None and lines_written(killed) < STEPS * kill // (KILLS + 1):
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.3))
        process.kill()
        _, stderr = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), stderr[-2000:]
        resume = ["--resume"] if any(killed.glob("checkpoint-*/files.json")) else ["--overwrite"]
    run_script(tmp_path, *argv, str(killed), *resume)

    assert same_weights(adapter_of(uninterrupted / "adapter"), adapter_of(killed / "adapter"))
    lines = metrics(killed)
    assert lines == metrics(uninterrupted)
    held_out = [line["step"] for line in lines if "eval_loss" in line]
    assert held_out == sorted({*range(3, STEPS + 1, 3), STEPS})
    assert [line["step"] for line in lines if "eval_loss" not in line] == list(range(1, STEPS + 1))
    assert (killed / "best" / "best.json").read_text() == (uninterrupted / "best" / "best.json").read_text()
    assert not list(killed.glob("*.tmp")) and not list(killed.glob("*.old"))
