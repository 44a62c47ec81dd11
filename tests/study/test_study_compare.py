"""``python -m study compare``: what it runs, skips and refuses, and what its page says, by hand."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.results import results_of
from helpers.scripts import ROOT

from study import rendering
from study.bench import Comparison, known_comparison, numbers_of, read_experiments, settings_of
from study.compare import (
    Found,
    plan_state,
    plan_text,
    primary_rows,
    refuse_dirty,
    state_line,
    table_of,
    works_of,
    write_page,
)
from study.storage import condense

TABLES = tables_of(__file__)

TWO = {"arms": ["grpo", "gtpo"], "steps": 8, "problems": 4}


def compared(**changes: Any) -> Comparison:
    return Comparison("", TWO | {"seeds": [1, 2, 3]} | changes)


def found_in(comparison: Comparison, metrics: dict[str, Any], number: int = 0, **origins: Any) -> Found:
    base = comparison.bases[number]
    rates = {arm.name: comparison.rates[0] for arm in comparison.arms}
    return Found(base, results_of(metrics), origins, rates)


def run(value: float, formatting: float = 90.0, steps: int = 8) -> list[dict[str, Any]]:
    return [{"step": step, "accuracy": value, "formatting": formatting, "entropy": 0.4} for step in range(1, steps + 1)]


# What is run


def test_seeds_and_settings_of_a_command_line() -> None:
    assert numbers_of(["21", "22"]) == [21, 22] and numbers_of(["501-504", 7]) == [501, 502, 503, 504, 7]
    assert settings_of(["gamma=0.0", "reward=format mine.py:f"]) == {"gamma": "0.0", "reward": ["format", "mine.py:f"]}


def test_the_command_of_a_run() -> None:
    """A setting of GTPO reaches the arms that have it; an arm of a user's is train_grpo.py with --objective."""
    comparison = compared(
        arms=["grpo", "dr_grpo", "correction", "mine.py:Mine"],
        set={"gamma": "0.2", "temperature": "0.9", "reward": ["format"]},
        betas=[0.5, 0.6],
    )
    base = comparison.bases[0]
    words = {}
    for arm in comparison.arms:
        argv = comparison.run(base, arm, "1e-3", 3).argv
        assert argv[:3] == ("-m", "study.train", f"train_{arm.method}.py")
        words[arm.name] = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert [of["--temperature"] for of in words.values()] == ["0.9"] * 4
    assert [of.get("--gamma") for of in words.values()] == [None, None, "0.2", None]
    assert words["dr_grpo"]["--loss_type"] == "dr_grpo" and words["mine-Mine"]["--objective"] == "mine.py:Mine"
    found = words["mine-Mine"]
    assert (found["--learning_rate"], found["--max_steps"], found["--seed"]) == ("1e-3", "8", "3")
    assert (found["--adam_beta1"], found["--adam_beta2"], found["--reward"]) == ("0.5", "0.6", "format")
    assert found["--output_dir"] == "outputs/study/compare/wrong-mode/mine-Mine-1e-3-s3"


def test_a_setting_reaches_the_arms_that_have_it(here: Path) -> None:
    """A key of a user's Settings, of GTPO's, or of every arm under its short name; one of no arm is refused."""
    settings = "@dataclass\nclass Own:\n    power: float = 0.5\n\n"
    classes = "class Mine:\n    Settings = Own\n\nclass Plain:\n    Settings = object\n"
    Path("mine.py").write_text("from dataclasses import dataclass\n\n" + settings + classes)
    arms = ["grpo", "gtpo", "mine.py:Mine", "mine.py:Plain"]
    given = {"power": "0.25", "gamma": "0.2", "G": "4"}
    assert compared(arms=arms, set=given).settings_of == {
        "grpo": {"G": "4"},
        "gtpo": {"G": "4", "gamma": "0.2"},
        "mine-Mine": {"G": "4", "power": "0.25"},
        "mine-Plain": {"G": "4"},
    }
    for absent, message in (("power", "."), ("temprature", " .did you mean 'temperature'")):
        with refused(f"--set {absent}: no arm has this setting{message}"):
            compared(arms=["grpo", "gtpo", "mine.py:Plain"], set={absent: "1"})


