"""Paired comparison: differences, intervals and counts by hand; which evaluations are compared."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.files import write_json, write_lines
from helpers.refusals import refused
from helpers.runs import fake_run
from pytest import LogCaptureFixture, approx, mark, raises

from gtpo.arguments import PromptArguments
from gtpo.errors import UsageError
from gtpo.evaluation.metrics import sizes_up_to
from gtpo.evaluation.paired import (
    Comparison,
    compare_sides,
    find_sides,
    format_comparisons,
    group_seeds,
)
from gtpo.evaluation.records import CompletionSettings, Entry, Origin, ProblemScores, Sampling, Scores
from gtpo.files import fingerprint
from paper.results import read_results


def entry(
    label: str,
    correct: list[str],
    benchmark: str = "amc23",
    majority: Sequence[str] = (),
    lenient: bool = True,
    **changed: Any,
) -> Entry:
    """The scores of each problem from its marks; majority as if every right answer were the same."""
    k = len(correct[0])
    problems = [
        ProblemScores(
            id=f"{benchmark}/{i}",
            gold="1",
            n=k,
            c=marks.count("1"),
            formatted=k,
            correct=marks,
            correct_lenient="1" * k if lenient else None,
            majority=majority[i] if majority else marks[0] * len(sizes_up_to(k)),
        )
        for i, marks in enumerate(correct)
    ]
    made = Entry(
        label=label,
        benchmark=benchmark,
        problems=len(problems),
        k=k,
        strict=Scores({}, {}),
        shares={},
        settings=CompletionSettings(problems_hash=f"of {len(correct)}"),
        origin=Origin("some/model"),
        per_problem=problems,
    )
    return replace(made, **changed)


def compared(*entries: Entry) -> dict[str, Comparison]:
    return {c.metric: c for c in compare_sides(group_seeds(entries))}


def test_a_comparison_by_hand() -> None:
    """Three problems, k = 4. pass@1 of a: 1/4, 1/2, 0; of b: 3/4, 1/4, 0."""
    found = compared(entry("a", ["1000", "0011", "0000"]), entry("b", ["0111", "0001", "0000"]))
    assert list(found) == ["pass@1", "pass@1, lenient", "pass@4", "maj@4"]
    first = found["pass@1"]
    assert first.differences.tolist() == [0.5, -0.25, 0.0]
    assert first.difference == approx(100 / 12)
    assert first.counts == (1, 1, 1)
    assert [side.item() for side in first.scores] == [25, approx(100 / 3)]
    assert first.interval == approx((-25, 50))  # the lowest and the highest of 27 resamples: each has 3.7 %
    assert found["pass@4"].differences.tolist() == [0, 0, 0]  # both solve the first two
    assert found["maj@4"].differences.tolist() == [-1, 0, 0]
    # equal on every problem of three is no certainty: 1 - 0.025^(1/3) of all problems may differ
    limit = 100 * (1 - 0.025 ** (1 / 3))
    assert found["pass@1, lenient"].interval == approx((-limit, limit))
    assert found["pass@1, lenient"].counts == (0, 0, 3)


def test_seeds_by_hand() -> None:
    """Two seeds against three, two problems, k = 2: pass@1 50 and 100; 0, 25 and 50 %."""
    first = [entry("a-s1", ["11", "00"]), entry("a-s2", ["11", "11"])]
    second = [entry(f"b-s{seed}", marks) for seed, marks in enumerate((["00", "00"], ["10", "00"], ["10", "01"]))]
    found = compared(*first, *second)["pass@1"]
    assert found.names == ("a", "b")
    assert [side.tolist() for side in found.scores] == [[50, 100], [0, 25, 50]]
    # standard deviation / sqrt(n): 50 / sqrt(2) / sqrt(2), and 25 / sqrt(3)
    assert found.errors == approx((25, 25 / math.sqrt(3), math.hypot(25, 25 / math.sqrt(3))))
    lines = format_comparisons([found]).splitlines()
    assert lines[:2] == [
        "b minus a, in points",
        "Interval over 2 problems, paired; ± standard error over 2 and 3 seeds",
    ]
    cells = ["AMC 2023, pass@1", "75.0 ± 25.0", "25.0 ± 14.4", "-50.0 ± 28.9", "-66.7 to -33.3"]
    assert lines[3].split() == " ".join(cells).split() and lines[-1].split()[-5:] == ["0", "/", "2", "/", "0"]


def test_one_seed_has_no_error() -> None:
    found = compared(entry("a\x1b[2J", ["10"]), entry("b", ["11"]))["pass@1"]
    assert all(map(math.isnan, found.errors))
    screen = format_comparisons([found])
    assert "±" not in screen and "\x1b" not in screen and r"a\x1b[2J" in screen


def test_the_first_side_is_the_one_compared_with() -> None:
    entries = [entry(name, ["10"]) for name in ("base", "a-s1", "a-s2", "b")]
    assert list(group_seeds(entries)) == ["base", "a", "b"]
    assert list(dict.fromkeys(c.names for c in compare_sides(group_seeds(entries)))) == [("base", "a"), ("base", "b")]
    assert list(group_seeds(entries[1:3])) == ["a-s1", "a-s2"]  # two seeds of one run
    best = [entry(name, ["10"]) for name in ("a-s1", "a-s1@best", "a-s2@best")]
    assert list(group_seeds(best)) == ["a", "a@best"]
    with raises(UsageError):
        group_seeds([entry("a", ["10"])])


def test_equal_means_are_ties() -> None:
    """The means of (0, 0, 0.3) and (0, 0.1, 0.2) differ in the last bit."""
    first, second = (
        [entry(f"{name}-s{seed}", ["1" * c + "0" * (10 - c)]) for seed, c in enumerate(counts)]
        for name, counts in (("a", (0, 0, 3)), ("b", (0, 1, 2)))
    )
    found = compared(*first, *second)["pass@1"]
    means = [side.mean() for side in found.values]
    assert means[0] != means[1] and found.counts == (0, 0, 1)


def test_the_majority_is_that_of_the_smaller_k() -> None:
    """maj@1, 2, 4 of a; maj@1, 2, 4, 8 of b."""
    a = entry("a", ["0000", "0000"], majority=["001", "000"])
    b = entry("b", ["0" * 8, "0" * 8], majority=["1101", "0010"])
    assert [side.tolist() for side in compared(a, b)["maj@4"].values] == [[[1, 0]], [[0, 1]]]


def test_incomparable_sides_are_refused() -> None:
    a = entry("a", ["10", "11"])
    b = entry("b", ["10", "11"])
    for other in (
        entry("b", ["10", "11"], "aime24"),
        entry("b", ["10"]),
        replace(b, settings=CompletionSettings(problems_hash="else")),
        replace(b, per_problem=b.per_problem[::-1]),  # in another order
    ):
        with raises(UsageError):
            compared(a, other)
    assert list(compared(a, entry("b", ["10", "11"], lenient=False))) == ["pass@1", "pass@2", "maj@2"]


def test_another_way_of_sampling_is_named(caplog: LogCaptureFixture) -> None:
    first = CompletionSettings(sampling=Sampling(2))
    second = CompletionSettings(
        sampling=Sampling(2, temperature=0.3), prompt=PromptArguments(chat_template_kwargs={"style": 1})
    )
    by_math_verify = {"grader": "math_verify"}
    compared(entry("a", ["10"], settings=first), entry("b", ["10"], settings=second, graded_by=by_math_verify))
    named = "temperature, --chat_template_kwargs, --grader"
    assert caplog.messages == [f"a and b were evaluated with different --{named}"]


def test_a_setting_of_one_seed_alone_is_named(caplog: LogCaptureFixture) -> None:
    """Of two seeds the second one was sampled otherwise, and graded otherwise."""
    settings = CompletionSettings(sampling=Sampling(2))
    colder = CompletionSettings(sampling=Sampling(2, temperature=0.3))
    seeds = [entry("a-s1", ["10"], settings=settings), entry("a-s2", ["10"], settings=colder)]
    compared(*seeds, entry("b", ["10"], settings=settings))
    compared(
        *[replace(seeds[0], label=f"a-s{n}", graded_by={"grading": f"{n}"}) for n in (1, 2)],
        entry("b", ["10"], settings=settings),
    )
    assert caplog.messages[0] == "a and b were evaluated with different --temperature"
    assert "a and b were graded with different files of gtpo/grading: evaluate.py --regrade" in caplog.messages


def test_each_other_side_has_a_table_of_its_own() -> None:
    """With the benchmarks that it shares with the first one, in the order of those."""
    sides = group_seeds(
        [
            entry("a", ["10", "00"]),
            entry("a", ["11"], "aime24"),
            entry("b", ["11"], "aime24"),
            entry("b", ["11", "00"]),
            entry("c", ["01", "11"]),
        ]
    )
    lines = format_comparisons(compare_sides(sides)).splitlines()
    found = [line for line in lines if line.endswith("in points") or (", pass@1 " in line and " / " not in line)]
    assert [" ".join(line.split()[:6]) for line in found] == [
        "b minus a, in points",
        "AMC 2023, pass@1 25.0 50.0 +25.0",
        "AIME 2024, pass@1 100.0 100.0 +0.0",
        "c minus a, in points",
        "AMC 2023, pass@1 25.0 75.0 +50.0",
    ]


GRADED = {"grader": "g.py:ok", "code": {"g.py:ok": "1", "h.py": "1"}, "grading": "1", "math-verify": "0.8"}


@mark.parametrize(
    ("first", "second", "named"),
    [
        (GRADED, {"timeouts": 3, "git_revision": "of another day"}, ""),
        (GRADED, {"code": {"g.py:ok": "1", "h.py": "2"}}, "files of --grader"),
        (GRADED, {"grading": "2", "math-verify": "0.9"}, "files of gtpo/grading, math-verify"),
        ({"git_revision": "a"}, {"git_revision": "b"}, "files of gtpo/grading"),  # of earlier revisions
        ({"git_revision": "a"}, {"grading": "1"}, "files of gtpo/grading"),
    ],
)
def test_a_grader_that_has_changed_is_named(first: dict, second: dict, named: str, caplog: LogCaptureFixture) -> None:
    """The second of three evaluations has another one."""
    entries = [entry(name, ["10"], graded_by=first | more) for name, more in (("a", {}), ("b", second), ("c", {}))]
    compared(*entries)
    expected = f"a and b were graded with different {named}: evaluate.py --regrade"
    assert caplog.messages == ([expected] if named else [])


ADAPTER = Origin("some/model", "outputs/some/adapter")


def test_one_run_of_a_side_is_said(tmp_path: Path) -> None:
    """Another seed may differ by more than the interval over problems; a base has no seeds."""
    base = entry("base", ["10"])
    a, *b = (entry(name, ["11"], origin=ADAPTER) for name in ("a", "b-s1", "b-s2"))
    full = entry("full", ["11"], origin=Origin(str(fake_run(tmp_path / "full", {"method": "grpo"}).path / "model")))
    said = []
    for entries in ([base, a], [a, *b], [base, *b], [b[0], b[1]], [base, full]):
        lines = format_comparisons(compare_sides(group_seeds(entries))).splitlines()
        said.append([line.partition(":")[0] for line in lines if "another seed may differ by more" in line])
    assert said == [["One run of a"], ["One run of a"], [], ["One run of b-s1 and of b-s2"], ["One run of full"]]


# Directories


def write(directory: Path, *entries: Entry) -> None:
    for stored in entries:
        path = directory / stored.label / f"{stored.benchmark}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, stored.write())
        path.with_suffix(".jsonl").touch()


def test_evaluations_output_directories_and_runs(here: Path) -> None:
    a = entry("a", ["10"])
    b = entry("sweep-b", ["11"])
    write(Path("outputs/evaluation"), a, b, entry("a", ["11"], "aime24"))
    names = [["outputs/evaluation/a", "outputs/evaluation/sweep-b"], ["outputs/a", "outputs/sweep/b"]]
    for directories in names:
        sides = find_sides(directories, "outputs/evaluation")
        assert list(sides) == ["a", "sweep-b"]
        assert [e.benchmark for e in sides["a"]] == ["aime24", "amc23"]
    assert [e.benchmark for e in find_sides(names[0], "outputs/evaluation", ["amc23"])["a"]] == ["amc23"]
    write_json(Path("outputs/evaluation/results.json"), {"results": [a.write(), b.write()]})
    assert list(find_sides(["outputs/evaluation"], "")) == ["a", "sweep-b"]
    # the same run, evaluated twice
    write(Path("greedy"), a)
    two = find_sides(["outputs/evaluation/a", "greedy/a"], "", ["amc23"])
    assert list(two) == ["a", "greedy/a/a"]
    with refused("--compare nothing has no scores"):
        find_sides(["nothing"], "outputs/evaluation")


def test_scores_of_a_retrained_adapter_are_named(here: Path, caplog: LogCaptureFixture) -> None:
    adapter = fake_run(here / "outputs" / "a", saved=["adapter"]).adapter
    origin = Origin("some/model", str(adapter))
    now = entry("b", ["11"], origin=origin, settings=CompletionSettings(adapter=fingerprint(adapter)))
    write(
        Path("evaluation"), entry("a", ["10"], origin=origin, settings=CompletionSettings(adapter="was another")), now
    )
    find_sides(["evaluation/a", "evaluation/b"], "")
    assert caplog.messages == ["a: the weights have changed since: evaluate it again"]


# ---- runs that were trained with other settings ----

TRAINED = {
    "model": "qwen",
    "learning_rate": 1e-6,
    "adam_beta1": 0.9,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "loss_type": "grpo",
    "limit": None,
}


def trained(directory: Path, name: str, **changed: Any) -> Entry:
    """The scores of a run with these settings."""
    run = fake_run(directory / name, TRAINED | changed, saved=["adapter"])
    return entry(name, ["10", "01"], origin=Origin("some/model", str(run.adapter)))


def test_a_difference_of_training_is_named(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    first = trained(tmp_path, "a")
    like = {"gamma": 0.1, "model": "Qwen/Qwen2.5-3B-Instruct"}
    like |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    compared(first, trained(tmp_path, "b", **like))
    assert caplog.messages == []
    other = {"adam_beta1": 0.999999, "learning_rate": 2e-5, "gradient_accumulation_steps": 4, "loss_type": "dapo"}
    compared(first, trained(tmp_path, "c", **other))
    (message,) = caplog.messages
    expected = "adam_beta1 (0.9, 0.999999), completions of a step (8, 16), learning_rate (1e-06, 2e-05), "
    assert message == f"a and c were also trained with different {expected}loss_type (grpo, dapo)"


# ---- seeds that are pooled, and how the sides were evaluated ----

# What the second of two runs has besides its seed -> how the message names it; empty: they are seeds of one.
APART = {"gamma": 0.1, "gradient_accumulation_steps": 4, "limit": 9, "model": "llama"}
NAMED = (
    "completions of a step (8, 16), limit (None, 9), method (grpo, gtpo), "
    "model (Qwen/Qwen2.5-3B-Instruct, meta-llama/Llama-3.1-8B-Instruct)"
)
ALIKE = {"output_dir": "elsewhere", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
ALIKE |= {"save_steps": 7, "report_to": "wandb", "logging_steps": 3, "eval_steps": 5, "gradient_checkpointing": True}


@mark.parametrize(("changed", "named"), [(APART, NAMED), (ALIKE, "")])
def test_runs_with_other_settings_are_not_pooled(
    changed: dict, named: str, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    """In tables of evaluate.py, and in figures, whose reader names them."""
    seeds = [trained(tmp_path, "lr-s1"), trained(tmp_path, "lr-s2", **changed)]
    sides = group_seeds([entry("base", ["10", "01"]), *seeds])
    assert list(sides) == (["base", "lr-s1", "lr-s2"] if named else ["base", "lr"])
    for seed in (1, 2):
        write_lines(tmp_path / f"lr-s{seed}" / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    read_results([tmp_path])
    texts = ("the runs of lr are not seeds of one, and stay apart:", "the runs of lr are not seeds of one:")
    assert caplog.messages == [f"{text} they differ in {named}" for text in texts if named]


def test_seeds_of_another_reward_are_not_pooled(tmp_path: Path) -> None:
    seeds = []
    for seed, code in ((1, "ab"), (2, "cd")):
        seeds.append(trained(tmp_path, f"a-s{seed}"))
        write_json(tmp_path / f"a-s{seed}" / "environment.json", {"made_from": {"rw.py:f": code}})
    assert list(group_seeds([entry("base", ["10"]), *seeds])) == ["base", "a-s1", "a-s2"]
