"""Time per step in --dry_run: measured on the first micro-batches, extrapolated, and only where everything is local."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from datasets import Dataset

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, RewardArguments, RunArguments
from gtpo.cli import parse
from gtpo.data import load_train, to_demonstrations
from gtpo.timing import describe_time
from rewards import format_reward

OURS = (DataArguments, ModelArguments, RunArguments)
CLASSES: dict[str, Any] = {
    "gtpo": (*OURS, RewardArguments, GTPOArguments, trl.GRPOConfig),
    "grpo": (*OURS, RewardArguments, trl.GRPOConfig),
    "sft": (*OURS, trl.SFTConfig),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    """The first micro-batch takes 5 s, the second 2 s."""
    ticks = iter([0.0, 5.0, 10.0, 12.0])
    monkeypatch.setattr("gtpo.timing.time", SimpleNamespace(perf_counter=lambda: next(ticks)))


def described(method: str, model: str, *flags: str, rows: Dataset | None = None) -> str:
    lengths = [] if method == "sft" else ["--max_completion_length", "8"]
    argv = ["--model", model, "--dataset", "arithmetic", "--max_steps", "120", "--dry_run", *lengths, *flags]
    settings = parse(method, CLASSES[method], argv)
    if rows is None:
        rows = load_train(settings.data, 0)
        rows = to_demonstrations(rows) if method == "sft" else rows
    return describe_time(settings, rows, [] if method == "sft" else [format_reward])


@pytest.mark.parametrize("method", CLASSES)
def test_a_step_is_its_generation_and_all_its_micro_batches(method: str, tiny: Path, clock: None) -> None:
    """5 + 2 s are measured, and two more micro-batches take 2 s each: 120 steps of 11 s."""
    flags = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]
    assert described(method, str(tiny), *flags) == (
        "# time per step: 11 s, measured on 2 of 4 micro-batches; the run: 0.4 hours\n"
    )


def test_a_step_of_one_micro_batch_is_measured_whole(
    tiny: Path, clock: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    shown = described("gtpo", str(tiny), "--per_device_train_batch_size", "8")
    assert shown == "# time per step: 5 s, measured on 1 of 1 micro-batches; the run: 0.2 hours\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [{"prompt": []}, {"prompt": [""]}], ids=["no rows", "empty rows"])
def test_without_model_or_data_nothing_is_measured(rows: dict[str, list[str]], tiny: Path, clock: None) -> None:
    dataset = Dataset.from_dict(rows)
    assert "the data set is not on this machine" in described("gtpo", str(tiny), rows=dataset)
    assert (
        described("gtpo", "owner/other-1B") == "# time per step: not measured, owner/other-1B is not on this machine\n"
    )
    assert described("gtpo", "tiny") == ""
