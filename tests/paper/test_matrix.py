"""The experiment matrix: the runs of each figure, their settings, commands, costs and states."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.files import write_json
from helpers.refusals import refused
from helpers.runs import checkpoint, fake_run, finish, held
from helpers.settings import parsed
from paper_runs import FIGURES as PAPER_FIGURES
from pytest import approx

from gtpo.arguments import name_of
from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.targets import adapter_source
from gtpo.files import CONFIGS, fingerprint
from paper.matrix import (
    evaluations_of,
    experiment,
    experiments_of,
    load_matrix,
    models_of_runs,
    runs_of,
    seeds_of_all,
    select_figures,
)
from paper.states import table

MATRIX = load_matrix()
ALL = select_figures(MATRIX, ["all"], "tiny")


def test_paper_scale_shows_the_runs_of_the_paper() -> None:
    for title, runs in PAPER_FIGURES.items():
        name = title.lower().replace("fig. ", "fig").replace("table ", "table")
        assert set(runs_of(MATRIX, [name], "paper")) == runs, title


@pytest.mark.parametrize("name", runs_of(MATRIX, ALL, "tiny"))
def test_tiny_run_resolves(name: str) -> None:
    script, *flags = experiment(MATRIX, "tiny", name, 2).argv
    method = name.partition("-")[0]
    assert script == f"train_{method}.py"
    resolved = parsed(*flags, "--dry_run", "true", method=method).to_dict()
    settings = MATRIX["tiny"]["base"][method] | MATRIX["tiny"]["runs"][name]
    expected = {name_of(key): value for key, value in settings.items()}
    expected |= {"seed": 2, "model": "gtpo/models/tiny_base/base-16f86973"}
    assert resolved.items() >= expected.items()
    assert resolved["output_dir"] == f"outputs/reproduce/tiny/{name}-s2"


@pytest.mark.parametrize("name", ["sft-qwen-math", "gtpo-qwen-gsm8k-onlyneg0.7"])
def test_a_run_of_the_paper_is_its_config_file(name: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    method = name.partition("-")[0]
    on_cpu = ["--use_cpu", "true", "--dry_run", "true"]
    flags = experiment(MATRIX, "paper", name, 5).argv[1:]
    resolved = parsed(*flags, *on_cpu, method=method).to_dict()
    of_file = parsed("--config", f"configs/paper/{name}.yaml", *on_cpu, method=method).to_dict()
    assert resolved == of_file | {"seed": 5, "output_dir": f"outputs/reproduce/paper/{name}-s5"}


def test_expected_cost_by_hand() -> None:
    """7,473 steps of 460 tokens at 47 ms and 12 micro-batches of 0.8 s; 7,500 solutions x 0.3 s."""
    step = 460 * 0.047 + 12 * 0.8
    assert experiment(MATRIX, "paper", "gtpo-llama-gsm8k-g12", 1).cost == pytest.approx(7473 * step / 3600)
    assert experiment(MATRIX, "paper", "sft-qwen-math", 1).cost == pytest.approx(7500 * 0.3 / 3600)


def test_shared_runs_appear_once_and_first_seeds_come_first() -> None:
    runs = experiments_of(MATRIX, ["fig1", "fig3"], "tiny")
    assert len({run.label for run in runs}) == len(runs) == 5 * 10
    seeds = [run.seed for run in runs]
    assert seeds == sorted(seeds)


def test_all_has_more_seeds_than_a_figure() -> None:
    def seeds(figures: list[str], *given: int) -> set[int]:
        return {run.seed for run in experiments_of(MATRIX, figures, "tiny", given)}

    assert seeds(ALL) == {*seeds_of_all(MATRIX, "tiny")} == {*range(1, 21)}
    assert seeds(ALL[:-1]) == {*range(1, 11)}
    assert seeds(ALL, 9) == seeds(["fig1"], 9) == {9}


def test_evaluations_match_evaluate_py(here: Path) -> None:
    """The flags are those of evaluate.py, and it writes the scores where the matrix expects them."""
    figures = ["fig2", "table1"]
    experiments = experiments_of(MATRIX, figures, "tiny", [1])
    for run in experiments:
        fake_run(run.run.path, saved=["adapter", "best"])
    evaluations = evaluations_of(MATRIX, figures, "tiny", experiments)
    assert len(evaluations) == 4
    for work in evaluations:
        flags, _ = parse_evaluation(EvaluationArguments, list(work.argv[1:]))
        given = MATRIX["tiny"]["evaluation"][work.benchmark] | {
            "benchmarks": [work.benchmark],
            "checkpoint": work.checkpoint,
        }
        assert vars(flags).items() >= given.items()
        assert ("base" in flags.runs) == (work.checkpoint == "last")
        for run in work.experiments:
            label = adapter_source(str(run.run.path), work.checkpoint).label
            assert work.result(run) == Path(flags.output_dir) / label / f"{work.benchmark}.json"
            assert str(run.run.path) in flags.runs


def test_the_model_of_a_run_of_either_scale() -> None:
    models = models_of_runs(MATRIX)
    assert models["gtpo-g8"] == "tiny" and models["sft-qwen-math"] == "qwen"
    assert models["gtpo-llama-gsm8k-g12"] == "llama"


def test_list_prints_the_state_of_each_run(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs = experiments_of(MATRIX, ["fig3"], "tiny", [1])
    finished, interrupted, running, started, absent = runs
    fake_run(finished.run.path, steps=[3], saved=["adapter"])
    checkpoint(interrupted.run.path, 150)
    started.run.path.mkdir()
    assert finished.remaining() == () and absent.remaining() == absent.argv
    assert interrupted.remaining() == (*interrupted.argv, "--resume", str(interrupted.run.path))
    assert started.remaining() == (*started.argv, "--overwrite", "true")
    running.log.parent.mkdir(parents=True)
    with held(running.log):
        assert sandbox.reproduce("fig3", "--seeds", "1", "--list") == 0
    printed = capsys.readouterr().out
    states = [line.split()[:2] for line in printed.splitlines()[:5]]
    of_runs = ("finished", "interrupted", "running", "missing", "missing")
    assert states == [[run.label, state] for run, state in zip(runs, of_runs, strict=True)]
    assert "5 runs: 1 finished, 1 running, 1 interrupted, 2 missing;\nabout 2 CPU minutes" in printed
    assert sandbox.calls() == []


@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_the_list_has_every_figure_and_evaluation(scale: str, here: Path) -> None:
    """Two figures that share runs, of which two are finished and scored on one benchmark of several."""
    figures = ["fig2", "table1"]
    experiments = experiments_of(MATRIX, figures, scale, [1, 2])
    evaluations = evaluations_of(MATRIX, figures, scale, experiments)
    done = {run.label for run in evaluations[1].experiments[:2]}
    for run in experiments:
        if run.label in done:
            fake_run(run.run.path, steps=[3], saved=["adapter", "best"])
    sampled = dict(zip(evaluations[1].flags[::2], evaluations[1].flags[1::2], strict=False))
    for run in evaluations[1].experiments[:2]:
        scores = evaluations[1].result(run)
        scores.parent.mkdir(parents=True)
        write_json(scores, {"settings": {flag[2:]: value for flag, value in sampled.items()}})
    lines = table(MATRIX, figures, scale, experiments, evaluations).splitlines()
    lines = lines[scale == "paper" :]
    assert [line.split()[0] for line in lines[: len(experiments)]] == [run.label for run in experiments]
    of_works = [line.split() for line in lines[len(experiments) :][: len(evaluations)]]
    numbers = [(label, int(scored), int(of), float(cost)) for label, scored, _, of, cost in of_works]
    assert numbers == [
        (work.label, 2 if work is evaluations[1] else 0, len(work.experiments), approx(work.cost, abs=0.06))
        for work in evaluations
    ]
    for figure in figures:
        runs = [run for run in experiments if run.name in runs_of(MATRIX, [figure], scale)]
        [line] = [line for line in lines if line.startswith(f"{figure} ")]
        left = sum(run.cost for run in runs if run.label not in done)
        found = re.fullmatch(rf"{figure} +(\d+) runs +([\d.]+), ([\d.]+) remaining", line)
        assert found and len(runs) > 2 and int(found[1]) == len(runs), line
        assert [float(found[2]), float(found[3])] == approx([sum(run.cost for run in runs), left], abs=0.06)
    assert f"{len(experiments)} runs: 2 finished, 0 running, 0 interrupted, {len(experiments) - 2} missing;" in lines


def test_evaluations_at_paper_scale_have_one_base_model() -> None:
    evaluations = evaluations_of(MATRIX, ALL, "paper", experiments_of(MATRIX, ALL, "paper"))
    keys = [(work.model, work.benchmark, work.checkpoint) for work in evaluations]
    benchmarks = ("gsm8k", "math", "aime24", "aime25", "amc23")
    kinds = (("qwen", "last"), ("llama", "last"), ("llama", "best"))
    assert sorted(keys) == sorted((model, benchmark, at) for benchmark in benchmarks for model, at in kinds)
    for work in evaluations:
        for run in work.experiments:
            assert run.model == work.model and work.model in run.name
            assert work.benchmark not in ("gsm8k", "math") or work.benchmark in run.name  # in distribution
            assert run.name.startswith("grpo-llama") == (work.checkpoint == "best")
    assert sum(len(work.experiments) for work in evaluations) == 84 * (1 + 3)  # each run: its own test set, and three


def test_an_evaluation_is_of_the_finished_runs_without_scores(here: Path) -> None:
    """Scores of other weights, or sampled otherwise, are replaced."""
    (work,) = evaluations_of(MATRIX, ["fig2"], "tiny", experiments_of(MATRIX, ["fig2"], "tiny", [1], ["gtpo-g"]))
    work = replace(work, flags=(*work.flags, "--temperature", "1.0"))
    first, second = work.experiments
    command = ("evaluate.py", *work.flags, "--runs", "base")
    paths = (str(first.run.path), str(second.run.path))
    assert work.remaining() == ()
    finish(first.run.adapter)
    assert work.remaining() == (*command, paths[0])
    finish(second.run.adapter)
    assert work.remaining() == (*command, *paths)
    scores = work.result(first)
    scores.parent.mkdir(parents=True)
    weights = {"adapter": fingerprint(first.run.adapter)}
    sampled = MATRIX["tiny"]["evaluation"][work.benchmark] | {"temperature": 1.0}
    for other in ({}, {"k": 99}, {"temperature": 0.3}):
        write_json(scores, {"model": "tiny", "adapter": str(first.run.adapter), "settings": weights | sampled | other})
        assert work.is_scored(first) == (not other)
    assert work.remaining() == (*command, *paths, "--overwrite", "true")
    write_json(scores, {"model": "tiny", "adapter": str(first.run.adapter), "settings": weights | sampled})
    assert work.remaining() == (*command, paths[1]) and not work.is_finished
    (first.run.adapter / "adapter_config.json").write_text('{"r": 4}')  # trained again since its scores
    assert not work.is_scored(first)


def test_a_run_with_other_settings_is_refused(sandbox: Any) -> None:
    """Otherwise it would be kept, or resumed. The matrix does not set gamma."""
    run = experiment(MATRIX, "tiny", "gtpo-g8", 1)
    run.run.check_settings(run.settings)  # not there yet
    resolved = {"gamma": 7.5} | {name_of(key): value for key, value in run.settings.items()}
    fake_run(run.run.path, resolved, saved=["adapter"])
    run.run.check_settings(run.settings)
    fake_run(run.run.path, resolved | {"num_generations": 99})
    with refused("gtpo-g8-s1 was made with .* 99, which is 8 now"):
        sandbox.reproduce("fig2", "--scale", "tiny", "--only", "gtpo-g8", "--seeds", "1")
