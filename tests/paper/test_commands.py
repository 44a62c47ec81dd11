"""reproduce.py --commands: each line does in a shell what it says: at first, again, and when the run is finished."""

import contextlib
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.scripts import ROOT
from helpers.settings import CLASSES
from safetensors.torch import save_file

from gtpo.arguments import PromptArguments, fields_of
from gtpo.cli.parse import parse, parse_evaluation
from gtpo.errors import UsageError
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.jobs import plan_evaluation
from gtpo.paper.matrix import evaluations_of, experiments_of, figure_names, load_matrix
from gtpo.paper.states import commands
from gtpo.runs.directory import RunDirectory

MATRIX = load_matrix()
FIGURES = figure_names(MATRIX)
EXPERIMENTS = experiments_of(MATRIX, FIGURES, "paper")
EVALUATIONS = evaluations_of(MATRIX, FIGURES, "paper", EXPERIMENTS)
LINES = commands("paper", EXPERIMENTS, EVALUATIONS).splitlines()
BASES = {"llama": "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit", "qwen": "unsloth/qwen2.5-3b-instruct-bnb-4bit"}


def called(lines: list[str], directory: Path) -> list[list[str]]:
    """The arguments of `python` in each line, as bash expands them in a directory."""
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "bin" / "python").write_text('#!/bin/bash\nprintf "%s\\t" "$@" >> calls\necho >> calls\n')
    (directory / "bin" / "python").chmod(0o755)
    (directory / "calls").write_text("")
    environment = os.environ | {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    script = "\n".join(lines)
    done = subprocess.run(["bash", "-e", "-c", script], cwd=directory, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return [line.removesuffix("\t").split("\t") for line in (directory / "calls").read_text().splitlines()]


def test_every_line_calls_its_script_after_what_it_depends_on(tmp_path: Path) -> None:
    assert len(LINES) == len(EXPERIMENTS) + len(EVALUATIONS) == 107 + 15
    calls = called(LINES, tmp_path)
    assert calls == [[*run.argv, "--overwrite", "true"] for run in EXPERIMENTS] + [[*w.argv] for w in EVALUATIONS]
    earlier: set[str] = set()
    for line in LINES:
        what = line.rpartition("  # ")[2].split("; ")
        earlier.add(what[0])
        if line.startswith("python evaluate.py"):
            words = shlex.split(line, comments=True)
            adapters = [Path(word).name for word in words[words.index("--runs") + 1 :] if word != "base"]
            assert what[2] == f"after: {' '.join(adapters)}" and {*adapters} <= earlier


def test_a_line_resumes_an_interrupted_run_and_skips_a_finished_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / EXPERIMENTS[0].run.path)
    run.path.mkdir(parents=True)
    assert called(LINES[:1], tmp_path) == [[*EXPERIMENTS[0].argv, "--overwrite", "true"]]
    for step in (50, 100):
        run.checkpoint(step).mkdir()
    (run.checkpoint(50) / "files.json").write_text("{}")
    assert called(LINES[:1], tmp_path) == [[*EXPERIMENTS[0].argv, "--resume", str(EXPERIMENTS[0].run.path)]]
    run.adapter.mkdir()
    (run.adapter / "adapter_config.json").write_text("{}")
    assert called(LINES[:1], tmp_path) == []


@pytest.mark.slow
def test_every_line_passes_a_dry_run(
    no_gpu: None, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training with --dry_run; evaluation up to the sampling, of adapters that record what that training prints."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    calls = called(LINES, tmp_path)
    planned: list[Any] = []
    stored: dict[str, str] = {}  # config file -> settings; lines differ in the seed and the directory otherwise
    for run, (script, name, config, *flags) in zip(EXPERIMENTS, calls, strict=False):
        path = str(run.run.path)
        assert (name, flags) == ("--config", ["--seed", str(run.seed), "--output_dir", path, "--overwrite", "true"])
        if config not in stored:
            printed = main(script, [name, config, *flags, "--dry_run", "true"], monkeypatch)
            assert f"output_dir: {path}\n" in printed and "GiB" in printed
            method = script.removeprefix("train_").removesuffix(".py")
            settings = parse(method, CLASSES[method], [name, config, *flags, "--dry_run", "true"]).to_dict()
            assert settings["seed"] == run.seed
            needed = ("load_in_4bit", *fields_of([PromptArguments]))  # reading all of it takes most of the time
            stored[config] = yaml.safe_dump({key: settings[key] for key in needed})
        assert not run.run.path.exists()
        for directory in (run.run.adapter, run.run.best):
            leave_adapter(directory, BASES[run.model])
        run.run.config.write_text(stored[config])
    assert len(stored) == 47
    for _, *flags in calls[len(EXPERIMENTS) :]:
        on_cpu = ["--backend", "transformers", "--data_dir", str(data_dir)]
        planned += plan_evaluation(parse_evaluation(EvaluationArguments, [*flags, *on_cpu])[0])[0]
    expected = [str(work.result(run).with_suffix(".jsonl")) for work in EVALUATIONS for run in work.experiments]
    assert [str(job.path) for job in planned if job.head.origin.adapter] == expected
    assert sum(job.head.origin.adapter is None for job in planned) == sum(w.checkpoint == "last" for w in EVALUATIONS)
    mixed = [*EVALUATIONS[0].argv[1:], str(EVALUATIONS[-1].experiments[-1].run.path)]  # LLaMA, and one of Qwen
    words = [*mixed, "--backend", "transformers", "--data_dir", str(data_dir)]
    with pytest.raises(UsageError, match="evaluate them in two commands"):
        plan_evaluation(parse_evaluation(EvaluationArguments, words)[0])


def main(script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a script prints."""
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(script.removesuffix(".py")).main()
    return printed.getvalue().partition("offline mode\n")[2] or printed.getvalue()  # of the first import of TRL


def leave_adapter(directory: Path, base: str) -> None:
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    save_file({"weight": torch.zeros(1)}, directory / "adapter_model.safetensors")
