"""The experiment matrix: the runs of each figure, their settings, commands, costs and states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.files import write_json
from helpers.refusals import refused
from helpers.runs import checkpoint, fake_run, finish, held
from helpers.settings import parsed
from paper_runs import FIGURES as PAPER_FIGURES

from gtpo.arguments import name_of
from gtpo.cli.parse import parse_evaluation
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.targets import adapter_target
from gtpo.files import CONFIGS, fingerprint
from paper.matrix import (
    evaluations_of,
    experiment,
    experiments_of,
    load_matrix,
    runs_of,
    seeds_of_all,
    select_figures,
)

MATRIX = load_matrix()
ALL = select_figures(MATRIX, ["all"], "tiny")
TINY_RUNS = runs_of(MATRIX, ALL, "tiny")


def test_paper_scale_shows_the_runs_of_the_paper() -> None:
    for title, runs in PAPER_FIGURES.items():
        name = title.lower().replace("fig. ", "fig").replace("table ", "table")
        assert set(runs_of(MATRIX, [name], "paper")) == runs, title


@pytest.mark.parametrize("name", TINY_RUNS)
def test_tiny_run_resolves(name: str) -> None:
    script, *flags = experiment(MATRIX, "tiny", name, 2).argv
    method = name.partition("-")[0]
    assert script == f"train_{method}.py"
    resolved = parsed(*flags, "--dry_run", "true", method=method).to_dict()
    settings = MATRIX["tiny"]["base"][method] | MATRIX["tiny"]["runs"][name]
    for key, value in settings.items():
        assert resolved[{"G": "num_generations"}.get(key, key)] == value, key
    assert (resolved["seed"], resolved["model"]) == (2, "gtpo/models/tiny_base/base-16f86973")
    assert resolved["output_dir"] == f"outputs/reproduce/tiny/{name}-s2"


@pytest.mark.parametrize("name", ["sft-qwen-math", "grpo-llama-gsm8k-g8-beta0.04", "gtpo-qwen-gsm8k-onlyneg0.7"])
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
    step = 900 * 0.030 + 8 * 0.3
    assert experiment(MATRIX, "paper", "grpo-qwen-math-g8-beta0", 1).cost == pytest.approx(7500 * step / 3600)
    assert experiment(MATRIX, "paper", "sft-qwen-math", 1).cost == pytest.approx(7500 * 0.3 / 3600)


def test_shared_runs_appear_once_and_first_seeds_come_first() -> None:
    runs = experiments_of(MATRIX, ["fig1", "fig3"], "tiny")
    labels = [run.label for run in runs]
    assert len(set(labels)) == len(labels) == 5 * 10
    seeds = [run.seed for run in runs]
    assert seeds == sorted(seeds)
    other = MATRIX | {"tiny": MATRIX["tiny"] | {"seeds_of": {"fig1": [101]}}}
    assert {run.seed for run in experiments_of(other, ["fig1", "fig6"], "tiny")} == {101, *range(1, 11)}
    assert {run.seed for run in experiments_of(MATRIX, ["fig1"], "tiny", [9])} == {9}


def test_all_has_more_seeds_than_a_figure() -> None:
    runs = experiments_of(MATRIX, ALL, "tiny")
    assert len(runs) == 34 * 20 and {run.seed for run in runs} == {*seeds_of_all(MATRIX, "tiny")} == {*range(1, 21)}
    assert {run.seed for run in experiments_of(MATRIX, ALL[:-1], "tiny")} == {*range(1, 11)}
    assert {run.seed for run in experiments_of(MATRIX, ALL, "tiny", [9])} == {9}
    assert seeds_of_all(MATRIX, "paper") == [3407]


@pytest.mark.slow
def test_evaluations_match_evaluate_py(sandbox: Any) -> None:
    """The flags are those of evaluate.py, and it writes the scores where the matrix expects them."""
    assert sandbox.reproduce("fig2", "--seeds", "1") == 0
    figures = ["fig2", "table1"]
    evaluations = evaluations_of(MATRIX, figures, "tiny", experiments_of(MATRIX, figures, "tiny", [1]))
    assert len(evaluations) == 4
    for evaluation in evaluations:
        flags, _ = parse_evaluation(EvaluationArguments, list(evaluation.argv[1:]))
        assert flags.benchmarks == [evaluation.benchmark] and flags.checkpoint == evaluation.checkpoint
        sampling = {"k": flags.k, "limit": flags.limit, "max_new_tokens": flags.max_new_tokens}
        assert sampling == MATRIX["tiny"]["evaluation"][evaluation.benchmark]
        assert ("base" in flags.runs) == (flags.checkpoint == "last")
        labels = [adapter_target(run, flags.checkpoint).label for run in flags.runs if run != "base"]
        assert [evaluation.result(run) for run in evaluation.experiments] == [
            Path(flags.output_dir) / label / f"{evaluation.benchmark}.json" for label in labels
        ]


def test_list_prints_the_state_of_each_run(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {run.name: run for run in experiments_of(MATRIX, ["fig3"], "tiny", [1])}
    finished = runs["gtpo-late-g8"].run.adapter
    finish(finished)
    checkpoint(runs["gtpo-late-g8"].run.path, 3)
    checkpoint(runs["grpo-late-g8-beta0"].run.path, 150)
    assert runs["gtpo-late-g8"].remaining() == ()
    interrupted = runs["grpo-late-g8-beta0"]
    assert interrupted.remaining() == (*interrupted.argv, "--resume", str(interrupted.run.path))
    started = runs["gtpo-late-correction-only"]
    assert started.remaining() == started.argv
    started.run.path.mkdir()
    assert started.remaining() == (*started.argv, "--overwrite", "true")
    running = runs["grpo-late-g8-beta1e-6"].log
    running.parent.mkdir(parents=True)
    with held(running):
        assert sandbox.reproduce("fig3", "--seeds", "1", "--list") == 0
    printed = capsys.readouterr().out
    lines = printed.partition("\n\n")[0].splitlines()
    total = " ".join(printed.splitlines()[-3:])
    assert {tuple(line.split()[:2]) for line in lines} == {
        ("gtpo-late-g8-s1", "finished"),
        ("grpo-late-g8-beta0-s1", "interrupted"),
        ("grpo-late-g8-beta1e-6-s1", "running"),
        ("grpo-late-g8-beta0.04-s1", "missing"),
        ("gtpo-late-correction-only-s1", "missing"),
    }
    assert total.startswith("5 runs: 1 finished, 1 running, 1 interrupted, 2 missing; about 2 CPU minutes")
    assert sandbox.calls() == []


def test_evaluations_at_paper_scale_have_one_base_model(sandbox: Any) -> None:
    experiments = experiments_of(MATRIX, ALL, "paper")
    evaluations = evaluations_of(MATRIX, ALL, "paper", experiments)
    keys = {(work.model, work.benchmark, work.checkpoint) for work in evaluations}
    benchmarks = ("gsm8k", "math", "aime24", "aime25", "amc23")
    expected = {("qwen", benchmark, "last") for benchmark in benchmarks}
    expected |= {("llama", benchmark, checkpoint) for benchmark in benchmarks for checkpoint in ("best", "last")}
    assert keys == expected and len(evaluations) == len(keys)
    for work in evaluations:
        assert {run.model for run in work.experiments} == {work.model}
        assert all(work.model in run.name for run in work.experiments)
        if work.benchmark in ("gsm8k", "math"):  # in distribution
            assert all(work.benchmark in run.name for run in work.experiments)
        best = {run.name.startswith("grpo-llama") for run in work.experiments}
        assert best == {work.checkpoint == "best"}
    assert sum(len(work.experiments) for work in evaluations) == 84 * (1 + 3)  # each run: its own test set, and three


def test_an_evaluation_is_of_the_finished_runs_without_scores(sandbox: Any) -> None:
    (work,) = evaluations_of(MATRIX, ["fig2"], "tiny", experiments_of(MATRIX, ["fig2"], "tiny", [1], ["gtpo-g"]))
    assert [run.name for run in work.experiments] == ["gtpo-g8", "gtpo-g12"] and work.remaining() == ()
    for run in work.experiments:
        finish(run.run.adapter)
        assert work.remaining()[-1] == str(run.run.path) and len(work.remaining()) == len(work.argv) - (
            run.name == "gtpo-g8"
        )
    scores = work.result(work.experiments[0])
    scores.parent.mkdir(parents=True)
    scores.write_text("{}")
    assert work.remaining()[-3:] == ("--runs", "base", str(work.experiments[1].run.path)) and not work.is_finished
    # trained again since its scores
    first = work.experiments[0].run.adapter
    entry = {"adapter": str(first), "settings": {"adapter": fingerprint(first)}}
    write_json(scores, entry)
    assert work.is_scored(work.experiments[0])
    (first / "adapter_config.json").write_text('{"r": 4}')
    again = (*work.argv, "--overwrite", "true")
    assert not work.is_scored(work.experiments[0]) and work.remaining() == again
    shard = replace(work, flags=(*work.flags, "--shard", "1/2"))
    assert shard.remaining() == ()  # the evaluation itself replaces them


# A setting of the matrix as it was when the run was made; None: as it is.
EDITED: list[tuple[str, Any]] = [
    ("max_steps", 3),
    ("learning_rate", 1.0),
    ("num_generations", 99),  # G in the matrix
    ("lr_scheduler_type", "linear"),
    ("model", "smol"),
    ("gamma", None),  # not a setting of the matrix
]


@pytest.mark.parametrize(("name", "before"), EDITED)
def test_a_run_with_other_settings_is_refused(name: str, before: Any, sandbox: Any) -> None:
    """It would be kept, or resumed, with its own settings."""
    run = experiment(MATRIX, "tiny", "gtpo-g8", 1)
    run.run.check_settings(run.settings)  # not there yet
    resolved = {"gamma": 7.5} | {name_of(key): value for key, value in run.settings.items()}
    fake_run(run.run.path, resolved, saved=["adapter"])
    run.run.check_settings(run.settings)
    if before is None:
        return
    assert resolved[name] != before
    fake_run(run.run.path, resolved | {name: before})
    with refused(f"gtpo-g8-s1 was made with .* {before}, which is {resolved[name]} now"):
        run.run.check_settings(run.settings)
    with refused("was made with"):
        sandbox.reproduce("fig2", "--scale", "tiny", "--only", "gtpo-g8", "--seeds", "1")


@pytest.mark.parametrize(("flag", "value"), [("k", 99), ("max_new_tokens", 5), ("temperature", 0.3)])
def test_scores_that_were_sampled_otherwise_are_replaced(flag: str, value: Any, sandbox: Any) -> None:
    (work,) = evaluations_of(MATRIX, ["fig2"], "tiny", experiments_of(MATRIX, ["fig2"], "tiny", [1], ["gtpo-g8"]))
    work = replace(work, flags=(*work.flags, "--temperature", "1.0"))
    sampled = {"k": 16, "max_new_tokens": 256, "temperature": 1.0}
    for name in ("k", "max_new_tokens"):
        sampled[name] = MATRIX["tiny"]["evaluation"][work.benchmark][name]
    (run,) = work.experiments
    finish(run.run.adapter)
    scores = work.result(run)
    scores.parent.mkdir(parents=True)
    write_json(scores, {"adapter": None, "settings": sampled})
    assert work.is_finished
    write_json(scores, {"adapter": None, "settings": sampled | {flag: value}})
    assert not work.is_finished and work.remaining() == (*work.argv, "--overwrite", "true")
