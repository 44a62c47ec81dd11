"""The train scripts, run as a user runs them: contents of the run directory, resuming, invalid usage.

One run starts a new Python process, as a shell does; the others are forked (conftest.run_script).
"""

import functools
import math
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers.files import read_json, read_settings
from helpers.parrot import build_parrot
from helpers.runs import metrics_of
from helpers.scripts import RunScript
from helpers.weights import adapter_of, same_weights
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards import format_reward

SMALL = ("--G", "4", "--prompts_per_step", "1", "--max_completion_length", "12", "--lora_rank", "4")

ANSWER = "<reasoning>\\n3 + 4 = 7\\n</reasoning>\\n<answer>\\n7\\n</answer>"


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the scripts run, outside the repository."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def run(work_dir: Path, run_script: RunScript) -> RunScript:
    """``run("train_gtpo.py", *argv)`` in ``work_dir``."""
    return functools.partial(run_script, work_dir)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(10, 60)[None]).logits


@pytest.fixture(scope="module")
def parrot(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose completions earn rewards: about half are ANSWER, the others noise."""
    return build_parrot(tiny, tmp_path_factory.mktemp("models") / "parrot", ANSWER)


# ---- contents of a run directory (five runs, one test each) ----


@pytest.fixture(scope="module")
def gtpo_run(run: RunScript, parrot: Path, work_dir: Path) -> Path:
    argv = ("--model", str(parrot), "--dataset", "arithmetic", "--max_steps", "4", "--save_steps", "2", *SMALL)
    ended = run("train_gtpo.py", *argv, "--output_dir", "runs/gtpo", "--learning_rate", "0.01")
    assert ended.stderr.count("Initial entropy") == 1
    return work_dir / "runs" / "gtpo"


@pytest.fixture(scope="module")
def grpo_run(run: RunScript, parrot: Path, work_dir: Path) -> Path:
    argv = ("--model", str(parrot), "--dataset", "arithmetic", "--max_steps", "2", *SMALL, "--beta", "0.04")
    run("train_grpo.py", *argv, "--output_dir", "runs/grpo", "--per_device_train_batch_size", "2")
    return work_dir / "runs" / "grpo"


@pytest.fixture(scope="module")
def sft_run(run: RunScript, tiny: Path, work_dir: Path) -> Path:
    argv = ("--model", str(tiny), "--dataset", "arithmetic", "--max_steps", "3", "--lora_rank", "4")
    run("train_sft.py", *argv, "--output_dir", "runs/sft", "--per_device_train_batch_size", "4")
    return work_dir / "runs" / "sft"


CURVES = {"accuracy", "formatting", "reward", "entropy", "conflict_tokens", "conflict_fraction", "completion_length"}
SPEED = {"grad_norm", "learning_rate", "step_time", "tokens_per_second", "loss"}


def assert_run_is_complete(path: Path, steps: int, metrics: set[str]) -> None:
    """The files and metrics that the README lists for a run directory."""
    assert read_settings(path / "config.yaml")["max_steps"] == steps
    assert torch.__version__.startswith(read_json(path / "environment.json")["packages"]["torch"])
    rows = metrics_of(path)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(metrics <= row.keys() for row in rows), metrics - rows[0].keys()
    assert all(math.isfinite(row[name]) for row in rows for name in metrics)
    assert (path / f"checkpoint-{steps}" / "trainer_state.json").is_file()
    assert not list(path.rglob("*.tmp")), "something unfinished is left"


def assert_adapter_is_the_trained_one(path: Path, base: Path, steps: int, changed: bool = True) -> None:
    assert same_weights(adapter_of(path / "adapter"), adapter_of(path / f"checkpoint-{steps}"))
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    model = AutoModelForCausalLM.from_pretrained(base)
    trained = logits(PeftModel.from_pretrained(model, path / "adapter").eval())
    assert torch.equal(trained, plain) is not changed
    assert AutoTokenizer.from_pretrained(path / "adapter").chat_template  # evaluation loads it from here


def assert_rewards_match(path: Path, steps: int, rows_per_step: int) -> pandas.DataFrame:
    """Score the stored samples again and compare."""
    files = sorted((path / "completions").glob("*.parquet"))
    assert len(files) == steps
    for row, file in zip(metrics_of(path), files, strict=True):
        table = pandas.read_parquet(file)
        assert len(table) == rows_per_step
        assert table["format_reward"].tolist() == format_reward(table["completion"].tolist())
        assert row["formatting"] == pytest.approx(10 * table["format_reward"].mean())
        assert row["accuracy"] == pytest.approx(10 * table["accuracy_reward"].mean())
        assert row["reward"] == pytest.approx((table["format_reward"] + table["accuracy_reward"]).mean())
    return pandas.concat(pandas.read_parquet(file) for file in files)


def test_gtpo_on_arithmetic(gtpo_run: Path, parrot: Path) -> None:
    assert_run_is_complete(gtpo_run, 4, CURVES | SPEED | {"filtered_fraction"})
    assert_adapter_is_the_trained_one(gtpo_run, parrot, 4)
    samples = assert_rewards_match(gtpo_run, 4, rows_per_step=4)
    assert set(samples["format_reward"]) == {0, 10}  # both scores occur, so there is a training signal
    assert (samples["completion"] == ANSWER).equals(samples["format_reward"] == 10)
    assert (samples["advantage"] > 0).any() and (samples["advantage"] < 0).any()
    assert (gtpo_run / "checkpoint-2").is_dir()
    config = read_settings(gtpo_run / "config.yaml")
    assert (config["per_device_train_batch_size"], config["gradient_accumulation_steps"]) == (4, 1)
    assert "kl" not in metrics_of(gtpo_run)[0]
    for row in metrics_of(gtpo_run):
        tokens = row["completion_length"] * 4
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_time"])


def test_grpo_on_arithmetic(grpo_run: Path) -> None:
    assert_run_is_complete(grpo_run, 2, CURVES | SPEED | {"kl"})
    assert_rewards_match(grpo_run, 2, rows_per_step=4)
    assert not (grpo_run / "initial_entropy.json").exists()
    config = read_settings(grpo_run / "config.yaml")
    assert (config["per_device_train_batch_size"], config["gradient_accumulation_steps"]) == (2, 2)
    assert "gamma" not in config and config["beta"] == 0.04


def test_sft_on_arithmetic(sft_run: Path, tiny: Path) -> None:
    assert_run_is_complete(sft_run, 3, {"loss", "grad_norm", "learning_rate"})
    assert_adapter_is_the_trained_one(sft_run, tiny, 3)
    # The loss of an untrained model on the completion is near ln V, with V about 500.
    assert 5 < metrics_of(sft_run)[0]["loss"] < 8


# ---- the two scripts ----


def test_launchers_that_do_not_do_what_they_say(run: RunScript) -> None:
    """vLLM of each process on the first GPU."""
    gpu = "torch.cuda.is_available, torch.cuda.get_device_capability = (lambda: True), (lambda *_: (9, 0))"
    before = f"{gpu}; os.environ['WORLD_SIZE'] = '2'"
    argv = ("--model", "llama", "--dataset", "arithmetic", "--run_name", "several")
    ended = run("train_gtpo.py", *argv, before=before, code=2)
    assert "add --backend transformers" in ended.stderr and ended.stderr.count("\n") == 1
