"""``python -m study compare``: what it runs, skips and refuses, and what its page says, by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.results import results_of
from helpers.scripts import ROOT

from gtpo.runs.provenance import git_revision, trainer_of, why_unlike
from study import rendering
from study.__main__ import comparison_of, parser
from study.bench import Comparison, known_comparison, numbers_of, read_experiments, settings_of
from study.compare import (
    Found,
    check_commands,
    every_found,
    plan_state,
    plan_text,
    primary_rows,
    refuse_dirty,
    state_text,
    table_of,
    works_of,
    write_page,
)
from study.storage import condense
from study.train import check

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


def test_arms_of_a_seed_precede_the_next_seed() -> None:
    runs, evaluations, stored, _ = works_of(compared(base=["wrong-mode", "first"]), [1, 2])
    assert [run.seed for run in runs] == [1] * 4 + [2] * 4 and stored == 0
    assert [(work.benchmark, len(work.experiments)) for work in evaluations[:2]] == [
        ("arithmetic", 4),
        ("arithmetic_greedy", 4),
    ]


def test_a_stored_seed_is_left_out_without_a_directory(here: Path) -> None:
    """Of seeds 1 to 3 the second lacks an arm, and the third is here too, perhaps without its scores."""
    runs = {"grpo-0.3e-3": {seed: run(1) for seed in (1, 2, 3)}, "gtpo-0.3e-3": {seed: run(1) for seed in (1, 3)}}
    condense(results_of(runs), Path("results/mine/wrong-mode"), ["accuracy"])
    Path("outputs/study/mine/wrong-mode/gtpo-0.3e-3-s3").mkdir(parents=True)
    works = works_of(Comparison("mine", TWO), [1, 2, 3])
    assert [run.label for run in works.runs] == [f"{arm}-0.3e-3-s{seed}" for seed in (2, 3) for arm in ("grpo", "gtpo")]
    assert {run.seed for run in works.evaluations[0].experiments} == {2, 3} and works.stored == 2
    line = state_text(Comparison("mine", TWO), [1, 2, 3])
    assert line.startswith(
        "6 runs of 8 steps, 2 of them finished (2 stored in results/mine); about 1 minutes of one core"
    )
    assert "\n  wrong-mode, grpo-0.3e-3: 0 of 2\n  wrong-mode, gtpo-0.3e-3: 0 of 2\n" in line
    assert "wrong-mode, grpo-0.3e-3 is run again: stored runs are of an unknown origin" in line
    assert len(works_of(Comparison("mine", TWO, Path("again")), [1, 2, 3]).runs) == 6


def test_each_arm_gets_its_best_rate() -> None:
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


def test_the_rates_of_the_first_base_serve_all(here: Path) -> None:
    rates = {"rates": ["1e-3", "2e-3"], "rate_seeds": [7], "shares_rates": True}
    comparison = Comparison("mine", TWO | rates | {"seeds": [1, 2], "base": ["wrong-mode", "missing-50"]})
    every = works_of(comparison, comparison.seeds).runs
    assert {run.run.path.parent.name for run in every} == {"wrong-mode"} and len(every) == 4
    values = {"grpo-1e-3": 50, "grpo-2e-3": 40, "gtpo-1e-3": 30, "gtpo-2e-3": 60}
    rated = results_of({name: {7: run(value)} for name, value in values.items()})
    condense(rated, Path("results/mine/wrong-mode"), ["accuracy", "formatting", "entropy"])
    assert [found.rates for found in every_found(comparison)] == [{"grpo": "1e-3", "gtpo": "2e-3"}] * 2
    every = works_of(comparison, comparison.seeds).runs
    assert sorted((run.run.path.parent.name, run.label) for run in every) == [
        (base, f"{name}-s{seed}")
        for base in ("missing-50", "wrong-mode")
        for name in ("grpo-1e-3", "gtpo-2e-3")
        for seed in (1, 2)
    ]


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


# Your model, arms and data


def own(**changes: Any) -> Comparison:
    """A comparison from the base in ``here``/models/mine, with columns of another name."""
    Path("models/mine").mkdir(parents=True, exist_ok=True)
    Path("models/mine/config.json").write_text("{}")
    given = {"base": ["models/mine"], "benchmark": "my_test.csv", "set": {"prompt_column": "question"}}
    return compared(**given | changes)


def test_your_base_has_the_settings_of_its_preset(here: Path) -> None:
    """No rate unless it is given; the benchmark has the columns of the training rows; the plan has its weights."""
    comparison = own()
    [base] = comparison.bases
    argv = comparison.run(base, comparison.arms[1], comparison.rates[0], 3).argv
    assert argv[:3] == ("train_gtpo.py", "--model", "models/mine") and "--learning_rate" not in argv
    assert "--prompt_column" in argv and comparison.run_names == ["grpo-preset", "gtpo-preset"]
    flags = comparison.evaluations(base._replace(max_new_tokens=24), [])[0].flags
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (words["--benchmarks"], words["--prompt_column"], words["--max_new_tokens"]) == (
        "my_test.csv",
        "question",
        "24",
    )
    plan = plan_text(comparison)
    assert f"mine (`models/mine`, weights {base.weights})" in plan and "that of the preset" in plan
    Path("models/mine/config.json").write_text('{"hidden_size": 8}')
    assert plan_text(compared(base=["models/mine"], benchmark="my_test.csv", set=comparison.set)) != plan
    assert "--learning_rate" in own(rates=["1e-5"]).run(base, comparison.arms[0], "1e-5", 3).argv
    with refused("--base owner/name: add --benchmark with held-out problems"):
        compared(base=["owner/name"])


def test_your_base_has_the_time_of_its_runs(here: Path) -> None:
    [base] = own().bases
    metrics = {"grpo-preset": {1: [{"step": step, "step_time": 3.0} for step in (1, 2)]}}
    assert base.timed(results_of(metrics)).minutes_per_100_steps == 5.0
    assert base.timed(results_of({})).minutes_per_100_steps == 0.0
    assert "the first run tells how long the others take" in state_text(own(), [1])


@pytest.mark.parametrize(("name", "method", "kept"), TABLES["baselines"])
def test_an_arm_is_a_file_of_settings(name: str, method: str, kept: dict[str, Any]) -> None:
    """Without what all arms share: rate, batch, steps."""
    arm = compared(arms=["grpo", str(ROOT / f"configs/baselines/{name}.yaml")]).arms[1]
    assert (arm.method, arm.label, arm.settings) == (method, name, kept)


def origin(trainer: str | None = "t", revision: str = "a", machine: str = "linux") -> list[Any]:
    return [revision, machine, 2, trainer]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (origin(), ""),
        (origin(revision="b"), ""),
        (origin("other"), "of another trainer, revision a"),
        (origin(None, "b"), "of another trainer, revision b"),
        (origin(machine="mac"), "of another machine, mac"),
        (["b", "linux", 2], "of another trainer, revision b"),  # git does not know it
        (None, "of an unknown origin"),
    ],
)
def test_which_stored_runs_make_a_pair(stored: list[Any] | None, expected: str) -> None:
    assert why_unlike(stored, origin()) == expected


def test_the_trainer_of_a_revision() -> None:
    """Older results have their revision only."""
    [trainer] = {trainer_of("HEAD"), trainer_of(str(git_revision()).removesuffix("-dirty"))}
    assert re.fullmatch("[0-9a-f]{16}", str(trainer))
    assert trainer_of("HEAD-dirty") is trainer_of(None) is None


@pytest.mark.parametrize(("machine", "count"), [("linux", 3), ("mac", 6)])
def test_your_arm_is_compared_with_the_stored_runs(
    machine: str, count: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Your arm alone runs where GRPO's stored runs are of this machine and trainer, else GRPO again."""
    monkeypatch.setitem(read_experiments()["comparisons"], "mine", TWO | {"seeds": [1, 2, 3]})
    monkeypatch.setattr("study.compare.origin_of", lambda _: origin())
    place = Path("results/mine/wrong-mode")
    condense(results_of({"grpo-0.3e-3": {seed: run(40) for seed in (1, 2, 3)}}), place, ["accuracy"])
    origins = {f"grpo-0.3e-3-s{seed}": origin(revision="b", machine=machine) for seed in (1, 2, 3)}
    (place / "origins.json").write_text(json.dumps(origins))
    comparison = known_comparison("mine", None, ["grpo", "mine.py:Mine"])
    assert [arm.name for arm in comparison.arms] == ["grpo", "mine-Mine"]
    works = works_of(comparison, comparison.seeds)
    assert len(works.runs) == count and {run.name for run in works.runs[:2]} >= {"mine-Mine-0.3e-3"}
    assert len(works.evaluations[0].experiments) == count
    again = ["wrong-mode, grpo-0.3e-3 is run again: stored runs are of another machine, mac"]
    assert works.again == (again if machine == "mac" else [])
    assert works.runs[0].run.path.parent == Path("outputs/study/mine-own/wrong-mode")
    with refused("--set: mine is planned in study/experiments.yaml; only --seeds and --arms may be given"):
        comparison_of(parser().parse_args(["compare", "mine", "--set", "G=4"]))
    with refused("--plan: results/mine/plan.md has no arms of yours"):
        comparison_of(parser().parse_args(["compare", "mine", "--arms", "mine.py:Mine", "--plan"]))