def test_all_arms_of_a_seed_come_before_the_next_seed() -> None:
    runs, evaluations, stored = works_of(compared(base=["wrong-mode", "first"]), [1, 2])
    assert [run.seed for run in runs] == [1] * 4 + [2] * 4 and stored == 0
    assert [(work.benchmark, len(work.experiments)) for work in evaluations[:2]] == [
        ("arithmetic", 4),
        ("arithmetic_greedy", 4),
    ]


def test_a_seed_that_is_stored_is_left_out_unless_a_directory_is_named(here: Path) -> None:
    """Of seeds 1 to 3 the second lacks an arm, and the third is here too, perhaps without its scores."""
    runs = {"grpo-0.3e-3": {seed: run(1) for seed in (1, 2, 3)}, "gtpo-0.3e-3": {seed: run(1) for seed in (1, 3)}}
    condense(results_of(runs), Path("results/mine/wrong-mode"), ["accuracy"])
    Path("outputs/study/mine/wrong-mode/gtpo-0.3e-3-s3").mkdir(parents=True)
    works = works_of(Comparison("mine", TWO), [1, 2, 3])
    assert [run.label for run in works.runs] == [f"{arm}-0.3e-3-s{seed}" for seed in (2, 3) for arm in ("grpo", "gtpo")]
    assert {run.seed for run in works.evaluations[0].experiments} == {2, 3} and works.stored == 2
    line = state_line(Comparison("mine", TWO), [1, 2, 3])
    assert line.startswith("6 runs of 8 steps, 2 of them finished (2 stored in results/mine); about 0.0 hours")
    assert len(works_of(Comparison("mine", TWO, Path("again")), [1, 2, 3]).runs) == 6


def test_each_arm_gets_its_best_rate_by_the_same_rule() -> None:
    comparison = compared(rates=["1e-3", "2e-3"], rate_seeds=["7-8"])
    values = {"grpo-1e-3": 50, "grpo-2e-3": 40, "gtpo-1e-3": 30, "gtpo-2e-3": 60}
    metrics = {name: {seed: run(value) for seed in (7, 8)} for name, value in values.items()}
    assert comparison.chosen_rates(results_of(metrics)) == {"grpo": "1e-3", "gtpo": "2e-3"}
    del metrics["gtpo-1e-3"][8]
    assert comparison.chosen_rates(results_of(metrics)) == {"grpo": "1e-3"}
    works = works_of(comparison, comparison.seeds)
    assert len(works.runs) == 8  # two arms, two rates, two seeds: nothing is chosen yet
    with refused("--rate_seeds are among --seeds"):
        compared(rates=["1e-3", "2e-3"], rate_seeds=[3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ["grpo", "gtppo"]}, "arm 'gtppo' is unknown .did you mean 'gtpo'"),
        ({"base": ["wrongmode"]}, "base 'wrongmode' is unknown .did you mean 'wrong-mode'"),
    ],
)
def test_unknown_names(changes: dict[str, Any], message: str) -> None:
    with refused(message):
        compared(**changes)


# What was found


