"""A function of the user as the grader, from the flags to the scores."""

import sys
from pathlib import Path

from helpers.files import read_json, write_lines
from helpers.refusals import refused
from helpers.scripts import Command
from pytest import LogCaptureFixture, fixture, raises

from gtpo.data.load import Problem
from gtpo.errors import RunError
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.benchmarks import load_user_grader, select_benchmarks

GRADER = """import functools

def runs(completions, tests, prompts=None, **columns):
    return [float(all(test in c[0]["content"] for test in listed)) for c, listed in zip(completions, tests)]

async def later(completions, answer, **columns):
    return [0.5 if c[0]["content"] == a["text"] else -1 for c, a in zip(completions, answer)]

def nothing(completions, value=None, **columns):
    return [value for _ in completions]

unknown = functools.partial(nothing, value=float("nan"))

def same_prompt(completions, prompts, **columns):
    return [float(p[-1]["content"] in c[0]["content"]) for p, c in zip(prompts, completions)]
"""
ROWS = [
    {"prompt": "Write one.", "tests": ["def", "return"], "answer": {"text": "x"}},
    {"prompt": "Write two.", "tests": [], "answer": None},
    {"prompt": "", "tests": [], "answer": None},
]


@fixture
def mine(here: Path) -> Path:
    Path("grader.py").write_text(GRADER)
    write_lines(Path("mine.jsonl"), ROWS)
    return here


def test_a_grader_gets_the_columns_of_the_problem(mine: Path) -> None:
    flags = EvaluationArguments(["mine.jsonl"], grader="grader.py:runs")
    [benchmark] = select_benchmarks(flags)
    found = benchmark.load()
    problems = found.rows
    grader = found.grader
    assert found.dropped == {"with an empty prompt": 1}
    assert [(p.question, p.gold) for p in problems] == [("Write one.", "{'text': 'x'}"), ("Write two.", "None")]
    assert problems[0].columns == {"tests": ["def", "return"], "answer": {"text": "x"}}
    assert grader is not None
    assert grader(problems[0], [], ["def f(): return", "def f(): pass"]) == [True, False]
    assert grader(problems[1], [], ["anything"]) == [True]
    later = load_user_grader("grader.py:later", ["answer"])
    assert later(problems[0], [], ["x", "y"]) == [True, False]


def test_an_unusable_grader_is_refused_early(mine: Path, run_evaluate: Command) -> None:
    Path("mine.jsonl").write_text('{"prompt": "Write one."}\n')  # without a column that it needs
    argv = ["--benchmarks", "mine.jsonl", "--model", "no-such/model", "--grader", "grader.py:runs"]
    with refused("grader"):
        run_evaluate(*argv)
    for name in ("nothing", "unknown"):
        with raises(RunError, match=f"grader.py:{name} returned"):
            load_user_grader(f"grader.py:{name}", [])(Problem("mine/0", "?", ""), [], ["x"])


def test_graded_scores_and_their_regrade(tiny: Path, mine: Path, run_evaluate: Command) -> None:
    def run(*argv: object) -> dict:
        run_evaluate(*argv)
        return read_json(Path("out/results.json"))["results"][0]

    argv = ["--benchmarks", "mine.jsonl", "--model", tiny, "--k", 2, "--max_new_tokens", 3, "--output_dir", "out"]
    entry = run(*argv, "--grader", "grader.py:runs")
    assert [(p["correct"], p["gold"]) for p in entry["per_problem"]] == [("00", "{'text': 'x'}"), ("11", "None")]
    assert entry["scores"]["pass"] == {"1": 50, "2": 50}
    assert "pass_lenient" not in entry["scores"] and entry["per_problem"][0]["correct_lenient"] is None
    assert entry["data"]["grader"] == "grader.py:runs"
    path = next(Path("out").glob("*/mine.jsonl"))
    with refused("runs"):  # code, which is not imported automatically
        run("--regrade", "--output_dir", "out")
    text = path.read_text()
    for count, marks in ((1, ["10", "00"]), (-1, ["11", "00"])):  # the first sample, all
        path.write_text(text.replace('"completion": "', '"completion": "Write one.', count))
        entry = run("--regrade", "--output_dir", "out", "--grader", "grader.py:same_prompt")
        assert [p["correct"] for p in entry["per_problem"]] == marks


def test_compare_names_a_grader_whose_file_has_changed(
    tiny: Path, mine: Path, run_evaluate: Command, caplog: LogCaptureFixture
) -> None:
    """And one whose helper has changed; graded alike, nothing is said."""
    code = "from helper import VALUE\n\ndef ok(completions, **_):\n    return [VALUE] * len(completions)\n"
    Path("ok.py").write_text(code)
    argv = ["--benchmarks", "mine.jsonl", "--model", tiny, "--k", 1, "--max_new_tokens", 2, "--grader", "ok.py:ok"]
    for name, value in (("a", 1), ("b", 1), ("c", 0)):
        Path("helper.py").write_text(f"VALUE = {value}\n")
        sys.modules.pop("helper", None)
        run_evaluate(*argv, "--output_dir", name)
    label = next(Path("a").glob("*/mine.json")).parent.name
    for other in "bc":
        caplog.clear()
        run_evaluate("--compare", f"a/{label}", f"{other}/{label}")
        said = [message for message in caplog.messages if "graded with different" in message]
        end = "were graded with different files of --grader: evaluate.py --regrade"
        assert said == ([f"{label} and c/{label}/{label} {end}"] if other == "c" else [])
