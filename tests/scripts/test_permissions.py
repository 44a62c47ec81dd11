"""The files of a run can be read by whom the umask allows: safetensors writes its files for their owner only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripts import ROOT

pytestmark = pytest.mark.slow


def test_every_file_of_a_run_follows_the_umask(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--beta", "0.04"]
    argv += ["--max_completion_length", "8", "--max_steps", "2", "--save_steps", "1", "--output_dir", run]
    command = [sys.executable, "train_grpo.py", *argv]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, preexec_fn=lambda: os.umask(0o022))
    modes = {str(path.relative_to(run)): path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(modes, 0o644)
    for name in ("adapter", "best", "checkpoint-1", "checkpoint-1/ref", "checkpoint-2"):
        assert f"{name}/adapter_model.safetensors" in modes
    assert "report.html" in modes
