"""reproduce.py --commands: each line does in a shell what it says: at first, again, and when the run is finished."""

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
    python = """python() { printf '%s\\t' "$@"; echo; }"""
    done = run_process(["bash", "-e", "-c", "\n".join([python, *lines])], cwd=directory)
    assert done.stderr == ""
    return [line.removesuffix("\t").split("\t") for line in done.stdout.splitlines()]


def test_every_line_follows_what_it_depends_on(tmp_path: Path) -> None:
    assert (len(EXPERIMENTS), len(EVALUATIONS)) == (107, 15)
    calls = called(LINES, tmp_path)
    assert calls == [[*run.argv, "--overwrite", "true"] for run in EXPERIMENTS] + [[*w.argv] for w in EVALUATIONS]
    for line, work in zip(LINES[len(EXPERIMENTS) :], EVALUATIONS, strict=True):
        parse_evaluation(EvaluationArguments, list(work.argv[1:]))
        assert line.endswith(f"; after: {' '.join(run.label for run in work.experiments)}")
        assert {*work.experiments} <= {*EXPERIMENTS}


def test_a_line_resumes_a_run_or_skips_it(tmp_path: Path) -> None:
    run = fake_run(tmp_path / EXPERIMENTS[0].run.path)
    assert called(LINES[:1], tmp_path) == [[*EXPERIMENTS[0].argv, "--overwrite", "true"]]
    checkpoint(run.path, 50)
    run.checkpoint(100).mkdir()
    assert called(LINES[:1], tmp_path) == [[*EXPERIMENTS[0].argv, "--resume", str(EXPERIMENTS[0].run.path)]]
    finish(run.adapter)
    assert called(LINES[:1], tmp_path) == []
