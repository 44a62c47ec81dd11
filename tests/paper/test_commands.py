"""reproduce.py --commands: each line does in a shell what it says: at first, again, and when the run is finished."""

import os
import shlex
from pathlib import Path

from helpers.runs import checkpoint, fake_run, finish
from helpers.scripts import run_process

from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments
from paper.matrix import evaluations_of, experiments_of, figure_names, load_matrix
from paper.states import commands

MATRIX = load_matrix()
FIGURES = figure_names(MATRIX)
EXPERIMENTS = experiments_of(MATRIX, FIGURES, "paper")
EVALUATIONS = evaluations_of(MATRIX, FIGURES, "paper", EXPERIMENTS)
LINES = commands("paper", EXPERIMENTS, EVALUATIONS).splitlines()


def called(lines: list[str], directory: Path) -> list[list[str]]:
    """The arguments of `python` in each line, as bash expands them in a directory."""
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "bin" / "python").write_text('#!/bin/bash\nprintf "%s\\t" "$@" >> calls\necho >> calls\n')
    (directory / "bin" / "python").chmod(0o755)
    (directory / "calls").write_text("")
    environment = os.environ | {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    script = "\n".join(lines)
    done = run_process(["bash", "-e", "-c", script], cwd=directory, env=environment)
    assert done.stdout + done.stderr == ""
    return [line.removesuffix("\t").split("\t") for line in (directory / "calls").read_text().splitlines()]


def test_every_line_follows_what_it_depends_on(tmp_path: Path) -> None:
    assert len(LINES) == len(EXPERIMENTS) + len(EVALUATIONS) == 107 + 15
    calls = called(LINES, tmp_path)
    assert calls == [[*run.argv, "--overwrite", "true"] for run in EXPERIMENTS] + [[*w.argv] for w in EVALUATIONS]
    for _, *flags in calls[len(EXPERIMENTS) :]:
        parse_evaluation(EvaluationArguments, flags)
    earlier: set[str] = set()
    for line in LINES:
        what = line.rpartition("  # ")[2].split("; ")
        earlier.add(what[0])
        if line.startswith("python evaluate.py"):
            words = shlex.split(line, comments=True)
            adapters = [Path(word).name for word in words[words.index("--runs") + 1 :] if word != "base"]
            assert what[2] == f"after: {' '.join(adapters)}" and {*adapters} <= earlier


def test_a_line_resumes_a_run_or_skips_it(tmp_path: Path) -> None:
    run = fake_run(tmp_path / EXPERIMENTS[0].run.path)
    assert called(LINES[:1], tmp_path) == [[*EXPERIMENTS[0].argv, "--overwrite", "true"]]
    checkpoint(run.path, 50)
    run.checkpoint(100).mkdir()
    assert called(LINES[:1], tmp_path) == [[*EXPERIMENTS[0].argv, "--resume", str(EXPERIMENTS[0].run.path)]]
    finish(run.adapter)
    assert called(LINES[:1], tmp_path) == []