def test_a_difference_by_hand() -> None:
    """1, 2 and 3 points (t = 4.303); a pair of two origins is left out; one run of GRPO ends 20 points lower."""
    comparison = compared(seeds=["1-4"], primary=[{"measure": "accuracy late"}], measures=[])
    falling = run(60.0)[:4] + [row | {"step": row["step"] + 4} for row in run(40.0)[:4]]
    metrics = {
        "grpo-0.3e-3": {1: run(40), 2: run(40), 3: falling, 4: run(0)},
        "gtpo-0.3e-3": {1: run(41), 2: run(42), 3: run(43), 4: run(99)},
    }
    found = found_in(comparison, metrics, **{"grpo-0.3e-3-s4": ["a"], "gtpo-0.3e-3-s4": ["b"]})
    [row] = primary_rows(comparison, [found])
    assert (row["seeds"], row["mean"], row["p"]) == (3, 2.0, 0.25)
    assert row["half_width"] == pytest.approx(4.303 / 3**0.5)
    table = table_of(comparison, found)
    [of_arm] = table["rows"]
    assert of_arm["mixed"] == 1 and of_arm["lost"] == {"grpo": 1, "gtpo": 0, "p": 1.0}
    assert of_arm["measures"]["accuracy late"]["means"] == [40.0, 42.0]


def test_the_page_has_the_rate_of_each_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From stored results, where the arms chose different ones."""
    monkeypatch.chdir(ROOT)
    page, _ = write_page(known_comparison("low_rate"), tmp_path, "study compare low_rate")
    text = " ".join(page.read_text().split())
    assert "GTPO minus GRPO, at 0.3e-3 and 0.15e-3. Seeds lost: 0 and 0 of 8" in text
    assert "| pass@1 sampled | 83.69 | 82.84 | -0.84 ± 1.66 | 8 | 0.2891 |" in text


def test_the_slope_over_bases_by_hand() -> None:
    """0 points at 0, 20, 50 and -8 at 80: differences -10 x, so the slope of each seed is -10."""
    shares = {"missing-0": 0.0, "missing-20": 0.2, "missing-50": 0.5, "missing-80": 0.8}
    primary = [{"measure": "formatting 1-4", "arms": ["correction"], "slope": True}]
    comparison = compared(arms=["grpo", "correction"], base=[*shares], seeds=["1-5"], primary=primary, measures=[])
    every = []
    for number, share in enumerate(shares.values()):
        metrics = {
            "grpo-0.3e-3": {seed: run(0, 50.0 + seed) for seed in range(1, 6)},
            "correction-0.3e-3": {seed: run(0, 50.0 + seed - 10 * share) for seed in range(1, 6)},
        }
        every.append(found_in(comparison, metrics, number))
    [row] = primary_rows(comparison, every)
    assert (row["seeds"], row["mean"]) == (5, pytest.approx(-10.0))


def test_the_mean_over_bases_against_a_bound_by_hand() -> None:
    """Five seeds: +1, -1, ..., from one base and +0.5 from the other; p is of the distance from -0.5."""
    primary = [{"measure": "formatting 1-4", "over_bases": True, "above": -0.5}]
    comparison = compared(base=["missing-0", "missing-20"], seeds=["1-5"], primary=primary, measures=[])
    every = []
    for number, of_base in enumerate(([1.0, -1.0, 1.0, -1.0, 1.0], [0.5] * 5)):
        metrics = {
            "grpo-0.3e-3": {seed: run(0, 50.0) for seed in range(1, 6)},
            "gtpo-0.3e-3": {seed: run(0, 50.0 + gain) for seed, gain in enumerate(of_base, 1)},
        }
        every.append(found_in(comparison, metrics, number))
    [row] = primary_rows(comparison, every)  # 0.75, -0.25, 0.75, -0.25, 0.75; all above -0.5
    assert (row["seeds"], row["mean"], row["p"]) == (5, pytest.approx(0.35), 2 / 32)
    assert row["half_width"] == pytest.approx(2.776 * 0.54772 / 5**0.5, rel=1e-3)
    assert (row["bound"], row["needs_p"]) == (-0.5, False)


@pytest.mark.parametrize(
    ("row", "expected"),
    TABLES["verdicts"],
)
def test_verdicts(row: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The macro of the page."""
    template = tmp_path / "verdict.txt"
    template.write_text('{% import "macros.md" as m %}{{ m.verdict(row) }}')
    (tmp_path / "macros.md").write_text(Path(rendering.__file__).with_name("macros.md").read_text())
    monkeypatch.setattr(rendering, "__file__", str(tmp_path / "rendering.py"))
    assert rendering.render(template.name, {"row": row}) == expected


