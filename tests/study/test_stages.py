"""The experiment on a GPU, in miniature: what it runs, stops, resumes and decides."""

import json
from typing import Any

import pytest
from fake_paper import finish

from gtpo.errors import UsageError
from paper.matrix import load_matrix
from paper.results import read_results
from study.stages import hours_of_stage, run_stage, runs_of_stage, verdict

MATRIX = load_matrix()


def test_the_runs_of_both_stages(sandbox: Any) -> None:
    first, second = (runs_of_stage(MATRIX, stage, "llama") for stage in (1, 2))
    assert [run.label for run in first] == [f"grpo-first-llama-adam0.9-s{seed}" for seed in (3407, 1, 2)]
    assert len(second) == 12 and {run.run.path for run in first} < {run.run.path for run in second}
    flags = dict(zip(first[0].argv[1::2], first[0].argv[2::2], strict=True))
    assert (flags["--max_steps"], flags["--warmup_steps"], flags["--G"], flags["--beta"]) == ("1000", "37", "8", "1e-6")
    assert (flags["--lr_scheduler_type"], flags["--adam_beta1"]) == ("constant_with_warmup", "0.9")
    gtpo = next(run for run in second if run.name == "gtpo-first-llama-adam0.999999")
    assert gtpo.argv[0] == "train_gtpo.py" and "--beta" not in gtpo.argv and "1500" in gtpo.argv
    small = runs_of_stage(MATRIX, 1, "llama-1b")[0]
    assert "meta-llama/Llama-3.2-1B-Instruct" in small.argv and small.run.path != first[0].run.path


def test_hours_by_hand() -> None:
    """A step: 430 tokens at 47 ms and 8 micro-batches of 0.8 s; 1,500 tokens after a collapse."""
    usual, longest = (tokens * 0.047 + 8 * 0.8 for tokens in (430, 1500))
    runs, *hours = hours_of_stage(MATRIX, 1)
    assert runs == 3 and hours == pytest.approx([3000 * s / 3600 for s in (usual / 2, usual, longest)])
    runs, *hours = hours_of_stage(MATRIX, 2)  # 12 runs of 1,500 steps without what stage 1 has
    assert runs == 9 and hours == pytest.approx([15000 * s / 3600 for s in (usual / 2, usual, longest)])


def test_list_prints_both_kinds_of_hours(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox.study("collapse", "--scale", "paper", "--stage", "1", "--list") == 0
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.split()[1:5] == ["missing", "7.4", "GPU", "hours,"] and " 21 if it collapses" in line
    assert sandbox.calls() == []


def test_stage_2_resumes_the_runs_of_stage_1_where_two_of_three_collapse(
    sandbox: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = runs_of_stage(MATRIX, 1, "llama")
    for run, collapses in zip(first, (True, False, False), strict=True):
        finish(run, 1000, collapses)
    with pytest.raises(UsageError, match="--stage 2"):
        run_stage(MATRIX, 2, "llama", None, None)
    assert sandbox.study("collapse", "--scale", "paper", "--stage", "1") == 0 and sandbox.calls() == []
    assert "1 of 3 seeds collapse" in capsys.readouterr().out
    finish(first[1], 1000, True)
    _, admitted = verdict(read_results([first[0].run.path.parent]), first)
    assert admitted and all(run.is_finished for run in first)
    second = runs_of_stage(MATRIX, 2, "llama")
    begun = [run for run in second if run.run.path in {run.run.path for run in first}]
    assert [run.remaining()[-2:] for run in begun] == [("--resume", str(run.run.path)) for run in begun]
    assert [run.cost for run in begun] == pytest.approx([500 * (430 * 0.047 + 6.4) / 3600] * 3)
    assert sandbox.study("collapse", "--scale", "paper", "--stage", "2", "--gpus", "0", "1") == 0
    given = {name: flags for _, name, flags in sandbox.calls()}
    assert len(given) == 12 and [given[run.label] for run in begun] == [["--resume"]] * 3
    assert {json.loads(line)[1] for line in (sandbox / "spans.jsonl").read_text().splitlines()} == {"0", "1"}
