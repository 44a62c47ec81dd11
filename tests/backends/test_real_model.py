"""A real model on a CPU: SmolLM2-135M-Instruct as the Hub has it, on real GSM8K (`make test-backend BACKEND=real`).

Its tokenizer pads with its EOS token and its entropy is above ln 2. It follows the paper's format almost never, so
rewards are mostly 0: what is tested is the machinery.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT, Ended, user_environment
from safetensors.torch import load_file

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


def run(directory: Path, script: str, *argv: str) -> Ended:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *argv],
        cwd=directory,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Callable[..., tuple[Path, Ended]]:
    """``train("gtpo", "NAME", *flags)`` trains in one directory; the run's directory, and what it said."""
    directory = tmp_path_factory.mktemp("real")

    def run_once(method: str, name: str, *flags: str) -> tuple[Path, Ended]:
        common = ["--model", str(MODEL), "--dataset", "gsm8k", "--data_dir", str(data_dir), "--output_dir", name]
        return directory / name, run(directory, f"train_{method}.py", *common, *STEPS, *SHORT, *flags)

    return run_once


@pytest.fixture(scope="module")
def gtpo(train: Callable[..., tuple[Path, Ended]]) -> tuple[Path, Ended]:
    """Two steps of GTPO that measure the initial entropy, and a merged model."""
    return train("gtpo", "gtpo", "--merge", "16bit")


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_gtpo_trains_two_steps_and_says_what_it_does(gtpo: tuple[Path, Ended]) -> None:
    directory, ended = gtpo
    assert [row["step"] for row in metrics(directory)] == [1, 2]
    record = json.loads((directory / "initial_entropy.json").read_text())
    assert record["prompts"] == ROWS and 1.0 < record["initial_entropy"] < 3.0 and not record["filter_on"]
    assert f"loading {MODEL}" in ended.stderr and "initial entropy:" in ended.stderr
    weights = load_file(directory / "adapter" / "adapter_model.safetensors")
    assert len(weights) == 30 * 7 * 2 and all(weight.isfinite().all() for weight in weights.values())


def test_a_run_with_the_initial_entropy_of_another_is_the_same_run(
    gtpo: tuple[Path, Ended], train: Callable[..., tuple[Path, Ended]]
) -> None:
    measured = json.loads((gtpo[0] / "initial_entropy.json").read_text())["initial_entropy"]
    directory, ended = train("gtpo", "again", "--lora_rank", "16", "--initial_entropy", str(measured))
    assert "nats (given)" in ended.stderr and "initial entropy:" not in ended.stderr
    first, second = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (gtpo[0], directory))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_killed_run_resumes_to_the_same_adapter(
    gtpo: tuple[Path, Ended], train: Callable[..., tuple[Path, Ended]]
) -> None:
    directory = gtpo[0].parent / "killed"
    config = ["--config", str(gtpo[0] / "config.yaml"), "--output_dir", "killed"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train_gtpo.py"), *config],
        cwd=directory.parent,
        env=user_environment(),
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + SECONDS
    while not (directory / "checkpoint-1" / "files.json").is_file() and process.poll() is None:
        assert time.monotonic() < until, "no checkpoint"
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (directory / "adapter").exists()
    run(directory.parent, "train_gtpo.py", "--resume", "killed")
    first, second = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (gtpo[0], directory))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_grpo_trains_two_steps(train: Callable[..., tuple[Path, Ended]]) -> None:
    directory, _ = train("grpo", "grpo")
    rows = metrics(directory)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(1.0 < row["entropy"] < 3.0 and "conflict_tokens" in row for row in rows)


def test_the_merged_model_computes_what_base_and_adapter_compute(gtpo: tuple[Path, Ended]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, _ = gtpo
    tokenizer = AutoTokenizer.from_pretrained(directory / "merged")
    ids = torch.tensor([tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1 = ?"}], return_dict=False)])
    merged = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), directory / "adapter")
    with torch.inference_mode():
        logits = [model(input_ids=ids).logits.log_softmax(-1) for model in (merged, adapted)]
    assert (logits[0] - logits[1]).abs().max() < 0.3  # merged/ has 16 bits
    assert logits[0].argmax(-1).eq(logits[1].argmax(-1)).float().mean() > 0.9


def test_the_adapter_is_evaluated_on_gsm8k(gtpo: tuple[Path, Ended], data_dir: Path) -> None:
    directory, _ = gtpo
    flags = ["--k", "2", "--limit", "2", "--max_new_tokens", "24", "--data_dir", str(data_dir)]
    ended = run(directory.parent, "evaluate.py", "--benchmarks", "gsm8k", "--runs", "base", "gtpo", *flags)
    assert "GSM8K" in ended.stdout
    [scores] = (directory.parent / "outputs" / "evaluation").glob("**/gtpo*/gsm8k*.json")
    assert json.loads(scores.read_text())["problems"] == 2