# The plan


def test_whether_the_plan_was_committed_before_the_runs(tmp_path: Path) -> None:
    """Whether plan.md is in the revisions that the runs were made from."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.check_output(["git", *who, *words], cwd=tmp_path, text=True).strip()

    comparison = Comparison("", TWO, tmp_path / "runs")
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "before")
    before = git("rev-parse", "HEAD")
    assert plan_state(comparison, [before]) == "absent"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "plan.md").write_text(plan_text(comparison))
    assert plan_state(comparison, [before]) == plan_state(comparison, []) == "uncommitted"
    git("add", ".")
    git("commit", "-q", "-m", "plan")
    after = git("rev-parse", "HEAD")
    assert plan_state(comparison, [after, f"{after}-dirty"]) == "committed"
    assert plan_state(comparison, [after, before]) == "uncommitted"
    assert plan_state(Comparison("", TWO | {"steps": 9}, tmp_path / "runs"), [after]) == "another"


def test_a_dirty_tree_is_refused_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("study.compare.git_revision", lambda: "1234-dirty")
    with refused("--dirty"):
        refuse_dirty(allowed=False)
    refuse_dirty(allowed=True)
    monkeypatch.setattr("study.compare.git_revision", lambda: "1234")
    refuse_dirty(allowed=False)


@pytest.mark.parametrize("name", read_experiments()["comparisons"])
def test_the_plans_of_the_planned_comparisons(name: str) -> None:
    """plan.md, once it is written, is what the configuration says."""
    comparison = Comparison(name, read_experiments()["comparisons"][name])
    path = Path(__file__).parents[2] / comparison.results / "plan.md"
    assert not path.is_file() or path.read_text() == plan_text(comparison)
    assert {arm for row in comparison.primary for arm in row.get("arms", ())} <= {arm.name for arm in comparison.arms}


# The command


@pytest.mark.slow
def test_a_comparison_runs_resumes_and_ends_with_one_page(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With small scripts instead of training; the second time everything is there, and the page is the same."""
    monkeypatch.setitem(read_experiments()["bases"]["wrong-mode"], "with_measures", False)
    monkeypatch.setattr("study.compare.git_revision", lambda: "1234")
    argv = ["compare", "--arms", "grpo", "gtpo", "--seeds", "1-3", "--steps", "8", "--problems", "4"]
    assert sandbox.study(*argv, "--list") == 0 and sandbox.calls() == []
    assert "6 runs of 8 steps, 0 of them finished" in capsys.readouterr().out
    (sandbox / "fail").write_text("gtpo-0.3e-3-s2")
    assert sandbox.study(*argv) == 1
    assert "wrong-mode" in capsys.readouterr().out
    (sandbox / "fail").unlink()
    sandbox.calls()
    assert sandbox.study(*argv) == 0
    assert [call for call in sandbox.calls() if call[0] != "evaluate"] == [["train_gtpo", "gtpo-0.3e-3-s2", []]]
    page = (sandbox / "outputs/study/compare/comparison.md").read_text()
    assert sandbox.study(*argv) == 0 and sandbox.calls() == []
    assert (sandbox / "outputs/study/compare/comparison.md").read_text() == page
    assert "| GTPO minus GRPO | wrong-mode | pass@1 sampled | 3 of 3 | +0.00 ± 0.00 | 1.0000 | no verdict" in page
    assert "Before training, held-out problems: pass@1 sampled 50.0 %, pass@1 greedy 50.0 %." in page
    assert "No plan was written before the runs" in page and "(comparison.png)" in page
    with refused(r"was made with other settings \(8\)"):
        sandbox.study(*argv[:-4], "--steps", "9", "--problems", "4")
