"""What a run writes: files for whom the umask allows, where safetensors writes for their owner alone; no secret."""

import os
import sys
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run_process

pytestmark = pytest.mark.slow

SECRETS = {"HF_TOKEN": "hf_secretOfTheHub", "WANDB_API_KEY": "secretOfWandb".ljust(40, "x")}


def test_files_of_a_run_follow_the_umask_without_secrets(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--beta", "0.04"]
    argv += ["--limit", "100", "--max_completion_length", "8", "--max_steps", "2", "--save_steps", "1", "--output_dir"]
    argv += [run, "--report_to", "wandb", "--hub_token", "hf_secretOfTheFlag"]
    command = ["sh", "-c", 'umask 022; exec "$@"', "sh", sys.executable, ROOT / "train_grpo.py", *argv]
    ended = run_process(command, env=os.environ | SECRETS | {"WANDB_MODE": "offline"})
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    of_ours = [path for name, path in files.items() if not name.startswith("wandb/")]
    assert {path.stat().st_mode & 0o777 for path in of_ours} == {0o644}
    for name in ("adapter", "best", "checkpoint-1", "checkpoint-1/ref", "checkpoint-2"):
        assert f"{name}/adapter_model.safetensors" in files
    assert {"config.yaml", "environment.json", "metrics.jsonl", "report.html"} <= files.keys()
    assert any(path.suffix == ".wandb" for path in files.values())
    for secret in (*SECRETS.values(), "hf_secretOfTheFlag"):
        assert secret not in ended.stdout + ended.stderr
        assert [name for name, path in files.items() if secret.encode() in path.read_bytes()] == []
