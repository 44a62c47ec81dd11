"""Jobs: which benchmarks, planned from the flags or found as stored completions."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gtpo.arguments import BENCHMARK_TITLES, PromptArguments, fields_of
from gtpo.cli.parse import parse_evaluation
from gtpo.data.load import Problem, load_benchmark
from gtpo.data.sources import ARITHMETIC_STEPS, BENCHMARKS
from gtpo.errors import UsageError
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.jobs import STORED_FLAGS, find_stored_jobs, load_problems, select_benchmarks
from gtpo.evaluation.plan import plan_evaluation
from gtpo.evaluation.records import Origin, Problems
from gtpo.evaluation.sampling import Sampling
from gtpo.evaluation.storage import problems_hash
from gtpo.prompts import SYSTEM_PROMPT

ROWS = load_benchmark("arithmetic")


def test_every_benchmark_has_a_title() -> None:
    assert tuple(BENCHMARK_TITLES) == (*BENCHMARKS, *ARITHMETIC_STEPS)


def select(*names: str, **flags: Any) -> dict[str, str]:
    return select_benchmarks(EvaluationArguments(list(names), **flags))


def test_benchmarks_are_selected_once_in_the_order_of_the_flag() -> None:
    assert list(select("math500", "gsm8k", "math500")) == ["math500", "gsm8k"]
    with pytest.raises(UsageError, match=r"unknown benchmark 'amc' \(did you mean 'amc23'\?\): pick from gsm8k, math"):
        select("gsm8k", "amc")
    with pytest.raises(UsageError, match="--benchmarks is missing: name one or more of gsm8k, math, math500"):
        select()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/my.test.csv", "my.test"),
        ("mine.PARQUET", "mine"),
        ("gsm8k.csv", "gsm8k.csv"),
        ("data/aime24.jsonl", "aime24.jsonl"),
        ("owner/aime26", "aime26"),
        ("openai/gsm8k", "openai-gsm8k"),
        ("gsm8k", "gsm8k"),
    ],
)
def test_the_name_of_your_benchmark_is_none_of_ours(source: str, name: str) -> None:
    assert select(source) == {name: source}
    assert select("gsm8k", source) == {"gsm8k": "gsm8k", name: source}


def test_two_benchmarks_of_one_name_and_columns_of_none_of_yours_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^a/mine\.csv and b/mine\.csv are both called mine in tables and files"):
        select("a/mine.csv", "b/mine.csv")
    for flag in ("prompt_column", "answer_column", "split", "dataset_config", "grader"):
        with pytest.raises(UsageError, match=rf"^--{flag} is for your own benchmarks, and --benchmarks has none"):
            select("gsm8k", **{flag: "task"})
        assert list(select("gsm8k", "mine.csv", **{flag: "task"})) == ["gsm8k", "mine"]


def test_your_problems_with_a_readable_gold_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = [{"role": "user", "content": "2 + 2?"}]
    path = tmp_path / "mine.jsonl"
    rows = [("1 + 1?", 2), (turns, "4"), ("3?", "$"), ("4?", ""), ("5?", "x" * 2000), ("6?", "6.0")]
    path.write_text("".join(json.dumps({"task": task, "gold": gold}) + "\n" for task, gold in rows))
    flags = EvaluationArguments([str(path)], prompt_column="task", answer_column="gold")
    found = load_problems("mine", str(path), flags)
    problems = found.rows
    assert found.dropped == {"with an empty answer": 1, "without a readable gold answer": 2}
    assert load_problems("mine", str(path), flags, limit=2) == Problems(problems[:2], found.dropped)
    assert problems == [
        Problem("mine/0", "1 + 1?", "2"),
        Problem("mine/1", turns, "4"),
        Problem("mine/2", "6?", "6.0"),
    ]
    reasons = (
        rf"1 with an empty answer \(first: line 4 of {path}\), 2 without a readable gold answer \(first: line 3 of"
    )
    assert re.search(rf"3 of 6 rows dropped: {reasons}", caplog.text)
    other = [replace(problems[0], gold="3"), *problems[1:]]
    assert problems_hash(problems) == problems_hash(other) != problems_hash(problems[:2])
    with pytest.raises(UsageError, match=r"has no column 'answer': it has 'task', 'gold'; .* --answer_column\.$"):
        load_problems("mine", str(path), EvaluationArguments([str(path)], prompt_column="task"))


THINK = PromptArguments(system_prompt="none", tags="<think> </think> <answer> </answer>")


def test_a_job_for_every_target_and_benchmark(
    outputs: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = EvaluationArguments(
        ["arithmetic", "arithmetic_hard"],
        runs=["outputs/older", "base"],
        **{"limit": 3, "k": 2, "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_new_tokens": 11, "batch_size": 5},
        checkpoint="best",
        output_dir=str(tmp_path),
    )
    prompts = [PromptArguments(), THINK]
    monkeypatch.setattr("gtpo.evaluation.plan.choose_prompts", lambda *_: prompts)
    plan = plan_evaluation(flags)
    jobs = plan.jobs
    assert plan.sampling == Sampling(k=2, temperature=0.5, top_p=0.9, seed=7, max_new_tokens=11, batch_size=5)
    base = f"base-{tiny.name}"
    assert [job.path.relative_to(tmp_path) for job in jobs] == [
        Path("older@best/arithmetic.jsonl"),
        Path("older@best/arithmetic_hard.jsonl"),
        Path(f"{base}/arithmetic.jsonl"),
        Path(f"{base}/arithmetic_hard.jsonl"),
    ]
    assert jobs[0].problems == Problems(ROWS[:3])
    best = Path("outputs/older/best")
    assert [job.adapter for job in jobs] == [best, best, None, None]
    assert jobs[1].title == "older@best, Arithmetic, 4 to 5 steps"
    settings = jobs[0].head.settings
    assert settings.pop("problems_hash") != jobs[1].head.settings["problems_hash"]
    assert settings.pop("model") == jobs[1].head.settings["model"] != str(tiny)  # a hash of the weights
    assert settings.pop("adapter") is not None
    assert settings == {  # written to every completion file: a new name here makes stored completions unusable
        "benchmark": "arithmetic",
        "problems": 3,
        "backend": "transformers",
        "k": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "max_new_tokens": 11,
        "batch_size": 5,
        "load_in_4bit": False,
        "tags": "<reasoning> </reasoning> <answer> </answer>",
        "system_prompt": SYSTEM_PROMPT,
        "chat_template": None,
        "chat_template_kwargs": None,
    }
    assert jobs[2].head.settings["tags"] == "<think> </think> <answer> </answer>"
    assert jobs[2].head.settings["system_prompt"] == "none" and jobs[2].prompt == THINK
    origin = jobs[0].head.origin
    assert replace(origin, environment={}, data={}) == Origin(str(tiny), str(best), "best")
    assert origin.environment["packages"]["transformers"]


def test_stored_jobs_are_those_of_the_benchmarks(
    store: Callable[..., Path], texts_by_hand: dict[str, list[str]], tmp_path: Path
) -> None:
    path = store(texts_by_hand)
    other = path.rename(path.with_name("gsm8k.jsonl"))
    store(texts_by_hand, "another")
    other.with_name("notes.jsonl").write_text("not completions\n")
    flags = EvaluationArguments(regrade=True, benchmarks=["arithmetic"], output_dir=str(tmp_path))
    [job] = find_stored_jobs(flags)
    assert job.path == tmp_path / "another" / "arithmetic.jsonl"
    assert job.problems == Problems(ROWS[:3])
    with pytest.raises(UsageError, match=r"no stored completions in .*: run an evaluation first"):
        find_stored_jobs(EvaluationArguments(regrade=True, output_dir=str(tmp_path / "elsewhere")))
    with pytest.raises(UsageError, match="unknown benchmark 'arithmetics'"):
        find_stored_jobs(EvaluationArguments(regrade=True, benchmarks=["arithmetics"], output_dir=str(tmp_path)))


def test_problems_that_have_changed_are_refused(
    store: Callable[..., Path], texts_by_hand: dict[str, list[str]], tmp_path: Path
) -> None:
    path = store(texts_by_hand)
    stored = json.loads(path.read_text().splitlines()[0])["settings"]["problems_hash"]
    path.write_text(path.read_text().replace(stored, ""))
    with pytest.raises(UsageError, match=r"was created from different problems than arithmetic has now: .* --data_dir"):
        find_stored_jobs(EvaluationArguments(regrade=True, output_dir=str(tmp_path)))


@pytest.mark.parametrize("name", STORED_FLAGS)
def test_regrade_refuses_what_is_stored(name: str) -> None:
    values = {"checkpoint": "last", "backend": "auto"}  # the defaults, but given
    values |= {"tags": "a b c d", "chat_template": "{{ 1 }}", "chat_template_kwargs": "{}"}
    flags, given = parse_evaluation(EvaluationArguments, ["--regrade", f"--{name}", values.get(name, "1")])
    with pytest.raises(UsageError, match=f"--regrade reads --{name} from the stored completions: remove it"):
        find_stored_jobs(flags, given)


def test_an_option_may_be_spelled_with_dashes() -> None:
    flags, given = parse_evaluation(EvaluationArguments, ["--regrade", "--max-new-tokens=1500"])
    with pytest.raises(UsageError, match="--regrade reads --max_new_tokens from the stored completions"):
        find_stored_jobs(flags, given)


def test_adapter_is_short_for_runs_and_the_help_has_every_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, given = parse_evaluation(EvaluationArguments, ["--adapter", "a", "b"])
    assert flags.runs == ["a", "b"] and given == {"runs"}
    settings = tmp_path / "settings.yaml"
    settings.write_text("adapter: [a]\n")
    assert parse_evaluation(EvaluationArguments, ["--config", str(settings)]) == (
        EvaluationArguments(runs=["a"]),
        {"config", "runs"},
    )
    with pytest.raises(SystemExit):
        parse_evaluation(EvaluationArguments, ["--help"])
    page = capsys.readouterr().out
    assert all(f"--{name} " in page for name in fields_of([EvaluationArguments]))


def test_every_benchmark_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    flags = EvaluationArguments(benchmarks=["aime24", "arithmetic", "amc23"], data_dir=str(tmp_path), model="tiny")
    with pytest.raises(UsageError, match=r"aime2024\.jsonl .* amc2023\.jsonl"):
        plan_evaluation(flags)
