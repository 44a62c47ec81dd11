"""``python -m study compare`` with real training: somebody else's objective by the recipe, no difference, a kill."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.runs import metrics_of
from helpers.scripts import ROOT, RunScript
from helpers.weights import adapter_of, same_weights

from gtpo.runs.directory import MANIFEST
from paper.results import read_results

pytestmark = pytest.mark.slow
SHORT = ("--seeds", "1", "2", "--steps", "6", "--problems", "4", "--set", "limit=100", "--jobs", "1", "--dirty")
SAME = "from gtpo import GRPOTrainer\n\n\nclass Same(GRPOTrainer):\n    pass\n"
PLACE = "outputs/whole"
COMPARED = ("-m", "study", "compare", "--arms", "grpo", "same.py:Same", *SHORT, "--output_dir", PLACE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository in another working directory, whose outputs are its own."""
    directory = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git", ".venv"):
            (directory / path.name).symlink_to(path)
    (directory / "same.py").write_text(SAME)
    return directory


def python(checkout: Path, argv: Sequence[str]) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *argv], cwd=checkout, env=environment, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    """The page of GRPO and a class that changes nothing, compared without an interruption."""
    assert python(checkout, COMPARED).wait() == 0
    return (checkout / PLACE / "comparison.md").read_text()


def test_grpo_against_itself_differs_by_exactly_nothing(checkout: Path, page: str) -> None:
    """Every metric of every step but the times; the gradient is not 0."""
    runs = read_results([checkout / PLACE / "wrong-mode"]).metrics.drop(columns=["step_time", "tokens_per_second"])
    grpo, same = runs.loc["grpo-0.3e-3"], runs.loc["same-Same-0.3e-3"]
    assert len(grpo) == 2 * 6 and grpo["grad_norm"].max() > 0 and grpo.equals(same)
    rows = re.findall(r"\| ([^|]+) \| [\d.]+ \| [\d.]+ \| (\S+) \| 2 \| 1.0000 \|", page)
    names, differences = zip(*rows, strict=True)
    assert {"pass@1 sampled", "pass@1 greedy", "accuracy late", "entropy late"} <= {*names}
    assert {*differences} == {"+0.00", "+0.000"}


def test_a_killed_and_resumed_comparison_has_the_same_page(checkout: Path, page: str) -> None:
    """Killed within its last run, which is made again."""
    place = checkout / PLACE
    last = place / "wrong-mode/same-Same-0.3e-3-s2"
    for path in (last, *place.glob("wrong-mode/evaluation*")):
        shutil.rmtree(path)
    (place / "comparison.md").unlink()
    process = python(checkout, COMPARED)
    while not (last / f"checkpoint-3/{MANIFEST}").is_file():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (place / "comparison.md").exists()
    assert python(checkout, COMPARED).wait() == 0
    assert timeless((place / "comparison.md").read_text()) == timeless(page)


def timeless(page: str) -> str:
    """A page without the seconds a step, the last column of its table of arms: runs of six steps have none for lost."""
    lines, times = re.subn(r"(?m)^(\| \S+ \| \d+ \| .*) \d+\.\d+ \|$", r"\1 |", page)
    assert times == 2
    return lines


def test_the_recipe_of_contributing_word_for_word(checkout: Path, run_script: RunScript) -> None:
    """The class of the linked section in one file of the user's, and the two commands, with fewer steps."""
    recipe = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a baseline")[2].partition("\n## ")[0]
    section = (ROOT / "docs/use_in_your_code.md").read_text().partition("## Try your own objective")[2]
    (checkout / "my_objective.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    train, compare = re.findall(r"`(python [^`]+my_objective.py:Mine[^`]*)`", recipe)
    run_script(checkout, *shlex.split(train)[1:], "--max_steps", "2", "--limit", "100")
    assert python(checkout, [*shlex.split(compare)[1:], *SHORT, "--seeds", "1"]).wait() == 0
    page = (checkout / "outputs/study/compare/comparison.md").read_text()
    assert "| my_objective-Mine minus GRPO | wrong-mode | pass@1 sampled | 1 of 1 |" in page
    norms = read_results([checkout / "outputs/study/compare/wrong-mode"]).metrics["grad_norm"]
    assert (
        norms["my_objective-Mine-0.3e-3", 1, 1] > 2 * norms["grpo-0.3e-3", 1, 1] > 0
    )  # of the first step: 1 / sqrt|o_i| is larger than 1 / |o_i|


def test_a_run_is_that_of_its_script(checkout: Path, run_script: RunScript) -> None:
    """Without the prompts that are too long, and with an evaluation of held-out rows."""
    words = "--model tiny --dataset arithmetic --G 4 --prompts_per_step 1 --max_steps 2 --max_prompt_length 32"
    words += " --limit 100 --eval_rows 2 --eval_strategy steps --eval_steps 2 --report_to none --output_dir"
    places = []
    for name, script in (("of_script", ["train_gtpo.py"]), ("of_study", ["study/train.py", "train_gtpo.py"])):
        places.append(checkout / "outputs" / name)
        as_module = f"sys.path[0] = {str(ROOT)!r}"  # python -m study.train
        run_script(checkout, *script, *words.split(), str(places[-1]), before=as_module)
    assert same_weights(*(adapter_of(place / "adapter") for place in places))
    script, study = map(metrics_of, places)
    assert [row.keys() for row in script] != [row.keys() for row in study]
    assert [row["guesses"] >= 0 for row in study if "loss" in row] == [True, True]
    assert [row["eval_reward"] for row in script if "eval_reward" in row] == [
        row["eval_reward"] for row in study if "eval_reward" in row
    ]
