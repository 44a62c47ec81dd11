"""A real model on a CPU: SmolLM2-135M-Instruct as the Hub has it, on real GSM8K (`make test-backend BACKEND=real`).

Its tokenizer pads with its EOS token and its entropy is above ln 2. It follows the paper's format almost never, so
rewards are mostly 0: what is tested is the machinery.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.files import read_json, read_lines
from helpers.scripts import ROOT, user_environment
from helpers.weights import adapter_of

MODEL = Path(os.environ.get("GTPO_REAL_MODEL", ROOT / "outputs" / "SmolLM2-135M-Instruct"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL / "model.safetensors").is_file(), reason="no SmolLM2-135M-Instruct: make test-backend BACKEND=real"
    ),
]

STEPS = ["--max_steps", "2", "--save_steps", "1", "--learning_rate", "1e-4"]
ROWS = 10  # the initial entropy takes 100 if there are as many
SHORT = ["--G", "4", "--max_completion_length", "24", "--limit", str(ROWS)]
SECONDS = 900  # timeout of a script


def run(directory: Path, script: str, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *argv],
        cwd=directory,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Callable[..., Path]:
    """``train("gtpo", "NAME", *flags)`` trains in one directory; the run's directory."""
    directory = tmp_path_factory.mktemp("real")

    def run_once(method: str, name: str, *flags: str) -> Path:
        common = ["--model", str(MODEL), "--dataset", "gsm8k", "--data_dir", str(data_dir), "--output_dir", name]
        run(directory, f"train_{method}.py", *common, *STEPS, *SHORT, *flags)
        return directory / name

    return run_once


@pytest.fixture(scope="module")
def gtpo(train: Callable[..., Path]) -> Path:
    """Two steps of GTPO that measure the initial entropy."""
    return train("gtpo", "gtpo")


def metrics(directory: Path) -> list[dict[str, float]]:
    return read_lines(directory / "metrics.jsonl")


def test_gtpo_trains_two_steps(gtpo: Path) -> None:
    assert [row["step"] for row in metrics(gtpo)] == [1, 2]
    record = read_json(gtpo / "initial_entropy.json")
    assert record["prompts"] == ROWS and 1.0 < record["initial_entropy"] < 3.0 and not record["filter_on"]
    weights = adapter_of(gtpo / "adapter")
    assert len(weights) == 30 * 7 * 2 and all(weight.isfinite().all() for weight in weights.values())


def test_grpo_trains_two_steps(train: Callable[..., Path]) -> None:
    rows = metrics(train("grpo", "grpo"))
    assert [row["step"] for row in rows] == [1, 2]
    assert all(1.0 < row["entropy"] < 3.0 and "conflict_tokens" in row for row in rows)


def test_the_adapter_is_evaluated_on_gsm8k(gtpo: Path, data_dir: Path) -> None:
    flags = ["--k", "2", "--limit", "2", "--max_new_tokens", "24", "--data_dir", str(data_dir)]
    shown = run(gtpo.parent, "evaluate.py", "--benchmarks", "gsm8k", "--runs", "base", "gtpo", *flags)
    assert "GSM8K" in shown
    [scores] = (gtpo.parent / "outputs" / "evaluation").glob("**/gtpo*/gsm8k*.json")
    assert read_json(scores)["problems"] == 2
