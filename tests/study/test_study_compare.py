"""``python -m study compare``: what it runs, skips and refuses, and what its page says, by hand."""

import re
import subprocess
import sys
from argparse import ArgumentError
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.files import read_json, tables_of, write_json, write_settings
from helpers.refusals import refused
from helpers.results import results_of
from helpers.runs import fake_run
from helpers.scripts import ROOT

from gtpo.runs.provenance import trainer_of, why_unlike
from paper.results import Results, read_results
from study import rendering
from study.__main__ import comparison_of, parser, run_command
from study.__main__ import main as study_main
from study.comparison import Comparison, arms_of, known_comparison, numbers_of, read_experiments, settings_of
from study.found import Found, every_found
from study.page import (
    found_text,
    plan_state,
    plan_text,
    pooled_row,
    primary_rows,
    slope_row,
    state_text,
    table_of,
    write_figure,
    write_page,
)
from study.runs import check_commands, refuse_dirty, works_of
from study.storage import condense, origin_of
from study.train import _read, check

TABLES = tables_of(__file__)

TWO = {"arms": ["grpo", "gtpo"], "steps": 8, "problems": 4}


def compared(**changes: Any) -> Comparison:
    return Comparison.of("", TWO | {"seeds": [1, 2, 3]} | changes)


def run(value: float, formatting: float = 90.0) -> list[dict[str, Any]]:
    return [{"step": step, "accuracy": value, "formatting": formatting, "entropy": 0.4} for step in range(1, 9)]


# What is run


def test_seeds_and_settings_of_a_command_line() -> None:
    assert numbers_of(["21", "22"]) == [21, 22] and numbers_of(["501-504", 7]) == [501, 502, 503, 504, 7]
    assert settings_of(["gamma=0.0", "reward=format mine.py:f"]) == {"gamma": "0.0", "reward": ["format", "mine.py:f"]}


def test_the_command_of_a_run() -> None:
    """An arm of a user's is train_grpo.py with --objective; --set comes after all other settings."""
    comparison = compared(arms=["grpo", "mine.py:Mine"], set={"temperature": "0.9"}, betas=[0.5, 0.6])
    command = " ".join(comparison.run(comparison.bases[0], comparison.arms[1], "1e-3", 3).argv)
    assert command.startswith("-m study.train train_grpo.py --model ")
    assert command.endswith(
        " --objective mine.py:Mine --adam_beta1 0.5 --adam_beta2 0.6 --learning_rate 1e-3 --max_steps 8 --save_steps 4"
        " --temperature 0.9 --seed 3 --output_dir outputs/study/compare/wrong-mode/mine-Mine-1e-3-s3"
    )


def test_what_runs_and_evaluations_take() -> None:
    """Generations are steps times the updates of one; the base is scored with the runs; greedily once a problem."""
    comparison = compared(arms=["grpo", "gtpo_4_updates"], steps=12, problems=10, betas=[0.5, 0.75])
    base = comparison.bases[0]._replace(minutes_per_100_steps=5.0, seconds_per_sample=0.5)
    runs = [comparison.run(base, arm, "1e-3", seed) for arm in comparison.arms for seed in (1, 2)]
    for made, updates in zip(runs, (1, 1, 4, 4), strict=True):
        words = dict(zip(made.argv[3::2], made.argv[4::2], strict=True))
        taken = ["--max_steps", "--save_steps", "--adam_beta1", "--adam_beta2", "--learning_rate"]
        assert [words[flag] for flag in taken] == [str(12 * updates), str(6 * updates), "0.5", "0.75", "1e-3"]
        assert made.cost == pytest.approx(5.0 * 12 * updates / 100)
    assert [made.label for made in runs[2:]] == ["gtpo_4_updates-1e-3-s1", "gtpo_4_updates-1e-3-s2"]
    sampled, greedy = comparison.evaluations(base, runs)
    for work, k, temperature, name in ((sampled, 4, 1.0, "evaluation"), (greedy, 1, 0.0, "evaluation_greedy")):
        words = dict(zip(work.flags[::2], work.flags[1::2], strict=True))
        assert (words["--k"], words["--temperature"], words["--limit"]) == (str(k), str(temperature), "10")
        assert work.directory == comparison.place(base) / name and work.experiments == tuple(runs)
        assert work.cost == pytest.approx(k * 10 * (len(runs) + 1) * 0.5 / 60)
    windows = [
        compared(steps=steps, **given).window for steps, given in ((8, {}), (60, {}), (1200, {}), (8, {"window": 7}))
    ]
    assert windows == [1, 10, 50, 7]
    assert compared(seeds=["3", "5-6"]).rate_seeds == [7, 8, 9]
    own_ones = compared(arms=["grpo", *(f"{name}.py:Own" for name in "abcd")]).arms
    assert len({arm.color for arm in own_ones}) == 5 and [arm.name for arm in own_ones][1:3] == ["a-Own", "b-Own"]


