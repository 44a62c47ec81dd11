"""The batch script of Slurm with two processes."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.runs import metrics_of
from helpers.scripts import ROOT, run_process, user_environment

pytestmark = pytest.mark.slow

FLAGS = ["--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--max_completion_length", "8"]
FLAGS += ["--save_steps", "100", "--initial_entropy", "0.5", "--log_completions", "false"]
SRUN = """#!/bin/bash
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@" & processes+=($!); done
highest=0
for process in "${processes[@]}"; do
    wait $process; code=$?
    [ $code -gt $highest ] && highest=$code
done
exit $highest
"""

SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$2" >> requeued; fi
"""


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = metrics_of(run)
    return [{key: value for key, value in row.items() if "time" not in key and "per_second" not in key} for row in rows]


def test_the_batch_script_of_slurm_is_requeued_and_resumes(tiny: Path, tmp_path: Path) -> None:
    """Two processes without a launcher; SIGUSR2 to both, as Slurm signals a step."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"export PATH={shlex.quote(path)}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names = {"SLURM_JOB_NAME": "gtpo", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_CPUS_PER_TASK": "1"}
    environment = user_environment() | names | {"PATH": path, "MASTER_PORT": port}
    argv = [
        "bash",
        str(ROOT / "examples/slurm/train.sbatch"),
        str(ROOT / "train_gtpo.py"),
        "--model",
        str(tiny),
        *FLAGS,
    ]
    run = tmp_path / "outputs" / "gtpo-7"
    with open(tmp_path / "log", "w") as log:
        first = subprocess.Popen([*argv, "--max_steps", "400"], cwd=tmp_path, env=environment, stdout=log, stderr=log)
        while not (run / "metrics.jsonl").exists():
            assert first.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        children = psutil.Process(first.pid).children(recursive=True)
        scripts = [child for child in children if "python" in child.name() and "-I" not in child.cmdline()]  # no helper
        assert len(scripts) == 2
        for script in scripts:
            script.send_signal(signal.SIGUSR2)
        assert first.wait(timeout=60) == 140, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "requeued").read_text() == "7\n"
    steps = len(metrics(run))
    assert (run / f"checkpoint-{steps}" / "files.json").is_file() and not (run / "adapter").exists()
    run_process([*argv, "--max_steps", str(steps + 2)], cwd=tmp_path, env=environment)
    assert [row["step"] for row in metrics(run)] == list(range(1, steps + 3)) and (run / "adapter").is_dir()
