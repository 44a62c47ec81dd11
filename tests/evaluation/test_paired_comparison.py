"""Paired comparison: differences, intervals and counts by hand and by brute force; which evaluations are compared."""

import itertools
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evaluate
import figures
from gtpo.errors import UsageError
from gtpo.evaluation.compare import (
    Comparison,
    compare_sides,
    draw_comparisons,
    find_sides,
    format_comparisons,
    group_seeds,
)
from gtpo.evaluation.metrics import pass_at_k, sizes_up_to
from gtpo.evaluation.records import Entry, Origin, ProblemScores


def entry(label: str, correct: list[str], benchmark: str = "amc23", **changed: Any) -> Entry:
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
            correct_lenient="1" * k,
            majority="".join(marks[0] for _ in sizes_up_to(k)),
        )
        for i, marks in enumerate(correct)
    ]
    values: dict[str, Any] = {
        "label": label,
        "benchmark": benchmark,
        "problems": len(problems),
        "k": k,
        "scores": {},
        "intervals": {},
        "settings": {"problems_hash": f"of {len(correct)}"},
        "origin": Origin("some/model"),
        "per_problem": problems,
    }
    return Entry(**values | changed)


def compared(*entries: Entry) -> dict[str, Comparison]:
    return {c.metric: c for c in compare_sides(group_seeds(entries))}


def test_a_comparison_by_hand() -> None:
    """Three problems, k = 4. pass@1 of a: 1/4, 1/2, 0; of b: 3/4, 1/4, 0."""
    found = compared(entry("a", ["1000", "0011", "0000"]), entry("b", ["0111", "0001", "0000"]))
    assert list(found) == ["pass@1", "pass@1, lenient", "pass@4", "maj@4"]
    first = found["pass@1"]
    assert first.names == ("a", "b")
    assert first.differences == [0.5, -0.25, 0.0]
    assert first.difference == pytest.approx(100 / 12)
    assert first.counts == (1, 1, 1)
    assert first.scores == ([25.0], [pytest.approx(100 / 3)])
    # the means of all 27 resamples of (1/2, -1/4, 0), each equally likely
    means = [sum(chosen) / 3 for chosen in itertools.product(first.differences, repeat=3)]
    expected = 100 * np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert first.interval == pytest.approx(tuple(expected), abs=1e-9)
    assert found["pass@4"].differences == [0, 0, 0]  # both solve the first two
    assert found["maj@4"].differences == [-1, 0, 0]
    # equal on every problem of three is no certainty: 1 - 0.025^(1/3) of all problems may differ
    limit = 100 * (1 - 0.025 ** (1 / 3))
    assert found["pass@1, lenient"].interval == pytest.approx((-limit, limit))
    assert found["pass@1, lenient"].counts == (0, 0, 3)


def test_seeds_by_hand() -> None:
    """Two seeds against three, two problems, k = 2: pass@1 50 and 100; 0, 25 and 50 %."""
    first = [entry("a-s1", ["11", "00"]), entry("a-s2", ["11", "11"])]
    second = [entry(f"b-s{seed}", marks) for seed, marks in enumerate((["00", "00"], ["10", "00"], ["10", "01"]))]
    found = compared(*first, *second)["pass@1"]
    assert found.names == ("a", "b")
    assert found.scores == ([50, 100], [0, 25, 50])
    assert found.per_problem == ([1, 0.5], [pytest.approx(1 / 3), pytest.approx(1 / 6)])
    assert found.difference == pytest.approx(-50)
    # standard deviation / sqrt(n): 50 / sqrt(2) / sqrt(2), and 25 / sqrt(3)
    assert found.errors == pytest.approx((25, 25 / math.sqrt(3), math.hypot(25, 25 / math.sqrt(3))))
    screen = format_comparisons([found])
    title, _, header, _, row, _ = screen.splitlines()
    assert title == "b minus a, in points; interval over 2 problems, paired; ± standard error over 2 and 3 seeds"
    assert header.split("  ")[0] == "Benchmark"
    assert [cell.strip() for cell in row.split("  ") if cell] == [
        *("AMC 2023", "pass@1", "75.0 ± 25.0", "25.0 ± 14.4", "-50.0 ± 28.9", "-66.7 to -33.3", "0 / 2 / 0")
    ]


def test_names_are_printed_without_control_characters() -> None:
    screen = format_comparisons(list(compared(entry("a\x1b[2J", ["10"]), entry("b", ["11"])).values()))
    assert "\x1b" not in screen
    assert screen.startswith(r"b minus a\x1b[2J, in points")