def test_the_figure_of_two_bases(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column for each base, with its title above, and a row for each metric; arms are named once at one rate."""
    comparison = two_bases(here, ["1-2"])
    drawn: list[tuple[int, str, str]] = []
    saved: list[Any] = []

    def plot(axis: Any, label: str, curves: Any, style: dict[str, Any]) -> None:
        drawn.append((axis.figure.axes.index(axis), axis.get_ylabel(), label))
        saved[:] = [axis.figure]

    monkeypatch.setattr("study.page.plot_curves", plot)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    monkeypatch.setattr("study.page.write_atomically", lambda path, write: saved.append(path))
    write_figure(comparison, every_found(comparison), here / "figure.png")
    figure, path = saved
    assert path == here / "figure.png"
    labels = ["accuracy (%)", "formatting (%)"]
    cells = [(0, labels[0]), (2, labels[1]), (1, labels[0]), (3, labels[1])]  # a base after the other
    assert drawn == [(*cell, arm) for cell in cells for arm in ("GRPO", "GTPO")]
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["one", "two", "", ""]
    assert {axis.get_xlabel() for axis in figure.axes} == {"training step"}


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


def test_a_stored_seed_is_left_out_without_a_directory(here: Path) -> None:
    """Of seeds 1 to 3 the second lacks an arm, and the third is here too, perhaps without its scores."""
    runs = {"grpo-0.3e-3": {seed: run(1) for seed in (1, 2, 3)}, "gtpo-0.3e-3": {seed: run(1) for seed in (1, 3)}}
    condense(results_of(runs), Path("results/mine/wrong-mode"), ["accuracy"])
    Path("outputs/study/mine/wrong-mode/gtpo-0.3e-3-s3").mkdir(parents=True)
    mine = Comparison.of("mine", TWO)
    works = works_of(mine, [1, 2, 3])
    left = ["grpo-0.3e-3-s2", "gtpo-0.3e-3-s2", "grpo-0.3e-3-s3", "gtpo-0.3e-3-s3"]  # a seed after the other
    assert [run.label for run in works.runs] == left and works.stored == 2
    assert [run.label for run in works.evaluations[0].experiments] == [left[0], left[2], left[1], left[3]]
    state = state_text(mine, [1, 2, 3])
    assert state.startswith("6 runs of 8 steps, 2 of them finished (2 stored in results/mine); about 1 minutes of")
    assert "wrong-mode, grpo-0.3e-3 is run again: stored runs are of an unknown origin" in state
    assert len(works_of(Comparison.of("mine", TWO, Path("again")), [1, 2, 3]).runs) == 6


def rated(**values: float) -> Results:
    """Runs of both arms with seed 7: the value of an arm by its rate."""
    return results_of({name.replace("_", "-") + "e-3": {7: run(value)} for name, value in values.items()})


RATES = {"rates": ["1e-3", "2e-3"], "rate_seeds": [7]}
BEST = {"grpo": "1e-3", "gtpo": "2e-3"}
OF_RATES = {"grpo_1": 50, "grpo_2": 40, "gtpo_1": 30, "gtpo_2": 60}


def test_each_arm_gets_its_best_rate() -> None:
    comparison = compared(**RATES)
    assert comparison.chosen_rates(rated(**OF_RATES)) == BEST
    assert comparison.chosen_rates(rated(grpo_1=50, grpo_2=40, gtpo_2=60)) == {"grpo": "1e-3"}
    for among in ([3], [7, 3]):  # the second of two as well
        with refused("--rate_seeds are among --seeds"):
            compared(**RATES | {"rate_seeds": among})
    assert compared(rates=["1e-3"], rate_seeds=[3]).chosen_rates(rated()) == dict.fromkeys(BEST, "1e-3")  # unused


def test_the_rates_of_the_first_base_serve_all(here: Path) -> None:
    bases = {"shares_rates": True, "seeds": [1], "base": ["wrong-mode", "missing-50"]}
    comparison = Comparison.of("mine", TWO | RATES | bases)

    def left() -> set[str]:
        return {str(run.run.path.relative_to(comparison.directory)) for run in works_of(comparison, [1]).runs}

    assert left() == {f"wrong-mode/{name}e-3-s7" for name in ("grpo-1", "grpo-2", "gtpo-1", "gtpo-2")}
    condense(rated(**OF_RATES), Path("results/mine/wrong-mode"), ["accuracy", "formatting", "entropy"])
    assert [found.rates for found in every_found(comparison)] == [BEST] * 2
    assert left() == {f"{base}/{name}e-3-s1" for base in bases["base"] for name in ("grpo-1", "gtpo-2")}


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
    assert comparison.run_names == ["grpo-preset", "gtpo-preset"]
    command = " ".join(comparison.run(base, comparison.arms[1], comparison.rates[0], 3).argv)
    assert command.startswith("train_gtpo.py --model models/mine ") and "--learning_rate" not in command
    sampling = " ".join(comparison.evaluations(base._replace(max_new_tokens=24), [])[0].flags)
    assert sampling.startswith("--benchmarks my_test.csv ")
    assert sampling.endswith(" --prompt_column question --max_new_tokens 24")
    assert f"mine (`models/mine`, weights {base.weights})" in plan_text(comparison)
    Path("models/mine/config.json").write_text('{"hidden_size": 8}')
    assert compared(base=["models/mine"], benchmark="my_test.csv").bases[0].weights != base.weights
    assert "--learning_rate" in own(rates=["1e-5"]).run(base, comparison.arms[0], "1e-5", 3).argv
    with refused("--base owner/name: add --benchmark with held-out problems"):
        compared(base=["owner/name"])
    rows = [{"step": 1, "step_time": 2.0}, {"step": 2, "step_time": 4.0}]
    assert base.timed(results_of({"grpo-preset": {1: rows}})).minutes_per_100_steps == 5.0


@pytest.mark.parametrize(("name", "method", "kept"), TABLES["baselines"])
def test_an_arm_is_a_file_of_settings(name: str, method: str, kept: dict[str, Any]) -> None:
    """Without what all arms share: rate, batch, steps."""
    arm = compared(arms=["grpo", str(ROOT / f"configs/baselines/{name}.yaml")]).arms[1]
    assert (arm.method, arm.label, arm.settings) == (method, name, kept)


def origin(
    trainer: str | None = "t", revision: str = "a", machine: str = "linux", versions: str = "trl 2"
) -> list[Any]:
    return [revision, machine, 2, trainer, versions]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (origin(), ""),
        (origin(revision="b"), ""),
        (origin("other"), "of another trainer, revision a"),
        (origin(None, "b"), "of another trainer, revision b"),
        (origin(machine="mac"), "of another machine, mac"),
        (origin(versions="trl 1"), "of other versions, trl 1"),
        (origin(versions=""), ""),  # none of them is known
        (["b", "linux", 2, "t"], ""),  # stored before the versions were
        (["b", "linux", 2], "of another trainer, revision b"),  # git does not know it
        (None, "of an unknown origin"),
    ],
)
def test_which_stored_runs_make_a_pair(stored: list[Any] | None, expected: str) -> None:
    assert why_unlike(stored, origin()) == expected


def test_the_origin_of_a_run_has_the_versions_that_it_ran_with() -> None:
    environment = {"platform": "linux", "cpu_count": 2, "packages": {"torch": "2.13.0+cpu", "trl": "1.16.0"}}
    expected = "torch 2.13.0+cpu, trl 1.16.0"
    assert origin_of(environment) == [None, "linux", 2, None, expected]


def test_the_trainer_of_a_revision() -> None:
    """Older results have their revision only."""
    assert re.fullmatch("[0-9a-f]{16}", str(trainer_of("HEAD")))
    assert trainer_of("HEAD-dirty") is trainer_of(None) is None


def own_arm(monkeypatch: pytest.MonkeyPatch, machine: str, stored: dict[str, Any], **given: Any) -> Comparison:
    """A user's arm next to the stored runs of a planned comparison, which are of ``machine``."""
    monkeypatch.setitem(read_experiments()["comparisons"], "mine", TWO | {"seeds": [1, 2, 3]} | given)
    monkeypatch.setattr("study.runs.origin_of", lambda _: origin())
    results = results_of(stored)
    place = Path("results/mine/wrong-mode")
    condense(results, place, ["accuracy", "formatting", "entropy"])
    of_all = origin(revision="b", machine=machine)
    write_json(place / "origins.json", {f"{name}-s{seed}": of_all for name, seed in results.runs})
    return known_comparison("mine", None, ["grpo", "mine.py:Mine"])


@pytest.mark.parametrize(("machine", "count"), [("linux", 3), ("mac", 6)])
def test_your_arm_is_compared_with_the_stored_runs(
    machine: str, count: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Your arm alone runs where GRPO's stored runs are of this machine and trainer, else GRPO again."""
    comparison = own_arm(monkeypatch, machine, {"grpo-0.3e-3": {seed: run(40) for seed in (1, 2, 3)}})
    works = works_of(comparison, comparison.seeds)
    assert len(works.runs) == len(works.evaluations[0].experiments) == count
    assert "mine-Mine-0.3e-3" in {run.name for run in works.runs}
    again = ["wrong-mode, grpo-0.3e-3 is run again: stored runs are of another machine, mac"]
    assert works.again == (again if machine == "mac" else [])
    assert works.runs[0].run.path.parent == Path("outputs/study/mine-own/wrong-mode")
    for words, why in (("--set G=4", "--set: mine is planned in"), ("--arms mine.py:Mine --plan", "has no arms of")):
        with refused(why):
            comparison_of(parser().parse_args(["compare", "mine", *words.split()]))


@pytest.mark.parametrize(("machine", "count"), [("linux", 2), ("mac", 5)])
def test_an_arm_without_a_rate_says_what_runs_again(
    machine: str, count: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rates of Mine, and GRPO's three seeds if they make no pair with the seeds that Mine will have."""
    stored = {"grpo-0.3e-3": {seed: run(40) for seed in (1, 2, 3, 7)}, "grpo-0.6e-3": {7: run(30)}}
    comparison = own_arm(monkeypatch, machine, stored, rates=["0.3e-3", "0.6e-3"], rate_seeds=[7])
    works = works_of(comparison, comparison.seeds)
    assert (len(works.runs), len(works.again)) == (count, machine == "mac")


@pytest.mark.parametrize("place", ["theirs", "run/adapter"])
def test_an_adapter_is_no_base(place: str, here: Path) -> None:
    """Named itself, or by its run: the scores before training would be those of its base."""
    (here / place).mkdir(parents=True)
    (here / place / "adapter_config.json").write_text("{}")
    with refused(r"is an adapter: merge it"):
        compared(base=[f"./{place.partition('/')[0]}"], benchmark="my_test.csv")


@pytest.mark.parametrize(("changes", "message"), TABLES["mistakes"])
def test_a_mistake_is_found_before_the_first_run(changes: dict[str, Any], message: str, here: Path) -> None:
    """By --list and --plan too."""
    Path("gtpo").symlink_to(ROOT / "gtpo")
    Path("my_model").mkdir()
    for name in ("my_train.csv", "my_test.csv"):
        Path(name).write_text("question,answer\n1 + 1?,2\n2 + 1?,3\n3 + 1?,4\n4 + 1?,5\n")
    Path("mine.py").write_text("from gtpo import GRPOTrainer\n\n\nclass Mine(GRPOTrainer):\n    pass\n")
    given = {"dataset": "my_train.csv", "prompt_column": "question"} | changes.pop("set", {})
    given_or_changed = {"arms": ["grpo", "mine.py:Mine"], "benchmark": "my_test.csv", "set": given} | changes
    before = list(sys.argv)
    with refused(message) if message else nullcontext():
        [base] = check(compared(**given_or_changed))
        assert base.max_new_tokens == 128
    assert sys.argv == before and not Path("outputs").exists()


def test_a_line_is_printed_before_trl_is_imported(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = parser().parse_args(["compare", "--arms", "grpo", "gtpo"])
    monkeypatch.setitem(sys.modules, "study.train", None)  # which imports it
    with pytest.raises(ImportError):
        run_command(flags)
    assert capsys.readouterr().out.startswith("Checking 2 arms from wrong-mode: ")


def test_a_backend_that_cannot_run_is_found_before_the_first_run(gpu: None, here: Path) -> None:
    """Unsloth would train a base of yours, and is not installed; the tiny base is trained on the CPU."""
    for name in ("my_train.csv", "my_test.csv"):
        Path(name).write_text("question,answer\n1 + 1?,2\n2 + 1?,3\n3 + 1?,4\n4 + 1?,5\n")
    given = {"set": {"dataset": "my_train.csv", "prompt_column": "question"}, "benchmark": "my_test.csv"}
    with refused("unsloth .* is needed, installed is none"):
        check(own(**given))
    Path("gtpo").symlink_to(ROOT / "gtpo")
    assert [base.name for base in check(compared(**given))] == ["wrong-mode"]


def test_a_file_that_has_changed_is_named(here: Path) -> None:
    """Code, rows and weights; a directory of before has a hash of the code without its name."""
    given = {"arms": ["grpo", "mine.py:Mine"], "set": {"dataset": "my_train.csv"}}
    for name in ("mine.py", "my_train.csv"):
        Path(name).write_text("1")

    def check_again(steps: int) -> None:
        comparison = own(**given, steps=steps)
        check_commands(comparison, comparison.runs(comparison.bases[0], comparison.arms, comparison.rates, [1]))

    check_again(8)
    for arm in ("grpo", "mine-Mine"):
        Path(f"outputs/study/compare/mine/{arm}-preset-s1").mkdir(parents=True)
    check_again(8)
    for name in ("mine.py", "my_train.csv"):
        Path(name).write_text("2")
        with refused(f"was made with another {name}, which has changed since: name another --output_dir"):
            check_again(8)
        Path(name).write_text("1")
    path = Path("outputs/study/compare/commands.json")
    commands = read_json(path)
    write_json(path, {place: [word for word in commands[place] if "#" not in word] + [64 * "a"] for place in commands})
    check_again(8)
    with refused(r"was made with other settings \(8"):
        check_again(9)


# What was found


def test_a_pair_of_two_origins_is_left_out() -> None:
    """1, 2 and 3 points, and the fourth pair is of two revisions."""
    comparison = compared(seeds=["1-4"], primary=[{"measure": "accuracy late"}], measures=[])
    gains = {"grpo": 0, "gtpo": 1}
    metrics = {f"{arm}-0.3e-3": {seed: run(40 + gain * seed) for seed in range(1, 5)} for arm, gain in gains.items()}
    origins = {"grpo-0.3e-3-s4": ["a"], "gtpo-0.3e-3-s4": ["b"]}
    found = Found(comparison.bases[0], results_of(metrics), origins, dict.fromkeys(gains, "0.3e-3"))
    [row] = primary_rows(comparison, [found])
    assert (row["seeds"], row["means"], row["mean"], row["p"]) == (3, [40.0, 42.0], 2.0, 0.25)
    assert table_of(comparison, found)["rows"][0]["mixed"] == 1


GOOD = {"completions/clipped_ratio": 0.0, "reward": 1.0, "reward_std": 0.5}
CUTS = {"completions/clipped_ratio": 0.97}
CUT = GOOD | CUTS
ZERO = GOOD | {"reward": 0.0, "reward_std": 0.0}
HASHES = {"rows": "r", "rw.py:f": "f", "helper.py": "h"}


def train(comparison: Comparison, ends: dict[str, Any], hashes: dict[str, Any]) -> None:
    """Runs of this machine, with the last lines of "base arm seed", and what they were made from; the others are good.

    The second arm is better by 1 to 6 points.
    """
    for base in comparison.bases:
        every = comparison.runs(base, comparison.arms, comparison.rates, comparison.seeds)
        for number, made in enumerate(every):
            arm = made.name.partition("-")[0]
            key = f"{base.name} {arm} {made.seed}"
            end = ends.get(key, ends.get(f"{base.name} {arm}", GOOD))
            gain = made.seed * (number >= len(comparison.seeds))
            settings = {"model": "x", "seed": made.seed, "learning_rate": 0.25, "num_generations": 8, "lora_rank": 4}
            settings |= {"max_completion_length": 32, "reward": ["format", "rw.py:f"]}
            settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
            run_here = fake_run(made.run.path, settings, [row | end for row in run(40 + gain)])
            write_json(run_here.environment, {"made_from": HASHES | hashes.get(key, {})})


def two_bases(here: Path, seeds: list[Any]) -> Comparison:
    """Two arms from two bases of a user's."""
    for name in ("one", "two"):
        (here / name).mkdir()
        (here / name / "config.json").write_text("{}")
    planned = {"primary": [{"measure": "accuracy late"}], "measures": [], "seeds": seeds}
    return compared(base=["./one", "./two"], benchmark="my_test.csv", **planned)


def test_the_problems_of_runs_are_on_screen_and_page(here: Path) -> None:
    """From one base every run is cut off; from the other the second arm has no reward in two seeds of six.

    A run has two problems.
    """
    comparison = two_bases(here, ["1-6"])
    train(comparison, {"one grpo": CUT, "one gtpo": CUT, "two gtpo 2": ZERO, "two gtpo 5": ZERO | CUTS}, {})
    page, _ = write_page(comparison, here / "page", "a command")
    screen = found_text(comparison)
    text = page.read_text()
    for said in (" ".join(screen.split()), " ".join(text.split())):
        cut = "6 of 6 runs: 97 % of the completions of steps 4 to 8 were cut off at 32 tokens: raise --max_completion"
        assert f"* **GRPO** from one, {cut}" in said and f"* **GTPO** from one, {cut}" in said
        assert "* **GTPO** from two, 2 of 6 runs: every reward of steps 4 to 8 was 0, so all" in said
        assert "* **GTPO** from two, 1 of 6 runs: 97 % of the completions" in said
        assert len(re.findall(r"\d of 6 runs:", said)) == 4
    verdicts = re.findall(r"\| GTPO minus GRPO \| (\w+) \| accuracy late .* \| ([^|]+) \|", text)
    assert verdicts == [
        ("one", "no verdict: every run has a problem, named above"),
        ("two", "higher, but not after Holm"),
    ]


def test_a_page_of_your_base_has_what_was_run(here: Path) -> None:
    comparison = two_bases(here, ["1-2"])
    train(comparison, {}, {"two gtpo 1": {"rows": "others"}})
    text = " ".join(write_page(comparison, here / "page", "a command")[0].read_text().split())
    shown = (
        "learning rate 0.25, G 8, tokens of a completion 32, LoRA rank 4, reward format + rw.py:f, completions a step"
    )
    for name, base, rows in (("GRPO", "one", "r"), ("GTPO", "two", "others")):
        ran = f"{shown} 8, hash of rows {rows}, hash of rw.py:f f, hash of helper.py h."
        assert f"* **{name}** from {base} ran with {ran}" in text
    assert " ran with " not in plan_text(comparison)
    for place, revision in (("one/grpo-preset-s1", "of-this-one"), ("one/another-s1", "of-none")):
        run_here = fake_run(comparison.directory / place, {"model": "x"}, [{"step": 1}])
        write_json(run_here.environment, {"git_revision": revision})
    text = write_page(comparison, here / "page", "a command")[0].read_text()
    assert "Revisions of the runs: None, of-this-one;" in " ".join(text.split())  # of its own runs alone


def test_a_pair_that_was_made_from_other_things_is_left_out(here: Path) -> None:
    """Rows, a helper of the reward, a helper that one lacks; not the files of the second arm's objective."""
    Path("mine.py").write_text("import own\n")
    Path("own.py").write_text("")
    comparison = compared(arms=["grpo", "mine.py:Mine"], seeds=["1-5"], primary=[{"measure": "accuracy late"}])
    key = "wrong-mode mine {}".format
    of_objective = {"mine.py:Mine": "m", "own.py": "o"}
    other = {1: {}, 2: {"rows": "others"}, 3: {"helper.py": "other"}, 4: {"third.py": "t"}, 5: {}}
    train(comparison, {}, {key(seed): of_objective | hashes for seed, hashes in other.items()})
    [found] = every_found(comparison)
    pair = found.pair(comparison, comparison.arms[1])
    assert (pair.seeds, pair.mixed, pair.unlike) == ([1, 5], 0, 3)
    assert pair.made_from == ["helper.py", "set of training rows", "third.py"]
    said = "3 pairs left out: one run was made from another helper.py, set of training rows, third.py."
    assert f"* **mine-Mine** from wrong-mode, {said}" in found_text(comparison)


def test_a_run_that_was_made_from_other_things_is_named_before_the_others(here: Path) -> None:
    """A change that is on no command line: of what GTPO_DATA_DIR names, or of a helper."""
    Path("gtpo").symlink_to(ROOT / "gtpo")
    comparison = compared(set={"limit": 100})
    [base] = comparison.bases
    first, second = (comparison.run(base, arm, "0.3e-3", 1).run for arm in comparison.arms)
    check(comparison)
    for run_here, hashes in ((first, {}), (second, {"rows": "others"})):
        write_json(fake_run(run_here.path, {"model": "x"}).environment, {"made_from": hashes})
    with refused(f"{second.path} was made with another set of training rows, which has changed since: name another"):
        check(comparison)
    write_json(second.environment, {"made_from": {}})
    check(comparison)
    # of any seed: the rows of arithmetic are generated by it
    [arm, _] = comparison.arms
    third = fake_run(comparison.run(base, arm, "0.3e-3", 3).directory, {"model": "x"})
    of_first, of_third = (_read(comparison.run(base, arm, "0.3e-3", seed)).made_from for seed in (1, 3))
    assert of_first["rows"] != of_third["rows"]
    write_json(third.environment, {"made_from": of_third})
    check(comparison)
    write_json(third.environment, {"made_from": of_third | {"rows": "others"}})
    with refused(f"{third.path} was made with another set of training rows, which has changed since"):
        check(comparison)


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        (["1"], "1 seed gives no verdict; 5 would show a difference of 1.4 in pass@1 sampled, by the pairs"),
        (
            ["1-4"],
            "4 seeds give no verdict; 5 would show a difference of 1.4 in pass@1 sampled, by the pairs of `study",
        ),
        (["1-5"], "5 seeds can show a difference of 1.4 in pass@1 sampled, half of the 95 % interval, by the pairs"),
        (["1-6"], "6 seeds can show a difference of 1.2 in pass@1 sampled, half of the 95 % interval, by the pairs"),
    ],
)
def test_what_the_seeds_can_show(seeds: list[str], said: str, here: Path) -> None:
    """2.776 / sqrt(5) and 2.571 / sqrt(6) standard deviations of 1.13 points."""
    state = state_text(compared(seeds=seeds), numbers_of(seeds))
    assert f"From wrong-mode {said}" in " ".join(state.split())


def test_runs_of_arms_in_folders_are_no_folders(here: Path) -> None:
    for name in ("mine.yaml", "gtpo-mine.yaml"):
        write_settings(here / name, {"beta": 0.04})
    arms = arms_of([str(here / "mine.yaml"), "gtpo-mine.yaml", "own/mine.py:Mine", "own/my-own.py:Mine"])
    folder = str(here).replace("/", "-")
    names = [f"{folder}-mine-1e-3", "gtpo-mine-1e-3", "own-mine-Mine-1e-3", "own-my-own-Mine-1e-3"]
    assert [arm.run_name("1e-3") for arm in arms] == names
    assert [arm.method for arm in arms] == ["grpo", "gtpo", "grpo", "grpo"]


@pytest.mark.parametrize("arms", [["gtpo"], ["grpo", "gtpo", "grpo"]])
def test_arms_are_two_or_more_and_named_once(arms: list[str]) -> None:
    with refused(f"--arms {' '.join(arms)}: name two or more, each once; the first is subtracted"):
        compared(arms=arms)


QUICK = ("low_rate", "early")
STORED = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in read_experiments()["comparisons"]
    if (ROOT / "results" / name / "comparison.md").is_file()
]


@pytest.mark.parametrize("name", STORED)
def test_a_stored_page_is_that_of_its_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each planned comparison: arms at different rates, seeds that are lost, a slope, a mean over bases."""
    monkeypatch.chdir(ROOT)
    state = "uncommitted" if name == "objectives_one_rate" else "committed"  # six of its arms are of an earlier plan
    monkeypatch.setattr("study.page.plan_state", lambda *_: state)  # a shallow clone lacks the revisions
    legends: list[str] = []
    monkeypatch.setattr("study.page.plot_curves", lambda axis, label, *_: legends.append(label))
    comparison = known_comparison(name)
    page, *_ = write_page(comparison, tmp_path, f"python -m study compare {name}")
    assert page.read_text() == (comparison.results / "comparison.md").read_text()
    assert ("GRPO at 0.15e-3" in legends and "GTPO at 0.3e-3" in legends) == (name == "low_rate")


def pair(*differences: float) -> Any:
    """The differences of seeds 0, 1, ... from one base."""
    return SimpleNamespace(differences=lambda _: dict(enumerate(differences)))


def test_the_slope_over_bases_by_hand() -> None:
    """-10 and 5 times x; a seed that one of the bases lacks is left out."""
    row = slope_row([0.0, 0.2, 0.5], [pair(1, 2), pair(-1, 3, 9), pair(-4, 4.5, 9)], "accuracy late")
    assert (row["seeds"], row["mean"]) == (2, pytest.approx(-2.5))


def test_the_mean_over_bases_against_a_bound_by_hand() -> None:
    """Means 0.75, -0.25, 0.75, -0.25, 0.75, all above -0.5; p is of the distance from it."""
    row = pooled_row([pair(1, -1, 1, -1, 1), pair(*[0.5] * 5)], "accuracy late", bound=-0.5)
    assert (row["seeds"], row["mean"], row["p"]) == (5, pytest.approx(0.35), 2 / 32)
    assert row["half_width"] == pytest.approx(2.776 * 0.54772 / 5**0.5, rel=1e-3)


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
    comparison = Comparison.of("", TWO, tmp_path / "runs")

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.check_output(["git", *who, *words], cwd=tmp_path, text=True).strip()

    def commit() -> str:
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", "plan")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    before = commit()
    assert plan_state(comparison, [before]) == "absent"
    comparison.directory.mkdir()
    (comparison.directory / "plan.md").write_text(plan_text(comparison))
    assert plan_state(comparison, [before]) == plan_state(comparison, []) == "uncommitted"
    after = commit()
    assert plan_state(comparison, [after, f"{after}-dirty"]) == "committed"
    assert plan_state(comparison, [after, before]) == "uncommitted"
    assert plan_state(Comparison.of("", TWO | {"steps": 9}, tmp_path / "runs"), [after]) == "another"


def test_a_dirty_tree_is_refused_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("study.runs.git_revision", lambda: "1234-dirty")
    refuse_dirty(allowed=True)
    with refused("--dirty"):
        refuse_dirty(allowed=False)


@pytest.mark.parametrize("name", read_experiments()["comparisons"])
def test_the_plans_of_the_planned_comparisons(name: str) -> None:
    """plan.md, once it is written, is what the configuration says."""
    comparison = Comparison.of(name, read_experiments()["comparisons"][name])
    path = Path(__file__).parents[2] / comparison.results / "plan.md"
    assert not path.is_file() or path.read_text().split() == plan_text(comparison).split()
    assert {arm for row in comparison.primary for arm in row.get("arms", ())} <= {arm.name for arm in comparison.arms}


# The command


def test_the_command_chooses_rates_and_continues_what_failed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate seeds first, then both arms at their best rate; the one run that fails is alone made again."""
    planned = TWO | RATES | {"seeds": [1, 2], "primary": [{"measure": "accuracy late"}], "measures": []}
    monkeypatch.setitem(read_experiments()["comparisons"], "mine", planned)
    monkeypatch.setattr("study.runs.git_revision", lambda: "1234")
    started: list[list[str]] = []
    scored: list[set[str]] = []
    fails = {"gtpo-2e-3-s2"}

    def run_all(runs: Any, evaluations: Any, slots: Any) -> list[str]:
        left = [made for made in runs if not made.is_finished]
        started.append([made.label for made in left])
        scored.append({made.label for evaluation in evaluations for made in evaluation.experiments})
        for made in left:
            if made.label not in fails:
                value = 50.0 if made.name in ("grpo-1e-3", "gtpo-2e-3") else 40.0
                fake_run(made.run.path, {"model": "tiny"}, run(value + made.seed), saved=["adapter"])
        return [f"{made.label} failed" for made in left if made.label in fails]

    monkeypatch.setattr("study.runs.run_all", run_all)
    monkeypatch.setattr("study.page.write_figure", lambda *_: None)
    page = here / "outputs/study/mine/comparison.md"

    def command(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["study", "compare", "mine", *words])
        with pytest.raises(SystemExit) as ended:
            study_main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, said = command("--list")
    assert code == 0 and "Checking" not in said and not started and not page.exists()  # its data is that of the plan
    code, said = command("--plan")
    assert code == 0 and (here / "results/mine/plan.md").read_text() == plan_text(known_comparison("mine"))
    assert "commit it before the runs: git add --force results/mine/plan.md" in said and not started
    code, said = command()
    names = ("grpo-1e-3", "grpo-2e-3", "gtpo-1e-3", "gtpo-2e-3")
    best = [f"{name}-s{seed}" for seed in (1, 2) for name in (names[0], names[3])]
    assert [sorted(started[0]), started[1]] == [[f"{name}-s7" for name in names], best]
    assert scored == [set(), {*best}]
    assert (code, said.splitlines()[-1]) == (1, "gtpo-2e-3-s2 failed")
    assert "| GTPO minus GRPO | wrong-mode | accuracy late | 1 of 2 |" in page.read_text()
    fails.clear()
    code, said = command()
    assert (code, started[2:]) == (0, [["gtpo-2e-3-s2"], []]) and said.splitlines()[-1].endswith("comparison.png")
    text = page.read_text()
    assert "| GTPO minus GRPO | wrong-mode | accuracy late | 2 of 2 |" in text
    assert "```bash\npython -m study compare mine\n```" in text
    assert command("--seeds", "1", "3")[0] == 0 and started[4] == ["grpo-1e-3-s3", "gtpo-2e-3-s3"]
    assert command("--store")[0] == 0
    stored = read_results([Path("results/mine/wrong-mode")]).runs
    assert {f"{name}-s{seed}" for name, seed in stored} == {*best, *(f"{name}-s7" for name in names)}
    monkeypatch.setattr("study.runs.git_revision", lambda: "1234-dirty")
    with refused("--dirty"):
        command()
    assert command("--dirty")[0] == 0


def test_a_planned_arm_of_another_revision_is_refused_before_the_first_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a setting that is gone; the arm before it could run."""
    planned = TWO | {"arms": ["grpo", "credited"], "seeds": [1], "primary": [{"measure": "accuracy late"}]}
    monkeypatch.setitem(read_experiments()["comparisons"], "mine", planned)
    monkeypatch.setattr("study.runs.git_revision", lambda: "1234")
    monkeypatch.setattr("study.runs.run_all", lambda *_: pytest.fail("a run was started"))
    monkeypatch.setattr(sys, "argv", ["study", "compare", "mine"])
    with pytest.raises(ArgumentError, match="--conflict_span: invalid choice: 'credited'"):
        study_main()


@pytest.mark.slow
def test_a_failed_run_is_an_error_and_has_a_page(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small scripts instead of training."""
    (sandbox / "gtpo").symlink_to(ROOT / "gtpo")  # the base that is read before the first run
    monkeypatch.setitem(read_experiments()["bases"]["wrong-mode"], "with_measures", False)
    monkeypatch.setattr("study.runs.git_revision", lambda: "1234")
    (sandbox / "fail").write_text("gtpo-0.3e-3-s2")
    argv = ["compare", "--arms", "grpo", "gtpo", "--seeds", "1-3", "--steps", "8", "--problems", "4"]
    assert sandbox.study(*argv) == 1
    page = (sandbox / "outputs/study/compare/comparison.md").read_text()
    assert "| GTPO minus GRPO | wrong-mode | pass@1 sampled | 2 of 3 |" in page
