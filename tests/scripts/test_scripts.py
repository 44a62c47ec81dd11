"""The train scripts, run as a user runs them: the contents of the run directory."""

import math
from pathlib import Path

import pandas
import pytest
from helpers.parrot import build_parrot
from helpers.runs import metrics_of
from helpers.scripts import RunScript
from helpers.weights import adapter_of, same_weights

from gtpo.reports.html import logged_text
from rewards import format_reward

COMMON = ("--dataset", "arithmetic", "--limit", "100", "--output_dir", "run", "--lora_rank", "4")
SMALL = ("--G", "4", "--prompts_per_step", "1", "--max_completion_length", "12")

ANSWER = "<reasoning>\\n3 + 4 = 7\\n</reasoning>\\n<answer>\\n7\\n</answer>"


@pytest.fixture(scope="module")
def parrot(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose completions earn rewards: about half are ANSWER, the others noise."""
    return build_parrot(tiny, tmp_path_factory.mktemp("models") / "parrot", ANSWER)


CURVES = {"accuracy", "formatting", "reward", "entropy", "conflict_tokens", "conflict_fraction", "completion_length"}
SPEED = {"grad_norm", "learning_rate", "step_time", "tokens_per_second", "loss"}


def assert_run_is_complete(run: Path, steps: int, metrics: set[str]) -> None:
    """The metrics that the README lists, and the adapter, which is that of the last checkpoint."""
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(math.isfinite(row.get(name, math.nan)) for row in rows for name in metrics), rows
    trained = adapter_of(run / "adapter")
    assert same_weights(trained, adapter_of(run / f"checkpoint-{steps}"))
    assert any(weight.any() for name, weight in trained.items() if "lora_B" in name)  # zero before the training
    assert (run / "adapter" / "chat_template.jinja").is_file()  # evaluation loads it from here
    assert not list(run.rglob("*.tmp")), "something unfinished is left"


def assert_rewards_match(run: Path) -> pandas.DataFrame:
    """Score the stored samples again, and compare."""
    tables = [pandas.read_parquet(file) for file in sorted((run / "completions").glob("*.parquet"))]
    for row, table in zip(metrics_of(run), tables, strict=True):
        assert len(table) == 4
        assert table["format_reward"].tolist() == format_reward(table["completion"].tolist())
        means = table[["format_reward", "accuracy_reward"]].mean()
        found = row["formatting"], row["accuracy"], row["reward"]
        assert found == pytest.approx((10 * means["format_reward"], 10 * means["accuracy_reward"], means.sum()))
    return pandas.concat(tables)


def test_gtpo_on_arithmetic(parrot: Path, run_script: RunScript, tmp_path: Path) -> None:
    argv = ("--model", str(parrot), "--max_steps", "4", "--save_steps", "2", "--learning_rate", "0.01")
    ended = run_script(tmp_path, "train_gtpo.py", *argv, *COMMON, *SMALL)
    assert ended.stderr.count("Initial entropy") == 1
    run = tmp_path / "run"
    assert_run_is_complete(run, 4, CURVES | SPEED | {"filtered_fraction"})
    assert "kl" not in metrics_of(run)[0]
    assert (run / "checkpoint-2").is_dir()
    samples = assert_rewards_match(run)
    assert set(samples["format_reward"]) == {0, 10}  # both scores occur, so there is a training signal
    assert (samples["completion"].map(logged_text) == ANSWER).equals(samples["format_reward"] == 10)
    assert (samples["advantage"] > 0).any() and (samples["advantage"] < 0).any()


def test_grpo_on_arithmetic(parrot: Path, run_script: RunScript, tmp_path: Path) -> None:
    argv = ("--model", str(parrot), "--max_steps", "2", "--beta", "0.04", "--per_device_train_batch_size", "2")
    run_script(tmp_path, "train_grpo.py", *argv, *COMMON, *SMALL)
    run = tmp_path / "run"
    assert_run_is_complete(run, 2, CURVES | SPEED | {"kl"})
    assert_rewards_match(run)
    assert not (run / "initial_entropy.json").exists()


def test_sft_on_arithmetic(tiny: Path, run_script: RunScript, tmp_path: Path) -> None:
    argv = ("--model", str(tiny), "--max_steps", "3", "--per_device_train_batch_size", "4")
    run_script(tmp_path, "train_sft.py", *argv, *COMMON)
    assert_run_is_complete(tmp_path / "run", 3, {"loss", "grad_norm", "learning_rate"})
    # The loss of an untrained model on the completion is near ln V, with V about 500.
    assert 5 < metrics_of(tmp_path / "run")[0]["loss"] < 8
