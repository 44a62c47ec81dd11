"""The run directory: its readers, and the command that resumes it."""

import os
import shlex
from pathlib import Path

import pytest
from helpers.runs import fake_run

from gtpo.runs.directory import RunDirectory, command_of, find_runs, label_of, run_label


def test_repeated_and_cut_off_lines_do_not_count(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1}, {"step": 2}, {"step": 1, "eval_runtime": 0.1}, {"step": 1, "loss": 3}]
    run = fake_run(tmp_path, rows=lines)
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "loss": 1.0}')  # killed before the end of the line
    assert run.read_metrics() == [lines[3], lines[1], lines[2]]


@pytest.mark.parametrize(
    ("settings", "script", "rewards"),
    [
        ("gamma: 0.1", "gtpo", []),
        ("num_generations: 4", "grpo", []),
        ("", "sft", []),
        ("gamma: 0.1\nreward: [format, 'my file.py:f']", "gtpo", ["--reward", "format", "my file.py:f"]),
        ("gamma: 0.1\npush_to_hub: false\nhub_model_id:\nreport_to: none\nvllm_server_host: 0.0.0.0", "gtpo", []),
        (
            "num_generations: 4\npush_to_hub: true\nreport_to: wandb\nvllm_server_host: a\nobjective: m.py:A",
            "grpo",
            ["--push_to_hub", "true", "--report_to", "wandb", "--vllm_server_host", "a", "--objective", "m.py:A"],
        ),
    ],
)
def test_the_command_that_resumes_a_run_can_be_pasted(
    settings: str, script: str, rewards: list[str], tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "gamma 0.5")
    run.path.mkdir()
    run.config.write_text(f"model: tiny\n{settings}\n")
    found = shlex.split(command_of(run, "--resume", str(run.path)))
    assert found == ["python", f"train_{script}.py", "--resume", str(run.path), *rewards]


def test_every_kind_of_final_weights_is_set_aside(tmp_path: Path) -> None:
    """Also where an earlier start of the same step has done so."""
    run = fake_run(tmp_path / "run", {"model": "x"}, saved=["adapter", "model", "merged", "adapter-step-4"])
    (run.adapter / "adapter_model.safetensors").write_text("newer")
    run.set_aside(4)
    names = ["adapter-step-4", "merged-step-4", "model-step-4"]
    assert sorted(path.name for path in run.path.glob("*-step-*")) == names
    assert sorted(path.name for path in run.earlier_weights()) == names
    assert not (run.adapter.exists() or run.model.exists() or run.merged.exists())
    assert (run.path / "adapter-step-4" / "adapter_model.safetensors").read_text() == "newer"
    run.set_aside(6)  # nothing is left
    assert not list(run.path.glob("*-step-6"))


def test_a_label_is_the_path_below_outputs(here: Path) -> None:
    assert label_of(Path("outputs/a/b-s1")) == label_of(Path("outputs/a/b-s1/adapter")) == "a-b-s1"
    assert label_of(Path("elsewhere/b-s1/adapter")) == "b-s1"


def test_name_and_seed_of_a_run() -> None:
    assert run_label("gtpo-g8-s2") == ("gtpo-g8", 2) and run_label("gtpo-g8-s12@best") == ("gtpo-g8@best", 12)
    assert run_label("gtpo-g8") == ("gtpo-g8", None) and run_label("gtpo-g8-seed2") == ("gtpo-g8-seed2", None)


def test_runs_are_found_by_files_newest_last(tmp_path: Path) -> None:
    files = ["b/config.yaml", "b/metrics.jsonl", "a/config.yaml", "a/adapter/adapter_config.json"]
    for seconds, name in enumerate([*files, "full/model/config.json", "other/metrics.jsonl"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    places = [tmp_path, tmp_path / "a", tmp_path / "missing"]
    for having, expected in (("settings", ["b", "a"]), ("weights", ["a", "full"]), ("metrics", ["b", "other"])):
        assert [run.path.name for run in find_runs(places, having)] == expected