def test_one_seed_has_no_error() -> None:
    found = compared(entry("a", ["10"]), entry("b", ["11"]))["pass@1"]
    assert found.errors == (None, None, None)
    assert "±" not in format_comparisons([found])


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), min_size=1, max_size=6), st.randoms())
def test_any_comparison_matches_the_scores_of_each_side(counts: list[tuple[int, int]], rng: random.Random) -> None:
    """k = 4 beside k = 8: the difference is that of the two mean scores, and swapping the sides changes its sign."""
    a, b = (
        entry(name, ["".join(rng.sample("1" * pair[side] + "0" * (k - pair[side]), k)) for pair in counts])
        for side, (name, k) in enumerate((("a", 4), ("b", 8)))
    )
    forward, backward = compared(a, b), compared(b, a)
    for metric, k in (("pass@1", 1), ("pass@4", 4)):
        c = forward[metric]
        expected = sum(pass_at_k(8, y, k) - pass_at_k(4, x, k) for x, y in counts) / len(counts)
        assert c.difference == pytest.approx(100 * expected)
        assert c.difference == pytest.approx(c.scores[1][0] - c.scores[0][0])
        assert sum(c.counts) == len(counts)
        assert c.counts == (backward[metric].counts[1], backward[metric].counts[0], c.counts[2])
        low, high = c.interval
        assert -100 <= low <= c.difference + 1e-9 and c.difference - 1e-9 <= high <= 100
    assert forward["maj@4"].scores[1][0] == pytest.approx(
        100 * sum(problem.correct[0] == "1" for problem in b.per_problem) / len(counts)
    )


def test_pairing_narrows_the_interval() -> None:
    """Problems that are all hard or all easy: each score alone is uncertain, the difference is not."""
    marks = ["0000"] * 20 + ["1110"] * 20
    c = compared(entry("a", marks), entry("b", ["0001"] * 20 + ["1111"] * 20))["pass@1"]
    assert c.differences == [0.25] * 40
    low, high = c.interval
    assert (low, high) == pytest.approx((25 - 125 * 0.0881, 25 + 75 * 0.0881), abs=0.1)  # 1 - 0.025^(1/40)


def test_the_first_side_is_the_one_compared_with() -> None:
    entries = [entry(name, ["10"]) for name in ("base", "a-s1", "a-s2", "b")]
    assert list(group_seeds(entries)) == ["base", "a", "b"]
    assert list(dict.fromkeys(c.names for c in compare_sides(group_seeds(entries)))) == [("base", "a"), ("base", "b")]
    assert list(group_seeds(entries[1:3])) == ["a-s1", "a-s2"]  # two seeds of one run
    best = [entry(name, ["10"]) for name in ("a-s1", "a-s1@best", "a-s2@best")]
    assert list(group_seeds(best)) == ["a", "a@best"]
    with pytest.raises(UsageError, match="needs the scores of two models, found a: name two evaluations"):
        group_seeds([entry("a", ["10"])])


def with_problems(entry: Entry, *changes: dict[str, Any]) -> Entry:
    changed = [replace(problem, **change) for problem, change in zip(entry.per_problem, changes, strict=True)]
    return replace(entry, per_problem=changed)


def test_the_majority_is_that_of_the_smaller_k() -> None:
    """maj@1, 2, 4 of a; maj@1, 2, 4, 8 of b, of which the third counts."""
    a = with_problems(entry("a", ["0000", "0000"]), {"majority": "001"}, {"majority": "000"})
    b = with_problems(entry("b", ["0" * 8, "0" * 8]), {"majority": "1101"}, {"majority": "0010"})
    found = compared(a, b)["maj@4"]
    assert found.per_problem == ([1, 0], [0, 1])


def test_problems_in_another_order_are_not_paired() -> None:
    a, b = entry("a", ["10", "11"]), entry("b", ["10", "11"])
    with pytest.raises(UsageError, match="have different problems"):
        compared(a, replace(b, per_problem=b.per_problem[::-1]))


def test_equal_means_of_other_sums_are_ties() -> None:
    """The means of (0, 0, 0.3) and (0, 0.1, 0.2) differ in the last bit."""
    a = [entry(f"a-s{seed}", ["1" * c + "0" * (10 - c)]) for seed, c in enumerate((0, 0, 3))]
    b = [entry(f"b-s{seed}", ["1" * c + "0" * (10 - c)]) for seed, c in enumerate((0, 1, 2))]
    found = compared(*a, *b)["pass@1"]
    assert found.per_problem[0] != found.per_problem[1]
    assert found.counts == (0, 0, 1)


def test_a_users_grader_gives_no_lenient_comparison() -> None:
    graded = with_problems(entry("graded", ["10"]), {"correct_lenient": None})
    assert list(compared(graded, entry("other", ["10"]))) == ["pass@1", "pass@2", "maj@2"]


