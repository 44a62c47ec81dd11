"""The run directory: its readers, and the command that resumes it."""

import shlex
from pathlib import Path

import pytest

from gtpo.errors import UsageError
from gtpo.runs import RunDirectory, resume_command


def test_a_damaged_line_of_the_metrics_is_named_and_a_truncated_last_one_skipped(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "reward": "\xce')
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    for line in (b'{"step"', b"2", b"\x00\x00", b"\xff"):
        run.metrics.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
        with pytest.raises(UsageError, match=r"metrics\.jsonl: line 2 is not a JSON object: delete it"):
            run.read_metrics()


@pytest.mark.parametrize(("settings", "script"), [("gamma: 0.1", "gtpo"), ("num_generations: 4", "grpo"), ("", "sft")])
def test_the_command_that_resumes_a_run_can_be_pasted(settings: str, script: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "gamma 0.5")
    run.path.mkdir()
    run.config.write_text(f"model: tiny\n{settings}\n")
    assert shlex.split(resume_command(run)) == ["python", f"train_{script}.py", "--resume", str(run.path)]


def test_the_command_that_resumes_a_run_names_its_own_rewards_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.config.write_text("model: tiny\ngamma: 0.1\nreward: [format, 'my file.py:f']\n")
    assert shlex.split(resume_command(run))[4:] == ["--reward", "format", "my file.py:f"]


def test_tables_of_completions_are_ordered_by_step(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    for step in (10, 2, 1):
        (tmp_path / "completions" / f"completions_{step:05}.parquet").touch()
    names = [path.stem[-5:] for path in RunDirectory(tmp_path).completion_tables()]
    assert names == ["00001", "00002", "00010"]