def test_an_arm_without_a_rate_says_what_runs_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its rate is chosen: the stored runs of another machine make no pair with the seeds that it will have."""
    given = TWO | {"seeds": [1, 2, 3], "rates": ["0.3e-3", "0.6e-3"], "rate_seeds": [7]}
    monkeypatch.setitem(read_experiments()["comparisons"], "mine", given)
    monkeypatch.setattr("study.compare.origin_of", lambda _: origin())
    place = Path("results/mine/wrong-mode")
    stored = {"grpo-0.3e-3": {seed: run(40) for seed in (1, 2, 3, 7)}, "grpo-0.6e-3": {7: run(30)}}
    condense(results_of(stored), place, ["accuracy", "formatting", "entropy"])
    comparison = known_comparison("mine", None, ["grpo", "mine.py:Mine"])
    for machine, count in (("linux", 2), ("mac", 5)):  # two rates of Mine, and GRPO's three seeds
        origins = {f"grpo-0.3e-3-s{seed}": origin(revision="b", machine=machine) for seed in (1, 2, 3, 7)}
        (place / "origins.json").write_text(json.dumps(origins))
        works = works_of(comparison, comparison.seeds)
        assert len(works.runs) == count
        assert len(works.again) == (machine == "mac")


def test_the_table_row_of_an_arm(here: Path) -> None:
    """41, 42 and 43 minus 40: 2 ± 2.48 by hand (t = 4.303); the step takes 2 s and 3 s."""
    comparison = compared(measures=["formatting late"], primary=[])
    place = comparison.place(comparison.bases[0])
    metrics = {
        name: {
            seed: [{**row, "step_time": time} for row in run(40 + gain * seed, 90.0 + gain * seed)]
            for seed in (1, 2, 3)
        }
        for name, gain, time in (("grpo-0.3e-3", 0, 2.0), ("gtpo-0.3e-3", 1, 3.0))
    }
    condense(results_of(metrics), place, ["accuracy", "formatting", "entropy", "step_time"])
    page, _ = write_page(comparison, place, "command")
    text = page.read_text()
    assert "| GRPO | 3 | - | - | 90.00 | 0.400 | 2.00 | 0 |\n" in text
    row = "| GTPO | 3 | - | - | 92.00 (+2.00 ± 2.48) | 0.400 (+0.000 ± 0.000) | 3.00 (+1.00 ± 0.00) | 0 |"
    assert row in text


@pytest.mark.parametrize(("changes", "message"), TABLES["mistakes"])
def test_a_mistake_is_found_before_the_first_run(changes: dict[str, Any], message: str, here: Path) -> None:
    """By --list and --plan too."""
    Path("gtpo").symlink_to(ROOT / "gtpo")
    lines = ["question,answer"] + [f"{number} + 1?,{number + 1}" for number in range(4)]
    Path("my_train.csv").write_text("\n".join(lines))
    Path("my_test.csv").write_text("\n".join(lines))
    Path("mine.py").write_text("from gtpo import GRPOTrainer\n\n\nclass Mine(GRPOTrainer):\n    pass\n")
    given = {"dataset": "my_train.csv", "prompt_column": "question"} | changes.pop("set", {})
    comparison = compared(**{"arms": ["grpo", "mine.py:Mine"], "benchmark": "my_test.csv", "set": given} | changes)
    before = list(sys.argv)
    if message:
        with refused(message):
            check(comparison)
    else:
        [base] = check(comparison)
        assert base.max_new_tokens == comparison.bases[0].max_new_tokens == 128
    assert sys.argv == before and not Path("outputs").exists()


def test_a_file_that_has_changed_is_named(here: Path) -> None:
    """Code, rows and weights; a directory of before has a hash of the code without its name."""
    Path("mine.py").write_text("1")
    Path("my_train.csv").write_text("1")
    comparison = own(arms=["grpo", "mine.py:Mine"], set={"dataset": "my_train.csv"})
    runs = comparison.runs(comparison.bases[0], comparison.arms, comparison.rates, [1])
    check_commands(comparison, runs)
    for done in runs:
        done.run.path.mkdir(parents=True)
    check_commands(comparison, runs)
    path = comparison.directory / "commands.json"
    stored = path.read_text()
    for name in ("mine.py", "my_train.csv"):
        Path(name).write_text("2")
        with refused(f"was made with another {name}, which has changed since: name another --output_dir"):
            check_commands(comparison, runs)
        Path(name).write_text("1")
    path.write_text(json.dumps({place: [*words[:-3], 64 * "a"] for place, words in json.loads(stored).items()}))
    longer = own(arms=["grpo", "mine.py:Mine"], set={"dataset": "my_train.csv"}, steps=9)
    with refused(r"was made with other settings \(8"):
        check_commands(longer, longer.runs(longer.bases[0], longer.arms, longer.rates, [1]))


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
    legends: list[str] = []
    monkeypatch.setattr("study.compare.plot_curves", lambda axis, label, *_: legends.append(label))
    page, _ = write_page(known_comparison("low_rate"), tmp_path, "study compare low_rate")
    text = " ".join(page.read_text().split())
    assert "GTPO minus GRPO, at 0.3e-3 and 0.15e-3. Seeds lost: 0 and 0 of 8" in text
    assert "From wrong-mode the 8 pairs so far show a difference of 1.7 in pass@1 sampled" in text
    assert legends[-2:] == ["GRPO at 0.15e-3", "GTPO at 0.3e-3"]
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
    assert not path.is_file() or path.read_text().split() == plan_text(comparison).split()
    assert {arm for row in comparison.primary for arm in row.get("arms", ())} <= {arm.name for arm in comparison.arms}


# The command


def test_an_error_names_the_command() -> None:
    argv = [sys.executable, "-m", "study", "compare", "missing_tag", "--list"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "study: comparison 'missing_tag' is unknown (did you mean 'missing_tags'?): pick from "
    )


@pytest.mark.slow
def test_only_a_failed_run_is_made_again(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small scripts instead of training."""
    (sandbox / "gtpo").symlink_to(ROOT / "gtpo")  # the base that is read before the first run
    monkeypatch.setitem(read_experiments()["bases"]["wrong-mode"], "with_measures", False)
    monkeypatch.setattr("study.compare.git_revision", lambda: "1234")
    argv = ["compare", "--arms", "grpo", "gtpo", "--seeds", "1-3", "--steps", "8", "--problems", "4"]
    assert sandbox.study(*argv, "--list") == 0 and sandbox.calls() == []
    (sandbox / "fail").write_text("gtpo-0.3e-3-s2")
    assert sandbox.study(*argv) == 1
    (sandbox / "fail").unlink()
    sandbox.calls()
    assert sandbox.study(*argv) == 0
    assert [call for call in sandbox.calls() if call[0] != "evaluate"] == [["train_gtpo", "gtpo-0.3e-3-s2", []]]
    assert (sandbox / "outputs/study/compare/comparison.md").is_file()