def test_what_cannot_be_compared_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    a = entry("a", ["10"])
    with pytest.raises(UsageError, match="a and b have no benchmark in common"):
        compared(a, entry("b", ["10"], "aime24"))
    with pytest.raises(UsageError, match="different problems"):
        compared(a, entry("b", ["10", "11"]))
    with pytest.raises(UsageError, match="different problems"):
        compared(a, entry("b", ["10"], settings={"problems_hash": "else"}))
    compared(a, entry("b", ["10"], settings=a.settings | {"temperature": 0.5}))
    assert "a and b were evaluated with different --temperature" in caplog.text


# Directories


def write(directory: Path, *entries: Entry) -> None:
    for stored in entries:
        path = directory / stored.label / f"{stored.benchmark}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stored.write()))
        path.with_suffix(".jsonl").touch()


def test_evaluations_output_directories_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = entry("a", ["10"]), entry("sweep-b", ["11"])
    write(Path("outputs/evaluation"), a, b, entry("a", ["11"], "aime24"))
    names = [["outputs/evaluation/a", "outputs/evaluation/sweep-b"], ["outputs/a", "outputs/sweep/b"]]
    for directories in names:
        sides = find_sides(directories, "outputs/evaluation")
        assert list(sides) == ["a", "sweep-b"]
        assert [e.benchmark for e in sides["a"]] == ["aime24", "amc23"]
    assert [e.benchmark for e in find_sides(names[0], "outputs/evaluation", ["amc23"])["a"]] == ["amc23"]
    Path("outputs/evaluation/results.json").write_text(json.dumps({"results": [a.write(), b.write()]}))
    assert list(find_sides(["outputs/evaluation"], "")) == ["a", "sweep-b"]
    # the same run, evaluated twice
    write(Path("greedy"), a)
    two = find_sides(["outputs/evaluation/a", "greedy/a"], "", ["amc23"])
    assert list(two) == ["outputs/evaluation/a/a", "greedy/a/a"]
    with pytest.raises(UsageError, match=r"^--compare nothing has no scores, and outputs/evaluation has none of it"):
        find_sides(["nothing"], "outputs/evaluation")
    Path("greedy/a/amc23.json").write_text('{"label": "a"}')
    with pytest.raises(
        UsageError,
        match=r"greedy/a/amc23.json is damaged \('per_problem'\): delete it; `evaluate.py --regrade",
    ):
        find_sides(["greedy/a"], "")


def test_the_scripts_print_and_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("outputs/evaluation"), entry("a", ["10", "00"]), entry("b", ["11", "00"]))
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--compare", "outputs/a", "outputs/b"])
    evaluate.main()
    screen = capsys.readouterr().out.splitlines()
    assert screen[0] == "b minus a, in points; interval over 2 problems, paired"
    assert " ".join(screen[4].split()) == "AMC 2023 pass@1 25.0 50.0 +25.0 +0.0 to +50.0 1 / 0 / 1"
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--compare", "outputs/a", "outputs/b", "--benchmarks", "aime24"])
    with pytest.raises(UsageError, match="found none: name two evaluations"):
        evaluate.main()
    monkeypatch.setattr(sys, "argv", ["figures.py", "--compare", "outputs/a", "outputs/b"])
    figures.main()
    assert capsys.readouterr().out.splitlines() == ["compare.png", "compare.pdf"]
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG") and Path("compare.pdf").is_file()


def test_the_figure_shows_every_difference_its_interval_and_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    comparisons = compare_sides(
        group_seeds(
            [entry(f"{name}$-s{seed}", [*marks, f"0{seed}"]) for name, marks in SEEDS.items() for seed in (0, 1)]
        )
    )
    draw_comparisons(comparisons, str(tmp_path / "c.png"))
    [axis] = drawn[0].axes
    shown = comparisons[::-1]
    assert [text.get_text() for text in axis.get_yticklabels()] == [f"AMC 2023, {c.metric}" for c in shown]
    assert axis.lines[0].get_xdata() == pytest.approx([c.difference for c in shown])
    intervals, errors = (np.array(lines.get_segments())[:, :, 0] for lines in axis.collections)
    assert intervals == pytest.approx(np.array([c.interval for c in shown]))
    widths = [c.errors[2] for c in shown]
    assert errors[:, 1] - errors[:, 0] == pytest.approx(2 * np.array(widths, dtype=float)) and any(widths)
    assert axis.get_title() == r"b\$" + "\n" + r"minus a\$"
    assert axis.get_xlabel().endswith("\nbar: standard error over seeds")
    monkeypatch.setattr(type(comparisons[0]), "errors", (None, None, None))  # of one seed
    draw_comparisons(comparisons, str(tmp_path / "c.png"))
    assert drawn[-1].axes[0].get_xlabel() == "points; line: 95 % interval over problems"


SEEDS = {"a": ["10", "11", "00", "00"], "b": ["11", "10", "00", "00"]}
