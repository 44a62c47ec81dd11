"""A real model on a CPU: SmolLM2-135M-Instruct as the Hub has it, on real GSM8K (`make test-backend BACKEND=real`).

Its tokenizer pads with its EOS token and its entropy is above ln 2. It follows the paper's format almost never, so
rewards are mostly 0: what is tested is the machinery.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.files import read_json
from helpers.runs import metrics_of
from helpers.scripts import ROOT, run_process
from helpers.weights import adapter_of

MODEL = Path(os.environ.get("GTPO_REAL_MODEL", ROOT / "outputs" / "SmolLM2-135M-Instruct"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL / "model.safetensors").is_file(), reason="no SmolLM2-135M-Instruct: make test-backend BACKEND=real"
    ),
]

ROWS = 10  # the initial entropy takes 100 if there are as many
STEPS = ["--model", str(MODEL), "--dataset", "gsm8k", "--limit", str(ROWS), "--G", "4", "--max_completion_length", "24"]
STEPS += ["--max_steps", "2", "--save_steps", "1", "--learning_rate", "1e-4"]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Callable[..., Path]:
    """``script("evaluate.py", *flags)``: run a script on the real data; the directory of all of them."""
    directory = tmp_path_factory.mktemp("real")

    def run(name: str, *flags: str) -> Path:
        run_process([sys.executable, ROOT / name, *flags, "--data_dir", data_dir], cwd=directory)
        return directory

    return run


@pytest.fixture(scope="module")
def gtpo(script: Callable[..., Path]) -> Path:
    """Two steps of GTPO that measure the initial entropy."""
    return script("train_gtpo.py", *STEPS, "--output_dir", "gtpo") / "gtpo"


def test_gtpo_trains_two_steps(gtpo: Path) -> None:
    assert [row["step"] for row in metrics_of(gtpo)] == [1, 2]
    record = read_json(gtpo / "initial_entropy.json")
    assert record["prompts"] == ROWS and 1.0 < record["initial_entropy"] < 3.0 and not record["filter_on"]
    weights = adapter_of(gtpo / "adapter")
    assert len(weights) == 30 * 7 * 2 and all(weight.isfinite().all() for weight in weights.values())


def test_grpo_trains_two_steps(script: Callable[..., Path]) -> None:
    rows = metrics_of(script("train_grpo.py", *STEPS, "--output_dir", "grpo") / "grpo")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(1.0 < row["entropy"] < 3.0 and "conflict_tokens" in row for row in rows)


def test_the_adapter_is_evaluated_on_gsm8k(gtpo: Path, script: Callable[..., Path]) -> None:
    flags = ["--benchmarks", "gsm8k", "--runs", "base", "gtpo", "--k", "2", "--limit", "2", "--max_new_tokens", "24"]
    [scores] = script("evaluate.py", *flags).glob("outputs/evaluation/**/gtpo*/gsm8k*.json")
    assert read_json(scores)["problems"] == 2
